"""A plain Llama's, Qwen's or Gemma's config is read without transformers, as transformers reads it, or left to it."""

from typing import Any

import pytest
import transformers

from chairlift.models.plain_config import read_plain_config

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 300,
}
READ = {
    "nothing but sizes": SMALL,
    "heads of their own": {**SMALL, "head_dim": 32, "num_key_value_heads": 2, "dtype": "bfloat16"},
    "today's rope": {**SMALL, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "torch_dtype": "float16"},
    "an older rope": {**SMALL, "rope_theta": 1e6, "rope_scaling": None, "num_key_value_heads": None},
    "a tied head with biases": {**SMALL, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
}
QWEN = {
    **SMALL,
    "model_type": "qwen2",
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_theta": 1e6,
}
WINDOWS = {"use_sliding_window": False, "sliding_window": 100, "max_window_layers": 1}
READ_OF_QWEN = {
    "sizes": QWEN,
    "windows that are off": {**QWEN, **WINDOWS, "layer_types": ["full_attention"] * 2},
    "what a GGUF file says": {**QWEN, "attention_bias": True, "mlp_bias": False, "rms_norm_eps": 1e-5},
}
ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA = {
    **{name: value for name, value in QWEN.items() if name != "rope_theta"},
    "model_type": "gemma3_text",
    "head_dim": 32,
    "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 16,
    "query_pre_attn_scalar": 32,
    "rope_parameters": ROPES,
}
LEFT_OF_GEMMA = {
    "one rope": {"rope_parameters": ROPES["full_attention"]},
    "a scaled rope": {"rope_parameters": {**ROPES, "full_attention": {"rope_type": "linear", "factor": 8.0}}},
    "no types of layers": {"layer_types": None},
    "no window": {"sliding_window": None},
    "another activation": {"hidden_activation": "silu"},
    "a cap that is no number": {"final_logit_softcapping": "30"},
}
LEFT_OF_QWEN = {
    "windows": {**WINDOWS, "use_sliding_window": True},
    "layers of another type": {"layer_types": ["full_attention", "sliding_attention"]},
    "no size of keys": {"num_key_value_heads": None},
    "no rope": {"rope_theta": 1e6, "rope_parameters": {"rope_type": "linear"}},
}
LEFT = {
    "an unknown field": {"window": 3},
    "a scaled rope": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "two ropes": {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e4}},
    "a size that is no number": {"hidden_size": "64"},
    "a size that is true": {"num_hidden_layers": True},
    "heads that do not divide it": {"num_attention_heads": 3},
    "no heads": {"num_attention_heads": 0},
}


@pytest.mark.parametrize("raw", READ.values(), ids=READ.keys())
def test_a_plain_config_is_read_as_transformers_reads_it(raw: dict[str, Any]) -> None:
    assert_read_alike("LlamaConfig", raw)


@pytest.mark.parametrize("raw", READ_OF_QWEN.values(), ids=READ_OF_QWEN.keys())
def test_a_plain_qwen_is_read_as_transformers_reads_it(raw: dict[str, Any]) -> None:
    assert_read_alike("Qwen2Config", raw)
    assert_read_alike("Qwen3Config", {**raw, "head_dim": 32})


@pytest.mark.parametrize("cap", [None, 30.0])
def test_a_plain_gemma_is_read_as_transformers_reads_it(cap: float | None) -> None:
    assert_read_alike("Gemma3TextConfig", {**GEMMA, "final_logit_softcapping": cap})


def assert_read_alike(class_name: str, raw: dict[str, Any]) -> None:
    theirs: Any = getattr(transformers, class_name).from_dict(raw)
    plain = read_plain_config(class_name, raw)
    assert plain is not None
    ours = vars(plain) | {"dtype": str(plain.dtype)}
    others = {name: getattr(theirs, name, ours[name]) for name in ours}  # a class of transformers lacks some
    assert ours == others | {"dtype": str(theirs.dtype).removeprefix("torch.")}


@pytest.mark.parametrize("fields", LEFT.values(), ids=LEFT.keys())
def test_transformers_reads_a_config_with(fields: dict[str, Any]) -> None:
    assert read_plain_config("LlamaConfig", {**SMALL, **fields}) is None


@pytest.mark.parametrize("fields", LEFT_OF_QWEN.values(), ids=LEFT_OF_QWEN.keys())
def test_transformers_reads_a_qwen_with(fields: dict[str, Any]) -> None:
    assert read_plain_config("Qwen2Config", {**QWEN, **fields}) is None
    assert read_plain_config("Qwen3Config", {**QWEN, **fields, "head_dim": 16}) is None


@pytest.mark.parametrize("fields", LEFT_OF_GEMMA.values(), ids=LEFT_OF_GEMMA.keys())
def test_transformers_reads_a_gemma_with(fields: dict[str, Any]) -> None:
    assert read_plain_config("Gemma3TextConfig", {**GEMMA, **fields}) is None


def test_transformers_reads_a_qwen_3_that_does_not_say_how_large_heads_are() -> None:
    assert read_plain_config("Qwen3Config", QWEN) is None
