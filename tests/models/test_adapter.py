"""Decoders in transformers' own code: what is described, what is refused in one line, and how strictly they load."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Model

from chairlift import LLM
from chairlift.config import DType, EngineConfig, LoadFormat
from chairlift.engine.core import EngineCore
from chairlift.engine.parts import Pacing, Parts
from chairlift.errors import ConfigurationError
from chairlift.models import load_adapted, open_checkpoint
from chairlift.models.config import AdaptedConfig
from chairlift.models.loader import count_parameters
from tests.models.support import edit, refusal, write_config
from tests.support.checkpoints import SMALL, make_checkpoint

LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
COHERE2 = {"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "pad_token_id": 0, "sliding_window": 9}

MAPS = Path("/proc/self/maps")


def load(path: str) -> object:
    return load_adapted(open_checkpoint(path), DType.FLOAT32, "cpu")


def test_windows_scale_and_heads_are_what_the_layers_ask_attention_for(tmp_path: Path) -> None:
    config = open_checkpoint(write_config(tmp_path, SMALL, COHERE2, layer_types=LAYERS)).config
    assert isinstance(config, AdaptedConfig)
    assert [block.window for block in config.attention_blocks.values()] == [9, None, 9]
    for block in config.attention_blocks.values():
        assert (block.num_heads, block.num_kv_heads, block.head_dim, block.scale) == (4, 2, 16, 0.25)
    assert config.describe() == "Cohere2ForCausalLM: 3 layers, 4/2 heads of 16, vocabulary 320, window 9 in 2 layers"


def test_weights_are_counted_without_being_read(tmp_path: Path) -> None:
    saved = make_checkpoint(tmp_path, model_type="cohere2", pad_token_id=0)
    assert count_parameters(open_checkpoint(str(tmp_path)).config) == sum(p.numel() for p in saved.parameters())


UNSUPPORTED = "'s layers of type {} are not supported"


@pytest.mark.parametrize(
    ("architecture", "fields", "said"),
    [
        ("Mamba", {}, "layers of type linear_attention are not supported"),
        ("Jamba", {}, "JambaForCausalLM"),
        (
            *("MiniMax", {"num_local_experts": 2, "layer_types": ["linear_attention", *["full_attention"] * 2]}),
            "MiniMaxForCausalLM" + UNSUPPORTED.format("linear_attention"),
        ),
        ("T5ForConditionalGeneration", {"model_type": "t5"}, "only decoders of text are"),
        ("LlavaForConditionalGeneration", {"model_type": "llava"}, "only decoders of text are"),
        *((name, {}, "attend through transformers' interface") for name in ("Falcon", "GPTJ", "Rwkv")),
        ("CodeGen", {"rotary_dim": 8, "n_embd": 64, "n_head": 4}, "attend through transformers' interface"),
        ("Falcon", {"alibi": True}, "adds a bias for each distance (alibi)"),
        ("Bloom", {}, "adds a bias for each distance (alibi)"),
        ("Mpt", {"d_model": 64, "n_heads": 4, "n_layers": 3}, "adds a bias for each distance (alibi)"),
        ("Doge", {}, "is not causal, or has a mask of its own"),
        ("JetMoe", {}, "depends on values while it routes tokens"),
        ("DiffLlama", {}, "its 3 layers attend 6 times"),
        ("Helium", {"head_dim": 128}, "cannot be run with these sizes"),
        (
            "Apertus",
            {"rope_parameters": {"rope_type": "su"}},
            "cannot be built from it by transformers (KeyError",
        ),
        ("Own", {"auto_map": {"AutoConfig": "own.Own"}}, "is not run"),
        ("CohereModel", {"model_type": "cohere"}, "transformers has no decoder of that name"),
        ("Phimoe", {"quantization_config": {"quant_method": "awq"}}, "its weights are quantized with awq"),
        (
            *("Cohere", {"pad_token_id": 0, "sliding_window": 9}),
            "its sliding window is in its masks only",
        ),
        ("Phimoe", {"max_position_embeddings": -64}, "max_position_embeddings must be at least 1, not -64"),
        *(
            ("Starcoder2", {"sliding_window": window}, "sliding_window must be a whole number")
            for window in (-65535, 2**31)
        ),
    ],
)
def test_what_the_cache_or_attention_cannot_serve_is_refused_before_anything_is_loaded(
    tmp_path: Path, architecture: str, fields: dict[str, Any], said: str
) -> None:
    """`model_type` is the architecture in small letters, and its class ends in ForCausalLM, unless stated."""
    name = architecture if architecture.endswith(("Generation", "Model")) else f"{architecture}ForCausalLM"
    path = write_config(tmp_path, SMALL, {"architectures": [name], "model_type": architecture.lower()}, fields)
    message = refusal(path, open_checkpoint)
    assert said in message
    assert message.startswith(f"{path}/config.json: ")


@pytest.mark.parametrize("window", [256, 1000])
def test_a_window_that_covers_the_context_is_no_obstacle(tmp_path: Path, window: int) -> None:
    phimoe = {"architectures": ["PhimoeForCausalLM"], "model_type": "phimoe", "num_local_experts": 4}
    config = open_checkpoint(write_config(tmp_path, SMALL, phimoe, sliding_window=window)).config
    assert [block.window for block in config.attention_blocks.values()] == [None] * 3
    assert "in its masks only" in refusal(write_config(tmp_path, SMALL, phimoe, sliding_window=255), open_checkpoint)


@pytest.mark.parametrize(
    ("name", "is_missing", "said"),
    [
        ("model.norm.weight", True, "the checkpoint lacks model.norm.weight"),
        ("model.norm.scale", False, "the checkpoint has tensors that this model has no place for: model.norm.scale"),
        ("model.layers.1.block_sparse_moe.experts.2.w1.weight", True, "cannot be loaded: "),
    ],
)
def test_missing_and_leftover_tensors_are_named(tmp_path: Path, name: str, is_missing: bool, said: str) -> None:
    make_checkpoint(tmp_path, model_type="phimoe", pad_token_id=0, num_local_experts=4)
    edit(tmp_path, {name: None if is_missing else torch.ones(64)})
    assert said in refusal(tmp_path, load)


@pytest.mark.skipif(not MAPS.is_file(), reason="only Linux lists what a process has mapped")
def test_its_files_are_copied_and_not_mapped(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, model_type="cohere2", pad_token_id=0, dtype=torch.bfloat16)
    model = load_adapted(open_checkpoint(str(tmp_path)), DType.BFLOAT16, "cpu")
    assert str(tmp_path) not in MAPS.read_text(encoding="utf-8")
    assert model.dtype == torch.bfloat16


def test_a_model_that_counts_positions_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, model_type="gpt2", pad_token_id=0)
    forward = GPT2Model.forward

    def count_alone(self: GPT2Model, position_ids: Any = None, **given: Any) -> Any:  # noqa: ARG001
        return forward(self, **given)

    monkeypatch.setattr(GPT2Model, "forward", count_alone)
    assert "computes positions itself" in refusal(tmp_path, load)


def test_the_log_says_that_this_way_is_the_slower_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoint(tmp_path, model_type="cohere2", pad_token_id=0)
    with caplog.at_level(logging.INFO, "chairlift.models.loader"):
        load(str(tmp_path))
    assert caplog.messages[1].startswith("Cohere2ForCausalLM runs in transformers' own code")


class _NoRecorder:
    """Fails where a graph is to be recorded."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        raise AssertionError(f"{work} may wait for the device")


def test_its_steps_are_not_recorded_in_graphs(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, model_type="phimoe", pad_token_id=0, num_local_experts=4)
    core = EngineCore(EngineConfig(model=str(tmp_path), max_batch_size=2), Parts(pacing=Pacing(1, _NoRecorder())))
    assert core.cache.max_cache_batch_size == 2  # without a scratch slot


@pytest.mark.parametrize("setting", [{"batch_invariant": True}, {"load_format": LoadFormat.DUMMY}])
def test_settings_that_need_a_family_say_so(tmp_path: Path, setting: dict[str, Any]) -> None:
    make_checkpoint(tmp_path, model_type="cohere2", pad_token_id=0)
    with pytest.raises(ConfigurationError, match=f"{next(iter(setting))}.* Cohere2ForCausalLM is in none"):
        LLM(str(tmp_path), **setting)
