"""Decoders in transformers' own code: what is described, what is refused in one line, and how strictly they load."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import GPT2Model

from chairlift import LLM
from chairlift.config import DType, EngineConfig, LoadFormat
from chairlift.engine.core import EngineCore, Pacing
from chairlift.errors import CheckpointError, ConfigurationError
from chairlift.models import load_adapted, open_checkpoint
from chairlift.models.config import AdaptedConfig
from chairlift.models.loader import count_parameters
from tests.support.checkpoints import SMALL, make_checkpoint

COHERE2 = {
    "architectures": ["Cohere2ForCausalLM"],
    "model_type": "cohere2",
    "pad_token_id": 0,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


def write(directory: Path, **fields: Any) -> Path:
    (directory / "config.json").write_text(json.dumps({**SMALL, **fields}), encoding="utf-8")
    return directory


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(directory))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{directory / 'config.json'}: ")
    return message.removeprefix(f"{directory / 'config.json'}: ")


def test_windows_scale_and_heads_are_what_the_layers_ask_attention_for(tmp_path: Path) -> None:
    config = open_checkpoint(str(write(tmp_path, **COHERE2))).config
    assert isinstance(config, AdaptedConfig)
    assert config.attention.windows == (9, None, 9)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.attention_scale) == (4, 2, 16, 0.25)
    assert config.describe() == ("Cohere2ForCausalLM: 3 layers, 4/2 heads of 16, vocabulary 320, window 9 in 2 layers")


def test_weights_are_counted_without_being_read(tmp_path: Path) -> None:
    saved = make_checkpoint(tmp_path, model_type="cohere2", pad_token_id=0)
    assert count_parameters(open_checkpoint(str(tmp_path)).config) == sum(p.numel() for p in saved.parameters())


@pytest.mark.parametrize(
    ("architecture", "fields", "said"),
    [
        (
            "MambaForCausalLM",
            {"model_type": "mamba"},
            "layers of type linear_attention are not supported",
        ),
        ("JambaForCausalLM", {"model_type": "jamba"}, "JambaForCausalLM"),
        (
            "Lfm2ForCausalLM",
            {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]},
            "Lfm2ForCausalLM's layers of type conv are not supported",
        ),
        (
            "Qwen3NextForCausalLM",
            {"model_type": "qwen3_next", "num_hidden_layers": 4},
            "Qwen3NextForCausalLM's layers of type linear_attention are not supported",
        ),
        ("T5ForConditionalGeneration", {"model_type": "t5"}, "only decoders of text are"),
        ("LlavaForConditionalGeneration", {"model_type": "llava"}, "only decoders of text are"),
        ("GptOssForCausalLM", {"model_type": "gpt_oss", "num_local_experts": 4}, "its attention has sinks"),
        ("DeepseekV3ForCausalLM", {"model_type": "deepseek_v3"}, "queries, keys and values differ in size"),
        ("FalconForCausalLM", {"model_type": "falcon"}, "its attention cannot be handed to the cache"),
        ("DiffLlamaForCausalLM", {"model_type": "diffllama"}, "6 of its 3 layers"),
        ("OwnForCausalLM", {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, "is not run"),
        ("MistralModel", {"model_type": "mistral"}, "transformers has no decoder of that name"),
        (
            "MixtralForCausalLM",
            {"model_type": "mixtral", "quantization_config": {"quant_method": "awq"}},
            "its weights are quantized with awq",
        ),
    ],
)
def test_what_the_cache_or_attention_cannot_serve_is_refused_before_anything_is_loaded(
    tmp_path: Path, architecture: str, fields: dict[str, Any], said: str
) -> None:
    assert said in refusal(write(tmp_path, architectures=[architecture], **fields))


def edit(directory: Path, missing: str = "", extra: str = "") -> Path:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    if missing:
        del tensors[missing]
    if extra:
        tensors[extra] = tensors["model.norm.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"missing": "model.norm.weight"}, "the checkpoint lacks model.norm.weight"),
        (
            {"extra": "model.norm.bias"},
            "the checkpoint has tensors that this model has no place for: model.norm.bias",
        ),
        ({"missing": "model.layers.1.block_sparse_moe.experts.2.w1.weight"}, "cannot be loaded: "),
    ],
)
def test_missing_and_leftover_tensors_are_named(tmp_path: Path, change: dict[str, str], said: str) -> None:
    make_checkpoint(tmp_path, model_type="mixtral", num_local_experts=4)
    with pytest.raises(CheckpointError) as caught:
        load_adapted(open_checkpoint(str(edit(tmp_path, **change))), DType.FLOAT32, "cpu")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_that_counts_positions_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, model_type="gpt2", pad_token_id=0)
    forward = GPT2Model.forward

    def count_alone(self: GPT2Model, position_ids: Any = None, **given: Any) -> Any:  # noqa: ARG001
        return forward(self, **given)

    monkeypatch.setattr(GPT2Model, "forward", count_alone)
    with pytest.raises(CheckpointError, match="computes positions itself"):
        load_adapted(open_checkpoint(str(tmp_path)), DType.FLOAT32, "cpu")


def test_a_window_that_is_in_masks_only_is_refused(tmp_path: Path) -> None:
    fields = {"architectures": ["CohereForCausalLM"], "model_type": "cohere", "pad_token_id": 0, "sliding_window": 9}
    assert refusal(write(tmp_path, **fields)) == "its sliding window is in its masks only, which is not supported"


def test_the_log_says_that_this_way_is_the_slower_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoint(tmp_path, model_type="cohere2", pad_token_id=0)
    with caplog.at_level(logging.INFO, "chairlift.models.loader"):
        load_adapted(open_checkpoint(str(tmp_path)), DType.FLOAT32, "cpu")
    assert caplog.messages[1].startswith("Cohere2ForCausalLM runs in transformers' own code")


class _NoRecorder:
    """Fails where a graph is to be recorded."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        raise AssertionError(f"{work} may wait for the device")


def test_its_steps_are_not_recorded_in_graphs(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, model_type="mixtral", num_local_experts=4)
    core = EngineCore(EngineConfig(model=str(tmp_path), max_batch_size=2), Pacing(1, _NoRecorder()))
    assert core.cache.max_cache_batch_size == 2  # without a scratch slot


@pytest.mark.parametrize("setting", [{"batch_invariant": True}, {"load_format": LoadFormat.DUMMY}])
def test_settings_that_need_a_family_say_so(tmp_path: Path, setting: dict[str, Any]) -> None:
    make_checkpoint(tmp_path, model_type="cohere2", pad_token_id=0)
    with pytest.raises(ConfigurationError, match=f"{next(iter(setting))}.* Cohere2ForCausalLM is in none"):
        LLM(str(tmp_path), **setting)
