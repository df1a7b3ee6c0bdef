"""Reading `config.json`: old and new spellings mean the same, and what is not supported is one clear error."""

from pathlib import Path
from typing import Any

import pytest

from chairlift.config import DType
from chairlift.models.blocks import Activation, AttentionBlock, DenseMLPBlock, Norms, QKNorm
from chairlift.models.checkpoint import open_checkpoint
from chairlift.models.config import ModelConfig
from chairlift.models.rotary import RopeConfig
from tests.models.support import refusal, write_config
from tests.support.checkpoints import SMALL
from tests.support.shapes import Positions, attention_of, positions_of

LLAMA = {**SMALL, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
FACTORS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def read(directory: Path, **fields: Any) -> ModelConfig:
    """Returns what is read of a Llama's config with these fields."""
    config = open_checkpoint(write_config(directory, LLAMA, fields)).config
    assert isinstance(config, ModelConfig)
    return config


def test_a_config_is_read_in_full(tmp_path: Path) -> None:
    config = read(tmp_path, rms_norm_eps=1e-5, dtype="bfloat16")
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=320,
        hidden_size=64,
        rms_norm_eps=1e-5,
        layers=(
            (
                AttentionBlock(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, rope=RopeConfig(theta=10000.0)),
                DenseMLPBlock(intermediate_size=96),
            ),
        )
        * 3,
        max_position_embeddings=256,
        is_tied=False,
        dtype=DType.BFLOAT16,
    )
    assert config.token_bytes(DType.BFLOAT16) == 384  # 2 x 3 layers x 2 heads x 16, of two bytes


def with_rope(*rope: Any) -> tuple[Positions, ...]:
    return (Positions(RopeConfig(500.0, *rope)),) * 3


PLAIN, LINEAR = with_rope(), with_rope("linear", (("factor", 3.0),))
LLAMA3 = with_rope("llama3", tuple(sorted(FACTORS.items())))


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
        ({"mlp_bias": True}, "has_bias", True),
        ({"torch_dtype": "bfloat16"}, "dtype", DType.BFLOAT16),
        ({"dtype": "float16"}, "dtype", DType.FLOAT16),
        ({"dtype": None}, "dtype", DType.FLOAT32),
    ],
)
def test_fields_of_old_and_new_configs(tmp_path: Path, fields: dict[str, Any], name: str, value: object) -> None:
    config = read(tmp_path, **fields)
    for layer in config.layers:
        described = [each for each in (config, *layer) if hasattr(each, name)]
        assert [getattr(each, name) for each in described] == [value]


@pytest.mark.parametrize(
    ("fields", "positions"),
    [
        ({"rope_theta": 500.0}, PLAIN),
        ({"rope_theta": 500.0, "rope_scaling": None}, PLAIN),
        ({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 3.0}}, LINEAR),
        ({"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 3.0}}, LINEAR),
        ({"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **FACTORS}}, LLAMA3),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, PLAIN),
        ({"rope_parameters": {"rope_theta": 500.0}}, PLAIN),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}}, LINEAR),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **FACTORS}}, LLAMA3),
    ],
)
def test_rope_of_old_and_new_configs(tmp_path: Path, fields: dict[str, Any], positions: tuple[Positions, ...]) -> None:
    assert positions_of(read(tmp_path, **fields)) == positions


# Families

QWEN = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 9, "max_window_layers": 1}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 9}
SMOLLM = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layers": [1, 0, 1]}
DEFAULT, WITHIN_9 = ("default", None), ("default", 9)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        (MISTRAL, [WITHIN_9] * 3),
        ({**QWEN, "use_sliding_window": False}, [DEFAULT] * 3),
        ({**QWEN, "use_sliding_window": True}, [DEFAULT, WITHIN_9, WITHIN_9]),
        ({"sliding_window": 9}, [DEFAULT] * 3),  # a Llama has none
        (SMOLLM, [DEFAULT, (None, None), DEFAULT]),
    ],
)
def test_windows_and_rope_may_be_everywhere_or_in_some_layers(
    tmp_path: Path, fields: dict[str, Any], layers: list[tuple[str | None, int | None]]
) -> None:
    assert [(each.rope and each.rope.kind, each.window) for each in positions_of(read(tmp_path, **fields))] == layers


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
    config = read(tmp_path, **GEMMA3)
    local = Positions(RopeConfig(1e4), 9)
    assert positions_of(config) == (local, local, Positions(RopeConfig(1e6)))
    attention = attention_of(config)
    assert (config.norms, attention.qk_norm) == (Norms.PRE_AND_POST, QKNorm.HEAD)
    assert (attention.scale, config.embedding_scale) == (0.125, 8.0)
    assert config.describe() == (
        "Gemma3ForCausalLM: 3 layers, 4/2 heads of 256, vocabulary 320, rope default, window 9 in 2 layers"
    )


def test_a_yarn_or_dynamic_rope_makes_room_for_more_positions(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    for rope, unscaled in ((yarn, 1024), ({"rope_type": "dynamic", "factor": 4.0}, 256)):
        stretched = read(tmp_path, rope_parameters=rope)
        assert (stretched.max_position_embeddings, stretched.unscaled_positions) == (1024, unscaled)


# Refusals


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    assert refusal(tmp_path, open_checkpoint) == f"{tmp_path} has no config.json"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"3", b'"text"', b"\xff\xfe\x00"])
def test_a_file_that_is_no_json_object(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert str(tmp_path / "config.json") in refusal(tmp_path, open_checkpoint)


ROPES = "only default, dynamic, linear, llama3, longrope, proportional, yarn"
LONG = {"factor": 2.0, "rope_theta": 500.0, "long_factor": [1.0] * 8, "short_factor": [1.0] * 8}
INCOMPLETE: list[tuple[str, dict[str, Any], str]] = [
    ("linear", {}, "factor"),
    ("dynamic", {}, "factor"),
    ("yarn", {}, "factor"),
    ("longrope", {"long_factor": [1.0] * 8}, "short_factor"),
    ("llama3", {"factor": 8.0, "high_freq_factor": 4.0}, "low_freq_factor"),
    ("llama3", {"factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor"),
]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"architectures": ["MadeUpForCausalLM"]},
            "MadeUpForCausalLM is not supported: transformers has no decoder of",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification is not supported"),
        ({"architectures": []}, "it names no architecture"),
        ({"architectures": None}, "it names no architecture"),
        *(
            ({section: {**LONG, key: kind}}, f"rope type '{kind}' is not supported, {ROPES}")
            for section, key in (
                ("rope_scaling", "type"),
                ("rope_scaling", "rope_type"),
                ("rope_parameters", "rope_type"),
            )
            for kind in ("axial", "su", "made-up")
        ),
        *(
            ({"rope_parameters": {"rope_theta": 500.0, "rope_type": kind, **given}}, f"='{kind}': {{'{missing}'}}")
            for kind, given, missing in INCOMPLETE
        ),
        *(
            (
                {"architectures": ["MistralForCausalLM"], "sliding_window": window},
                f"sliding_window must be a whole number from 1 to 2147483647, not {window}",
            )
            for window in (0, -3, 2**31, 2**40 + 1)
        ),
        *(
            (
                {"architectures": [f"{kind}ForCausalLM"], name: value},
                f"{name} must be a positive number, not {value}"[:70],
            )
            for kind, name in (
                *(("Granite", name) for name in ("attention_multiplier", "residual_multiplier", "logits_scaling")),
                *(("Gemma2", name) for name in ("query_pre_attn_scalar",)),
            )
            for value in (0, -1, 10**400)
        ),
        ({"attention_chunk_size": 128}, "attention_chunk_size is not supported"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"architectures": ["LlamaModel"], "is_causal": False}, "is_causal false is not supported: here a token sees"),
        ({"architectures": ["BertModel"], "model_type": "bert"}, "BertModel is not supported: transformers has no dec"),
        ({**GEMMA3, "layer_types": ["full_attention", "linear_attention", "full_attention"]}, "'linear_attention'"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}, "rope type 'mrope'"),
        *(
            ({"hidden_act": name}, f"activation '{name}' is not supported, only silu, swish, gelu_pytorch_tanh, gelu")
            for name in ("gelu", "relu", "swiglu")
        ),
        *(({"dtype": name}, name) for name in ("float64", "int8", "elephant")),
        *(
            ({"quantization_config": {"quant_method": name, "bits": 4}}, f"quantized with {name}, which cannot be read")
            for name in ("bitsandbytes", "hqq")
        ),
        *(({name: "many"}, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "64"),
        ({"head_dim": 15}, "head_dim"),
    ],
)
def test_what_cannot_be_computed_as_it_says_is_named(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    message = refusal(write_config(tmp_path, LLAMA, fields), open_checkpoint)
    assert said in message
    assert message.startswith(str(tmp_path / "config.json"))
