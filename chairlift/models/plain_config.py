"""Reads configs of plain Llamas, Qwens and Gemmas, without transformers, whose import takes seconds of processor time.

It takes only configs of which each field is known here and of the right type. transformers' class reads all others, and
complains of what is wrong with them.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

_LLAMA, _QWEN2, _QWEN3, _GEMMA3 = "LlamaConfig", "Qwen2Config", "Qwen3Config", "Gemma3TextConfig"
PLAIN_CLASSES = (_LLAMA, _QWEN2, _QWEN3, _GEMMA3)
"""transformers' classes whose fields these are. Most have other defaults than Llama's, so sizes have to be there."""

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
_WINDOWS = {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
_SIZES = {name for name, default in _DEFAULTS.items() if type(default) is int} | {"num_key_value_heads"}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_CAPS = ("final_logit_softcapping", "attn_logit_softcapping")
_GEMMAS_OWN = {"layer_types", "sliding_window", "query_pre_attn_scalar", "hidden_activation", *_CAPS, _ROPE}
_CAP = (float, type(None))
_GEMMAS_ACTIVATION = "gelu_pytorch_tanh"


def read_plain_config(class_name: str, raw: Mapping[str, Any]) -> SimpleNamespace | None:
    """Reads a config.json's fields, with defaults for those that it lacks; None if transformers has to read it.

    `class_name`: one of `PLAIN_CLASSES`.
    """
    if class_name == _LLAMA:
        return _read_llama(raw)
    needed = _SIZES if class_name == _QWEN2 else _SIZES | {"head_dim"}
    if any(raw.get(name) is None for name in needed):
        return None
    return _read_gemma3(raw) if class_name == _GEMMA3 else _read_qwen(raw)


def _read_qwen(raw: Mapping[str, Any]) -> SimpleNamespace | None:
    """Reads one without windows, and with a rope that says its theta."""
    has_theta = "rope_theta" in (raw[_ROPE] if isinstance(raw.get(_ROPE), dict) else raw)
    read = _read_llama({name: value for name, value in raw.items() if name not in _WINDOWS})
    if read is None or not has_theta or raw.get("use_sliding_window", False) is not False:
        return None
    read.layer_types, read.sliding_window = [_FULL] * read.num_hidden_layers, None
    return read if raw.get("layer_types", read.layer_types) == read.layer_types else None


def _read_gemma3(raw: Mapping[str, Any]) -> SimpleNamespace | None:
    """Reads one that says the type of each layer and both types' ropes, as GGUF files do."""
    ropes, others = raw.get(_ROPE), {name: value for name, value in raw.items() if name not in _GEMMAS_OWN}
    if not isinstance(ropes, dict) or ropes.keys() != {_FULL, _SLIDING} or "tie_word_embeddings" not in raw:
        return None
    read, both = _read_llama(others), {kind: _read_rope({_ROPE: rope}) for kind, rope in ropes.items()}
    integers = {name: raw.get(name) for name in ("sliding_window", "query_pre_attn_scalar")}
    caps = {name: raw.get(name) for name in _CAPS}
    kinds, activation = raw.get("layer_types"), raw.get("hidden_activation", _GEMMAS_ACTIVATION)
    if read is None or None in both.values() or not isinstance(kinds, list) or activation != _GEMMAS_ACTIVATION:
        return None
    if any(type(each) is not int for each in integers.values()) or any(type(cap) not in _CAP for cap in caps.values()):
        return None
    del read.hidden_act
    own = {"layer_types": kinds, "hidden_activation": activation, "rope_parameters": both}
    return SimpleNamespace(**{**vars(read), **own, **integers, **caps})


def _read_llama(raw: Mapping[str, Any]) -> SimpleNamespace | None:
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
