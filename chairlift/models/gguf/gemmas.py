"""Translates the metadata of Gemma's architectures into the fields of their configs."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from chairlift.errors import CheckpointError, shown
from chairlift.models.config import LAYER_TYPES
from chairlift.models.gguf.fields import Config, Fields

_FULL, _SLIDING = sorted(LAYER_TYPES)
_NO_ROTATION = 1e20  # factors of angles from there on stand for no rotation: positions are far below
_SHARE_DIGITS = 6  # of the share of gates that are cut off, which a file has as a number of standard deviations


def extend_gemma2(config: Config, fields: Fields) -> Config:
    """Adds what a Gemma 2 has."""
    return _extend(config, fields, period=2, large=46)


def extend_gemma3(config: Config, fields: Fields) -> Config:
    """Adds what a Gemma 3 has."""
    config = _extend(config, fields, period=6, large=62)
    return {**config, "rope_parameters": {_FULL: config["rope_parameters"], _SLIDING: _near(fields)}}


def extend_gemma3n(config: Config, fields: Fields) -> Config:
    """Adds what a Gemma 3n has."""
    num_layers, rope = config["num_hidden_layers"], config["rope_parameters"]
    return {
        **config,
        "layer_types": _layer_types(fields, num_layers, period=5),
        "rope_parameters": {_FULL: rope, _SLIDING: _near(fields)},
        "num_kv_shared_layers": fields.count("attention.shared_kv_layers"),
        **_layer_inputs(config, fields),
        "intermediate_size": config["inner_features_by_layer"],
        "activation_sparsity_pattern": _shares(fields, num_layers),
        "laurel_rank": fields.rows_of("blk.0.laurel_l.weight"),
        "altup_active_idx": fields.count("altup.active_idx"),
        "altup_num_inputs": fields.size("altup.num_inputs"),
    }


def extend_gemma4(config: Config, fields: Fields) -> Config:
    """Adds what a Gemma 4 has, of which the sizes that were read so far are those of layers without a window."""
    num_layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    kinds, num_shared = _layer_types(fields, num_layers, period=6), fields.count("attention.shared_kv_layers")
    near_dim = fields.size("attention.key_length_swa", head_dim)
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if fields.size(name, near_dim) != near_dim:
            raise CheckpointError(f"{name} must be {near_dim}, as the heads of layers with a window")
    heads, inner = config["key_value_heads_by_layer"], config["inner_features_by_layer"]
    near_heads = {count for kind, count in zip(kinds, heads, strict=True) if kind == _SLIDING} or set(heads)
    is_wide = inner[-1] == 2 * inner[0] and 0 < num_shared < num_layers
    if len(near_heads) > 1 or inner != [
        inner[0] * (1 + (is_wide and i >= num_layers - num_shared)) for i in range(num_layers)
    ]:
        raise CheckpointError("its layers differ in sizes in a way that is not supported")
    own = {"head_dim": head_dim}
    described = {
        **config,
        "layer_types": kinds,
        "rope_parameters": {_FULL: _proportional(config["rope_parameters"], head_dim), _SLIDING: _near(fields)},
        "head_dim": near_dim,
        "num_key_value_heads": near_heads.pop(),
        "per_layer_config": {
            str(layer): {**own, "num_key_value_heads": heads[layer]}
            for layer in range(num_layers)
            if kinds[layer] == _FULL
        },
        "attention_k_eq_v": _has_values_of_keys(fields, kinds[: max(0, num_layers - num_shared)]),
        "num_kv_shared_layers": num_shared,
        **_layer_inputs(config, fields),
        "intermediate_size": inner[0],
        "use_double_wide_mlp": is_wide,
        **_experts(fields),
    }
    described.pop("original_max_position_embeddings", None)
    return described


def _extend(config: Config, fields: Fields, period: int, large: int) -> Config:
    """`large`: the number of layers of models whose scores are scaled differently; llama.cpp tests it, too."""
    num_layers = config["num_hidden_layers"]
    width = config["hidden_size"] // config["num_attention_heads"]
    return {
        **config,
        "query_pre_attn_scalar": width if num_layers == large else config["head_dim"],
        "layer_types": _layer_types(fields, num_layers, period),
    }


def _layer_types(fields: Fields, num_layers: int, period: int) -> list[str]:
    pattern = fields.any("attention.sliding_window_pattern", period)
    if type(pattern) is int and pattern > 0:
        pattern = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    if not isinstance(pattern, list | np.ndarray) or len(pattern) != num_layers:
        raise CheckpointError(f"its sliding_window_pattern does not cover {num_layers} layers")
    return [_SLIDING if has_window else _FULL for has_window in pattern]


def _near(fields: Fields) -> Config:
    """The rope of layers with a window."""
    return {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10_000.0)}


def _proportional(rope: Config, head_dim: int) -> Config:
    """The rope of which the first pairs rotate: factors of the others make their angles vanish."""
    factors = rope.get("short_factor")
    if factors is None:
        return rope
    num_rotated = sum(factor < _NO_ROTATION for factor in factors)
    if any(factor != 1.0 for factor in factors[:num_rotated]):
        raise CheckpointError("tensor rope_freqs.weight must be ones, and then numbers that let nothing rotate")
    return {
        "rope_type": "proportional",
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": 2 * num_rotated / head_dim,
    }


def _has_values_of_keys(fields: Fields, kinds: Sequence[str]) -> bool:
    """Tells if layers without a window have no values. CheckpointError if only some have none."""
    found = {fields.rows_of(f"blk.{layer}.attn_v.weight", 0) > 0 for layer, kind in enumerate(kinds) if kind == _FULL}
    if len(found) > 1:
        raise CheckpointError("some of its layers without a window have tensors attn_v.weight, and others none")
    return found == {False}


def _layer_inputs(config: Config, fields: Fields) -> Config:
    return {
        "hidden_size_per_layer_input": fields.count("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": fields.rows_of("per_layer_token_embd.weight", config["vocab_size"]),
    }


def _experts(fields: Fields) -> Config:
    if not fields.has("expert_count"):
        return {}
    return {
        "enable_moe_block": True,
        "num_experts": fields.size("expert_count"),
        "top_k_experts": fields.size("expert_used_count"),
        "moe_intermediate_size": fields.size("expert_feed_forward_length"),
    }


def _shares(fields: Fields, num_layers: int) -> list[float]:
    """The share of gates that each layer cuts off."""
    given = fields.any("activation_sparsity_scale", 0.0)
    limits = given.tolist() if isinstance(given, np.ndarray) else [-math.inf] * num_layers
    if len(limits) != num_layers or not all(isinstance(each, float) and each < math.inf for each in limits):
        raise CheckpointError(f"its activation_sparsity_scale must be {num_layers} numbers, not {shown(given)}")
    normal = NormalDist()
    return [0.0 if each == -math.inf else round(normal.cdf(each), _SHARE_DIGITS) for each in limits]
