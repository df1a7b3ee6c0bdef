"""Reading `config.json`: old and new spellings mean the same, and what is not supported is one clear error."""

import json
from pathlib import Path
from typing import Any

import pytest

from chairlift.config import DType
from chairlift.errors import CheckpointError
from chairlift.models.config import ModelConfig, RopeConfig, read_model_config
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
        read_model_config(directory)
    message = str(caught.value)
    assert "\n" not in message
    assert str(directory) in message
    return message


def test_a_config_is_read_in_full(tmp_path: Path) -> None:
    assert read_model_config(write(tmp_path, rms_norm_eps=1e-5, dtype="bfloat16")) == ModelConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0),
        max_position_embeddings=256,
        is_tied=False,
        has_attention_bias=False,
        has_mlp_bias=False,
        dtype=DType.BFLOAT16,
    )


def test_keys_and_values_of_a_token_are_counted_over_all_layers(tmp_path: Path) -> None:
    assert read_model_config(write(tmp_path)).kv_elements_per_token == 192  # 2 x 3 layers x 2 heads x 16


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"head_dim": 24}, "head_dim", 24),
        ({"head_dim": None}, "head_dim", 16),
        ({"num_key_value_heads": None}, "num_kv_heads", 4),
        ({"num_key_value_heads": 1}, "num_kv_heads", 1),
        ({"tie_word_embeddings": True}, "is_tied", True),
        ({"attention_bias": True}, "has_attention_bias", True),
        ({"mlp_bias": True}, "has_mlp_bias", True),
        ({"torch_dtype": "bfloat16"}, "dtype", DType.BFLOAT16),
        ({"dtype": "float16"}, "dtype", DType.FLOAT16),
        ({"dtype": None}, "dtype", DType.FLOAT32),
    ],
)
def test_fields_that_may_differ(tmp_path: Path, fields: dict[str, Any], name: str, value: object) -> None:
    assert getattr(read_model_config(write(tmp_path, **fields)), name) == value


def test_swish_is_another_name_for_silu(tmp_path: Path) -> None:
    assert read_model_config(write(tmp_path, hidden_act="swish")) == read_model_config(write(tmp_path))


LINEAR = RopeConfig(theta=500.0, kind="linear", factor=3.0)
LLAMA3 = RopeConfig(500.0, "llama3", 8.0, 1.0, 4.0, 32)


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
    assert read_model_config(write(tmp_path, **fields)).rope == rope


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
        (["MistralForCausalLM"], "MistralForCausalLM"),
        (["LlamaForSequenceClassification"], "LlamaForSequenceClassification"),
        ([], "no architecture"),
        (None, "no architecture"),
    ],
)
def test_another_architecture_is_named_beside_the_supported_one(
    tmp_path: Path, architectures: list[str] | None, said: str
) -> None:
    message = refusal(write(tmp_path, architectures=architectures))
    assert said in message
    assert message.endswith("supported: LlamaForCausalLM")


@pytest.mark.parametrize("activation", ["gelu", "relu", "swiglu"])
def test_an_unknown_activation_is_named(tmp_path: Path, activation: str) -> None:
    assert refusal(write(tmp_path, hidden_act=activation)).endswith(
        f"hidden_act {activation!r} is not supported, only silu"
    )


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "made-up"])
@pytest.mark.parametrize(
    "spelling", [("rope_scaling", "type"), ("rope_scaling", "rope_type"), ("rope_parameters", "rope_type")]
)
def test_an_unsupported_kind_of_rope_is_named_in_every_spelling(
    tmp_path: Path, kind: str, spelling: tuple[str, str]
) -> None:
    section, key = spelling
    rope = {key: kind, "factor": 2.0, "rope_theta": 500.0, "long_factor": [1.0] * 8, "short_factor": [1.0] * 8}
    message = refusal(write(tmp_path, **{section: rope}))
    assert f"rope type '{kind}' is not supported, only default, linear, llama3" in message


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "low_freq_factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor"),
    ],
)
def test_a_missing_factor_of_a_rope_is_named(tmp_path: Path, rope: dict[str, Any], said: str) -> None:
    message = refusal(write(tmp_path, rope_parameters={"rope_theta": 500.0, **rope}))
    assert said in message
    assert rope["rope_type"] in message


@pytest.mark.parametrize("dtype", ["float64", "int8", "elephant"])
def test_an_unsupported_number_format_is_named(tmp_path: Path, dtype: str) -> None:
    assert dtype in refusal(write(tmp_path, dtype=dtype))


def test_heads_that_cannot_share_keys_evenly(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, num_key_value_heads=3))
    assert message.endswith("4 attention heads cannot share 3 key/value heads")


def test_heads_that_do_not_divide_the_hidden_size(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, num_attention_heads=5, num_key_value_heads=5))
    assert "64" in message
    assert "5" in message


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_field_of_the_wrong_type_is_named_in_one_line(tmp_path: Path, field: str) -> None:
    assert field in refusal(write(tmp_path, **{field: "many"}))


def test_an_odd_head_size_cannot_be_rotated(tmp_path: Path) -> None:
    assert "head_dim" in refusal(write(tmp_path, head_dim=15))
