"""A plain Llama's config is read without transformers, as transformers reads it, or left to transformers."""

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
    theirs: Any = transformers.LlamaConfig.from_dict(raw)
    plain = read_plain_config(raw)
    assert plain is not None
    ours = vars(plain) | {"dtype": str(plain.dtype)}
    assert ours == {name: getattr(theirs, name) for name in ours} | {"dtype": str(theirs.dtype).removeprefix("torch.")}


@pytest.mark.parametrize("fields", LEFT.values(), ids=LEFT.keys())
def test_transformers_reads_a_config_with(fields: dict[str, Any]) -> None:
    assert read_plain_config({**SMALL, **fields}) is None
