"""Reading `config.json`: old and new spellings mean the same, and what is not supported is one clear error."""

import json
from pathlib import Path
from typing import Any

import pytest

from chairlift.config import DType
from chairlift.errors import CheckpointError
from chairlift.models.checkpoint import open_checkpoint
from chairlift.models.config import (
    Activation,
    LayerConfig,
    ModelConfig,
    Norms,
    QKNorm,
    RopeConfig,
)
from tests.support.checkpoints import SMALL

LLAMA: dict[str, Any] = {**SMALL, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
LLAMA3_FACTORS: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def write(directory: Path, **fields: Any) -> Path:
    (directory / "config.json").write_text(json.dumps({**LLAMA, **fields}), encoding="utf-8")
    return directory


def refusal(directory: Path) -> str:
    """The message of the refusal: one line that says which file is meant."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(directory))
    message = str(caught.value)
    assert "\n" not in message
    assert str(directory) in message
    return message


def test_a_config_is_read_in_full(tmp_path: Path) -> None:
    assert open_checkpoint(str(write(tmp_path, rms_norm_eps=1e-5, dtype="bfloat16"))).config == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        layers=(LayerConfig(RopeConfig(theta=10000.0)),) * 3,
        attention_scale=0.25,
        max_position_embeddings=256,
        is_tied=False,
        dtype=DType.BFLOAT16,
    )


def test_keys_and_values_of_a_token_are_counted_over_all_layers(tmp_path: Path) -> None:
    assert open_checkpoint(str(write(tmp_path))).config.kv_elements_per_token == 192  # 2 x 3 layers x 2 heads x 16


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"head_dim": 24}, "head_dim", 24),
        ({"head_dim": None}, "head_dim", 16),
        ({"num_key_value_heads": None}, "num_kv_heads", 4),
        ({"num_key_value_heads": 1}, "num_kv_heads", 1),
        ({"tie_word_embeddings": True}, "is_tied", True),
        ({"attention_bias": True}, "has_qkv_bias", True),
        ({"attention_bias": True}, "has_output_bias", True),
        ({"hidden_act": "swish"}, "activation", Activation.SILU),
        ({"hidden_act": "gelu_pytorch_tanh"}, "activation", Activation.GELU_TANH),
        ({"mlp_bias": True}, "has_mlp_bias", True),
        ({"torch_dtype": "bfloat16"}, "dtype", DType.BFLOAT16),
        ({"dtype": "float16"}, "dtype", DType.FLOAT16),
        ({"dtype": None}, "dtype", DType.FLOAT32),
    ],
)
def test_fields_that_may_differ(tmp_path: Path, fields: dict[str, Any], name: str, value: object) -> None:
    assert getattr(open_checkpoint(str(write(tmp_path, **fields))).config, name) == value


LINEAR = RopeConfig(500.0, "linear", (("factor", 3.0),))
LLAMA3 = RopeConfig(500.0, "llama3", tuple(sorted(LLAMA3_FACTORS.items())))


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope_theta": 500.0}, RopeConfig(theta=500.0)),
        ({"rope_theta": 500.0, "rope_scaling": None}, RopeConfig(theta=500.0)),
        ({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 3.0}}, LINEAR),
        ({"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 3.0}}, LINEAR),
        ({"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3_FACTORS}}, LLAMA3),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, RopeConfig(theta=500.0)),
        ({"rope_parameters": {"rope_theta": 500.0}}, RopeConfig(theta=500.0)),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}}, LINEAR),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3_FACTORS}}, LLAMA3),
        ({}, RopeConfig(theta=10000.0)),
    ],
)
def test_rotary_settings_of_old_and_new_configs(tmp_path: Path, fields: dict[str, Any], rope: RopeConfig) -> None:
    assert open_checkpoint(str(write(tmp_path, **fields))).config.layers == (LayerConfig(rope),) * 3


# Families


def layers_of(directory: Path, **fields: Any) -> list[tuple[str | None, int | None]]:
    """The kind of rope and the window of each layer."""
    layers = open_checkpoint(str(write(directory, **fields))).config.layers
    return [(layer.rope.kind if layer.rope else None, layer.window) for layer in layers]


def test_a_window_may_be_everywhere_or_in_some_layers(tmp_path: Path) -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 9}
    assert layers_of(tmp_path, **mistral) == [("default", 9)] * 3
    qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 9, "max_window_layers": 1}
    assert layers_of(tmp_path, **qwen, use_sliding_window=False) == [("default", None)] * 3
    assert layers_of(tmp_path, **qwen, use_sliding_window=True) == [("default", None), ("default", 9), ("default", 9)]
    assert layers_of(tmp_path, sliding_window=9) == [("default", None)] * 3  # a Llama has none


def test_layers_without_rope_are_listed(tmp_path: Path) -> None:
    smollm = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layers": [1, 0, 1]}
    assert layers_of(tmp_path, **smollm) == [("default", None), (None, None), ("default", None)]


GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 9,
    "sliding_window_pattern": 3,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "query_pre_attn_scalar": 64,
}


def test_of_a_gemma_norms_stand_on_both_sides_and_rope_has_two_bases(tmp_path: Path) -> None:
    config = open_checkpoint(str(write(tmp_path, **GEMMA3))).config
    assert isinstance(config, ModelConfig)
    local = LayerConfig(RopeConfig(1e4), 9)
    assert config.layers == (local, local, LayerConfig(RopeConfig(1e6)))
    assert (config.norms, config.qk_norm) == (Norms.PRE_AND_POST, QKNorm.HEAD)
    assert (config.attention_scale, config.embedding_scale) == (0.125, 8.0)


def test_a_yarn_or_dynamic_rope_makes_room_for_more_positions(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    stretched = open_checkpoint(str(write(tmp_path, rope_parameters=yarn))).config
    assert (stretched.max_position_embeddings, stretched.unscaled_positions) == (1024, 1024)
    dynamic = open_checkpoint(str(write(tmp_path, rope_parameters={"rope_type": "dynamic", "factor": 4.0}))).config
    assert (dynamic.max_position_embeddings, dynamic.unscaled_positions) == (1024, 256)


def test_a_config_is_described_in_one_line(tmp_path: Path) -> None:
    assert open_checkpoint(str(write(tmp_path, **GEMMA3))).config.describe() == (
        "Gemma3ForCausalLM: 3 layers, 4/2 heads of 256, vocabulary 320, rope default, window 9 in 2 layers"
    )


# Refusals


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path} has no config.json"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"3", b'"text"', b"\xff\xfe\x00"])
def test_a_file_that_is_no_json_object(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert "config.json" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("architectures", "said"),
    [
        (["MadeUpForCausalLM"], "MadeUpForCausalLM is not supported: transformers has no decoder of that name"),
        (["LlamaForSequenceClassification"], "LlamaForSequenceClassification is not supported: transformers has no"),
        ([], "it names no architecture"),
        (None, "it names no architecture"),
    ],
)
def test_an_architecture_that_is_no_decoder_is_named(
    tmp_path: Path, architectures: list[str] | None, said: str
) -> None:
    assert said in refusal(write(tmp_path, architectures=architectures))


@pytest.mark.parametrize("kind", ["proportional", "su", "made-up"])
@pytest.mark.parametrize(
    "spelling", [("rope_scaling", "type"), ("rope_scaling", "rope_type"), ("rope_parameters", "rope_type")]
)
def test_an_unsupported_kind_of_rope_is_named_in_every_spelling(
    tmp_path: Path, kind: str, spelling: tuple[str, str]
) -> None:
    section, key = spelling
    rope = {key: kind, "factor": 2.0, "rope_theta": 500.0, "long_factor": [1.0] * 8, "short_factor": [1.0] * 8}
    message = refusal(write(tmp_path, **{section: rope}))
    assert f"rope type '{kind}' is not supported, only default, dynamic, linear, llama3, longrope, yarn" in message


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "dynamic"}, "factor"),
        ({"rope_type": "yarn"}, "factor"),
        ({"rope_type": "longrope", "long_factor": [1.0] * 8}, "short_factor"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "low_freq_factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor"),
    ],
)
def test_a_missing_factor_of_a_rope_is_named(tmp_path: Path, rope: dict[str, Any], said: str) -> None:
    message = refusal(write(tmp_path, rope_parameters={"rope_theta": 500.0, **rope}))
    assert said in message
    assert rope["rope_type"] in message


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window must be at least 1, not 0"),
        ({"attention_chunk_size": 128}, "attention_chunk_size is not supported"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({**GEMMA3, "layer_types": ["full_attention", "linear_attention", "full_attention"]}, "'linear_attention'"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}, "rope type 'mrope'"),
        *(
            ({"hidden_act": name}, f"activation '{name}' is not supported, only silu, swish, gelu_pytorch_tanh, gelu")
            for name in ("gelu", "relu", "swiglu")
        ),
        *(({"dtype": name}, name) for name in ("float64", "int8", "elephant")),
        *(
            ({"quantization_config": {"quant_method": name, "bits": 4}}, f"quantized with {name}, which cannot be read")
            for name in ("fp8", "bitsandbytes", "hqq")
        ),
        *(({name: "many"}, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "64"),
        ({"head_dim": 15}, "head_dim"),
    ],
)
def test_what_cannot_be_computed_as_it_says_is_named(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    assert said in refusal(write(tmp_path, **fields))
