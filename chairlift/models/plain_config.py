"""Reads the config of a plain Llama, without transformers, whose import takes seconds of processor time.

It takes only configs of which each field is known here and of the right type. transformers' class reads all others, and
complains of what is wrong with them.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

PLAIN_CLASS = "LlamaConfig"
"""transformers' class whose fields and defaults these are."""

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_OPTIONAL_SIZES = ("head_dim", "num_key_value_heads")  # null, or absent: they follow from others
_DTYPES = ("dtype", "torch_dtype")  # the second is older
_IGNORED = {  # fields that say nothing of the computation
    *("architectures", "model_type", "transformers_version", "use_cache", "initializer_range", "pretraining_tp"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "_name_or_path"),
}
_ROPE, _OLD_ROPE = "rope_parameters", ("rope_theta", "rope_scaling")
_DEFAULT_THETA = 10_000.0


def read_plain_config(raw: Mapping[str, Any]) -> SimpleNamespace | None:
    """Reads a config.json's fields, with defaults for those that it lacks; None if transformers has to read it."""
    if raw.keys() - _DEFAULTS.keys() - _IGNORED - {_ROPE, *_OLD_ROPE, *_DTYPES, *_OPTIONAL_SIZES}:
        return None
    config = {name: raw.get(name, default) for name, default in _DEFAULTS.items()}
    if any(type(config[name]) is not type(default) for name, default in _DEFAULTS.items()):
        return None
    if any(raw.get(name) is not None and type(raw[name]) is not int for name in _OPTIONAL_SIZES):
        return None
    rope, dtype = _read_rope(raw), next((raw[name] for name in _DTYPES if raw.get(name) is not None), None)
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    if rope is None or not isinstance(dtype, str | None) or num_heads < 1 or hidden_size % num_heads:
        return None
    sizes = {"head_dim": hidden_size // num_heads, "num_key_value_heads": num_heads}
    given = {name: raw[name] if raw.get(name) is not None else size for name, size in sizes.items()}
    return SimpleNamespace(**config, **given, dtype=dtype, rope_parameters=rope)


def _read_rope(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Reads the parameters of rope that is not scaled, as both today's and older configs have them."""
    given, scaling, theta = raw.get(_ROPE), raw.get("rope_scaling"), raw.get("rope_theta", _DEFAULT_THETA)
    if given is None:
        given = {"rope_theta": theta}
    elif "rope_theta" in raw:
        return None
    if scaling is not None or not isinstance(given, dict) or given.keys() - {"rope_type", "rope_theta"}:
        return None
    if given.get("rope_type", "default") != "default" or type(given.get("rope_theta", theta)) not in (int, float):
        return None
    return {"rope_type": "default", "rope_theta": theta, **given}
