"""A model that is divided over ranks: what each reads, and that together they compute what one does.

Ranks are threads here, which torch's collectives take for processes.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from chairlift.config import DType, EngineConfig
from chairlift.engine.core import EngineCore
from chairlift.errors import CheckpointError, ConfigurationError
from chairlift.models import TorchForward, load_model, open_checkpoint, stored
from chairlift.models.attention.torch_sdpa import TorchBackend
from chairlift.models.decoder import Decoder
from chairlift.models.file_bytes import FileBytes
from chairlift.models.parallel import CheckpointPart, Group, find_split_obstacle
from chairlift.models.safetensors_header import read_places
from tests.models.support import read_config, write_config
from tests.support.checkpoints import make_checkpoint, random_prompts
from tests.support.forward_bench import SLOT_LEN, Bench, Row
from tests.support.gguf_files import Kind, write_model

Result = TypeVar("Result")

GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}
GEMMA = {
    "sliding_window": 24,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 1.5,
    "query_pre_attn_scalar": 24,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama, biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "vocab_size": 317},
    "qwen2, tied": {"model_type": "qwen2", "tie_word_embeddings": True, "vocab_size": 317},
    "qwen3, norms of heads": {"model_type": "qwen3", "tie_word_embeddings": True},
    "olmo2, norms of all heads": {"model_type": "olmo2"},
    "phi3, fused": {"model_type": "phi3", "pad_token_id": 0},
    "granite, multipliers": {"model_type": "granite", **GRANITE},
    "gemma2, caps": {"model_type": "gemma2", "tie_word_embeddings": True, **GEMMA},
}


def on_ranks(size: int, run: Callable[[Group], Result]) -> list[Result]:
    """Returns what each rank returns, in order."""
    store, device, timeout = HashStore(), torch.device("cpu"), timedelta(seconds=60)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: run(Group(rank, size, store, device, timeout)), range(size)))


def load_part(path: Path, group: Group) -> Decoder:
    part = CheckpointPart.of(open_checkpoint(str(path)), group)
    model = load_model(part, DType.FLOAT32, "cpu", SLOT_LEN)
    part.connect(model)
    return model


def logits_of(model: Decoder) -> torch.Tensor:
    """Logits `[tokens, vocab]` of a prompt, a prompt beside a decoding row, and two decoding rows."""
    first, second = random_prompts(6, [40, 30], 317)
    bench = Bench(model.config, model.dtype, TorchForward(model, TorchBackend(model.config.attention)))
    steps = [[Row(3, first)], [Row(3, [7]), Row(1, second)], [Row(1, [8]), Row(3, [9])]]
    return torch.cat([logits for rows in steps for logits in bench.run(rows)])


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_compute_together_what_one_computes(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, seed=3, **{"head_dim": 16, **FAMILIES[family]})
    whole = logits_of(load_model(open_checkpoint(str(tmp_path)), DType.FLOAT32, "cpu", SLOT_LEN))
    assert whole.std() > 0.05  # or else there would be nothing to compare
    for size in (2, 4):  # with 4, two ranks have the same key/value head
        first, *others = on_ranks(size, lambda group: logits_of(load_part(tmp_path, group)))
        torch.testing.assert_close(first, whole, rtol=1e-4, atol=1e-5)
        assert all(torch.equal(other, first) for other in others)


def test_a_rank_has_its_share_and_reads_no_more_than_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, num_hidden_layers=1, vocab_size=317)
    first, last = on_ranks(2, lambda group: shapes_of(load_part(tmp_path, group)))
    assert (
        first
        == last
        == {
            "embed_tokens": [159, 64],
            "qkv_proj": [64, 64],  # of 4 and twice 2 heads, 2 and twice 1
            "o_proj": [64, 32],
            "gate_up_proj": [96, 64],  # of twice 96 rows
            "down_proj": [64, 48],
            "pre_attention_norm": [64],
            "pre_mlp_norm": [64],
            "norm": [64],
            "lm_head": [159, 64],
        }
    )
    read: list[tuple[int, int]] = []

    class Watched(FileBytes):
        """A file that notes from where how many bytes are read."""

        def read_into(self, place: torch.Tensor, offset: int) -> None:
            read.append((offset, len(place)))
            super().read_into(place, offset)

    monkeypatch.setattr(stored, "FileBytes", Watched)
    on_ranks(2, lambda group: load_part(tmp_path, group) if group.rank else None)
    sizes: dict[str, int] = {}  # in elements of four bytes
    for name, place in read_places(tmp_path / "model.safetensors").items():
        within = [size for offset, size in read if place.offset <= offset < place.offset + place.num_bytes]
        sizes[name.removeprefix("model.").removeprefix("layers.0.")] = sum(within) // 4
    assert sizes["embed_tokens.weight"] == 158 * 64
    assert sizes["self_attn.k_proj.weight"] == 16 * 64
    assert sizes["self_attn.o_proj.weight"] == 64 * 32
    assert sum(sizes.values()) == 2 * 158 * 64 + 2 * 64 * 32 + 2 * 16 * 64 + 3 * 48 * 64 + 3 * 64


def shapes_of(model: Decoder) -> dict[str, list[int]]:
    return {name.split(".")[-2]: list(parameter.shape) for name, parameter in model.named_parameters()}


def test_a_tensor_of_another_size_is_refused_by_every_rank(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, num_attention_heads=4, num_key_value_heads=4)
    write_config(tmp_path, read_config(tmp_path), num_key_value_heads=2)
    with pytest.raises(CheckpointError, match=r"k_proj.weight has shape \[64, 64\]; the model needs 32 in dimension 0"):
        on_ranks(2, lambda group: load_part(tmp_path, group))


@pytest.mark.parametrize(
    ("size", "shape", "obstacle"),
    [
        *((size, {}, None) for size in (2, 4)),
        *((size, {}, "its 4 attention heads cannot be divided by that") for size in (3, 8)),
        (2, {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}, "its 3 key/value heads"),
        (4, {"intermediate_size": 98}, "the 98 inner features of its MLPs cannot be divided by that"),
        (2, {"model_type": "gpt_neox"}, "GPTNeoXForCausalLM is none of the families"),
    ],
)
def test_what_cannot_be_divided_is_said(tmp_path: Path, size: int, shape: dict[str, Any], obstacle: str | None) -> None:
    make_checkpoint(tmp_path, num_hidden_layers=1, **shape)
    found = find_split_obstacle(open_checkpoint(str(tmp_path)), size)
    assert found == obstacle or (obstacle and found and found.startswith(obstacle))


def test_a_gguf_file_cannot_be_divided_and_what_can_is_said(tmp_path: Path) -> None:
    path = write_model(make_checkpoint(tmp_path, num_hidden_layers=1), tmp_path / "file" / "model.gguf", Kind.Q8_0)
    with pytest.raises(ConfigurationError) as caught:
        EngineCore(EngineConfig(model=str(path), tensor_parallel_size=2))
    assert str(caught.value) == (
        "tensor_parallel_size 2 does not work with this model: it is a GGUF file, which one process reads; choose"
        " safetensors in bfloat16, float16 or float32, or leave it out"
    )
