"""Loading checkpoints: strict about every tensor, indifferent to how the files are cut, faithful to the numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from chairlift.config import DType
from chairlift.errors import ConfigurationError
from chairlift.models import TorchForward, loader, make_dummy_model, open_checkpoint
from chairlift.models.attention.torch_sdpa import TorchBackend
from chairlift.models.config import TORCH_DTYPES
from chairlift.models.decoder import Decoder
from chairlift.models.grouped import GroupedWeight, round_to_float8
from chairlift.models.loader import count_parameters
from tests.models.support import MAX_SEQ_LEN, edit, linear, load, refusal, write_config
from tests.support.checkpoints import SMALL, make_checkpoint
from tests.support.forward_bench import Bench, Row

TINY: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48}
QUERY = "model.layers.1.self_attn.q_proj.weight"
DOWN, GATE, UP = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("down", "gate", "up"))
NORM, HEAD, EMBEDDING = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """A checkpoint in `tmp_path`, as transformers has it: 4 query and 2 key/value heads of 8."""
    return make_checkpoint(tmp_path, **TINY)


def all_logits(model: Decoder, token_ids: list[int]) -> torch.Tensor:
    """float32 `[T, vocab]`, computed in one prefill."""
    forward = TorchForward(model, TorchBackend(model.config.attention))
    return Bench(model.config, model.dtype, forward).run([Row(0, token_ids)])[0]


# What loads


def test_fused_weights_are_stacked_in_the_order_of_their_table(tmp_path: Path, saved: Any) -> None:
    weights = dict(load(tmp_path).named_parameters())
    attention, mlp = saved.model.layers[1].self_attn, saved.model.layers[1].mlp
    qkv = torch.cat([getattr(attention, f"{name}_proj").weight for name in "qkv"])
    assert torch.equal(weights["model.layers.1.self_attn.qkv_proj.weight"], qkv)
    gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
    assert torch.equal(weights["model.layers.1.mlp.gate_up_proj.weight"], gate_up)


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_weights_are_loaded_in_the_number_format_asked_for(tmp_path: Path, saved: Any, dtype: DType) -> None:
    model = load(tmp_path, dtype)
    assert {(each.dtype, each.requires_grad) for each in model.parameters()} == {(TORCH_DTYPES[dtype], False)}
    assert model.dtype == next(iter(model.ropes.values())).dtype == TORCH_DTYPES[dtype]
    assert torch.equal(model.model.norm.weight, saved.model.norm.weight.to(TORCH_DTYPES[dtype]))


def shard(directory: Path, saved: Any) -> Path:
    """The same checkpoint in small files, below."""
    saved.save_pretrained(directory / "sharded", max_shard_size="20KB")
    return directory / "sharded"


def test_a_sharded_checkpoint_equals_a_single_file(tmp_path: Path, saved: Any) -> None:
    sharded = shard(tmp_path, saved)
    assert len(open_checkpoint(str(sharded)).weight_files) > 2
    weights, expected = load(sharded).state_dict(), load(tmp_path).state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


@pytest.mark.parametrize("has_head", [False, True], ids=["without lm_head.weight", "with lm_head.weight"])
def test_a_tied_head_is_the_embedding_whether_or_not_a_copy_is_stored(tmp_path: Path, has_head: bool) -> None:
    saved = make_checkpoint(tmp_path, tie_word_embeddings=True, **TINY)
    stored = load_file(tmp_path / "model.safetensors")
    assert HEAD not in stored
    if has_head:
        edit(tmp_path, {HEAD: stored[EMBEDDING].clone()})
    model = load(tmp_path)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    theirs = saved(torch.tensor([[1, 2, 3]])).logits[0].detach()
    torch.testing.assert_close(all_logits(model, [1, 2, 3]), theirs, rtol=1e-4, atol=1e-4)


def test_rotary_tables_of_older_formats_are_ignored(tmp_path: Path, saved: Any) -> None:
    edit(tmp_path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert torch.equal(load(tmp_path).lm_head.weight, saved.lm_head.weight)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)], ids=str
)
def test_logits_are_those_of_transformers(tmp_path: Path, dtype: torch.dtype, tolerance: float) -> None:
    saved = make_checkpoint(tmp_path, dtype=dtype, **{**TINY, "attention_bias": True, "mlp_bias": True})
    checkpoint = open_checkpoint(str(tmp_path))
    token_ids = torch.randint(0, 320, (1, 30), generator=torch.Generator().manual_seed(3))
    ours = all_logits(load(tmp_path, checkpoint.config.dtype), token_ids[0].tolist())
    theirs = saved(token_ids).logits[0].detach().float()
    assert ours.dtype == dtype
    assert theirs.std() > 0.1  # or else the tolerance would mean nothing
    torch.testing.assert_close(ours.float(), theirs, rtol=tolerance, atol=tolerance)


# What does not


LACKING, LEFT = "the checkpoint lacks", "the checkpoint has tensors that this model has no place for:"
BEYOND, BIAS = "model.layers.2.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.bias"
ATTENTION = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkvo"]
SHAPES: dict[str, tuple[list[int], list[tuple[int, ...]]]] = {  # what the model needs, and what it is offered
    DOWN: ([32, 48], [(32, 47), (33, 48), (31, 48), (32,)]),
    NORM: ([32], [(31,), (1, 32), ()]),
    QUERY: ([32, 32], [(32, 31), (31, 32), (33, 32), (65, 32)]),
}


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(({name: None}, f"{LACKING} {name}") for name in (QUERY, DOWN, NORM, HEAD, EMBEDDING)),
        (dict.fromkeys(ATTENTION), f"{LACKING} {ATTENTION[1]}, {ATTENTION[3]}, {ATTENTION[0]} and 1 more"),
        *(({name: (32,)}, f"{LEFT} {name}") for name in (BEYOND, BIAS)),
        *(
            ({name: shape}, f"tensor {name} has shape {list(shape)}; the model needs {needed}")
            for name, (needed, shapes) in SHAPES.items()
            for shape in shapes
        ),
        ({GATE: (50, 32), UP: (46, 32)}, f"tensor {GATE} has shape [50, 32]; the model needs [48, 32]"),  # fit together
    ],
)
def test_a_tensor_that_is_missing_or_left_over_or_misshapen_is_named(
    tmp_path: Path, changes: dict[str, tuple[int, ...] | None], said: str
) -> None:
    edit(tmp_path, {name: None if shape is None else torch.zeros(shape) for name, shape in changes.items()})
    assert refusal(tmp_path) == said


@pytest.mark.usefixtures("saved")
def test_a_checkpoint_without_weights_says_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert refusal(tmp_path) == f"{tmp_path} lacks model.safetensors (weights must be safetensors)"


def test_a_missing_shard_is_named_and_so_is_a_tensor_that_its_shard_lacks(tmp_path: Path, saved: Any) -> None:
    sharded = shard(tmp_path, saved)
    index = json.loads((sharded / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    path = sharded / index[NORM]
    path.rename(sharded / "model.safetensors")
    assert refusal(sharded) == f"{sharded} lacks {path.name} (weights must be safetensors)"
    edit(sharded, {NORM: None})
    (sharded / "model.safetensors").rename(path)
    assert refusal(sharded) == f"the checkpoint lacks {NORM}"


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize(
    "index", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": null}', '{"weight_map": {"lm_head.weight": 3}}']
)
def test_a_damaged_index_of_shards_is_named(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    assert "model.safetensors.index.json" in refusal(tmp_path)


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_named(tmp_path: Path, share: float) -> None:
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    assert refusal(tmp_path).startswith(f"{path} is damaged or truncated: ")


# Random weights from a configuration alone


def make_config(directory: Path, **shape: Any) -> Path:
    """A directory that holds a config.json and nothing else."""
    write_config(directory, LlamaConfig(**{**SMALL, **TINY, **shape}).to_dict(), architectures=["LlamaForCausalLM"])
    return directory


def dummy(directory: Path, seed: int = 0, dtype: DType = DType.FLOAT32, *, is_float8: bool = False) -> Decoder:
    return make_dummy_model(open_checkpoint(str(directory)), dtype, "cpu", seed, MAX_SEQ_LEN, is_float8=is_float8)


def test_dummy_weights_need_a_configuration_and_depend_on_the_seed_alone(tmp_path: Path) -> None:
    model = dummy(make_config(tmp_path), dtype=DType.BFLOAT16)
    assert {(each.dtype, each.requires_grad) for each in model.parameters()} == {(torch.bfloat16, False)}
    first, again, other = (dummy(tmp_path, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first[HEAD], other[HEAD])
    assert not torch.equal(first[HEAD], first[EMBEDDING])


def test_dummy_norms_are_one_and_biases_zero(tmp_path: Path) -> None:
    weights = dummy(make_config(tmp_path, attention_bias=True, mlp_bias=True)).state_dict()
    for name in ("model.layers.1.pre_attention_norm.weight", NORM):
        assert weights[name].unique().tolist() == [1.0]
    biases = [weight for name, weight in weights.items() if name.endswith(".bias")]
    assert len(biases) == 2 * 4
    assert not any(bias.any() for bias in biases)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_model_of_dummy_weights_keeps_the_scale_of_its_activations(tmp_path: Path, is_tied: bool) -> None:
    shape = {"num_hidden_layers": 24, "hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": is_tied}
    logits = all_logits(dummy(make_config(tmp_path, **shape)), list(range(30)))
    assert logits.isfinite().all()
    assert 0.3 < logits.std() < 3.0


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 24},
    ],
)
def test_the_number_of_parameters_is_counted_from_the_configuration(tmp_path: Path, shape: dict[str, Any]) -> None:
    checkpoint = open_checkpoint(str(make_config(tmp_path, **shape)))
    parameters = list(dummy(tmp_path).parameters())
    assert count_parameters(checkpoint.config) == sum(parameter.numel() for parameter in parameters)


def test_dummy_matrices_are_rounded_to_float8_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, load_weight = [], Decoder.load_weight

    def load_alone(self: Decoder, name: str, weight: GroupedWeight) -> None:
        assert all(other.is_meta for others, other in self.named_parameters() if self.can_round(others))
        loaded.append(name)
        load_weight(self, name, weight)

    monkeypatch.setattr(Decoder, "load_weight", load_alone)
    plain, rounded = (dummy(make_config(tmp_path), is_float8=is_float8) for is_float8 in (False, True))
    assert len(loaded) == 2 * 4  # of each layer: q, k and v; o; gate and up; down
    for name in ("0.self_attn.qkv_proj", "1.mlp.down_proj"):
        grouped, expected = linear(rounded, name).grouped, round_to_float8(linear(plain, name).weight)
        assert grouped is not None
        assert torch.equal(grouped.dequantize(), expected.dequantize())
    assert torch.equal(rounded.lm_head.weight, plain.lm_head.weight)


@pytest.mark.parametrize(("is_float8", "size"), [(False, "140.62 KiB"), (True, "97.38 KiB")])
def test_no_room_for_the_weights_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_float8: bool, size: str
) -> None:
    def run_out(self: Decoder, name: str, weight: object) -> None:  # noqa: ARG001
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Decoder, "load_weight", run_out)
    monkeypatch.setattr(loader, "_set", run_out)
    with pytest.raises(ConfigurationError) as caught:
        dummy(make_config(tmp_path), is_float8=is_float8)
    assert str(caught.value) == (
        f"cpu ran out of memory for {size} of weights; stop what else uses it, or choose a smaller model"
        " or another dtype"
    )
