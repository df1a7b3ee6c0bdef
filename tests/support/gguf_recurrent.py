"""Files of recurrent models that tests write: their sizes, and what llama.cpp's converter makes of their tensors."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import MODEL_ARCH, GGUFWriter

Array = npt.NDArray[np.float32]

ARCHITECTURES = {
    "qwen3_5_text": MODEL_ARCH.QWEN35,
    "lfm2": MODEL_ARCH.LFM2,
    "qwen3_5_moe_text": MODEL_ARCH.QWEN35MOE,
    "qwen3_next": MODEL_ARCH.QWEN3NEXT,
    "lfm2_moe": MODEL_ARCH.LFM2MOE,
    "nemotron_h": MODEL_ARCH.NEMOTRON_H,
    "granitemoehybrid": MODEL_ARCH.GRANITE_HYBRID,
    "falcon_h1": MODEL_ARCH.FALCON_H1,
}

_TILED = (MODEL_ARCH.QWEN35, MODEL_ARCH.QWEN35MOE)
_QWEN35 = (*_TILED, MODEL_ARCH.QWEN3NEXT)
_LFM2 = (MODEL_ARCH.LFM2, MODEL_ARCH.LFM2MOE)
_MAMBA = (MODEL_ARCH.NEMOTRON_H, MODEL_ARCH.GRANITE_HYBRID, MODEL_ARCH.FALCON_H1)


def add_sizes(writer: GGUFWriter, config: Any, architecture: MODEL_ARCH) -> None:
    """Writes the sizes of layers and of their recurrences."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = list(getattr(config, "layer_types", None) or ["hybrid"] * config.num_hidden_layers)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(_eps(config))
    if architecture is MODEL_ARCH.NEMOTRON_H:
        writer.add_layer_norm_eps(_eps(config))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    num_kv_heads = config.num_key_value_heads
    if architecture not in (*_QWEN35, MODEL_ARCH.FALCON_H1):
        writer.add_head_count_kv([num_kv_heads if kind == "full_attention" else 0 for kind in kinds])
    else:
        writer.add_head_count_kv(num_kv_heads)
    inner = _inner_size(config, architecture)
    is_mlp_alone = architecture is MODEL_ARCH.NEMOTRON_H
    writer.add_feed_forward_length([inner if kind == "mlp" else 0 for kind in kinds] if is_mlp_alone else inner)
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": 10000.0}
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    _add_recurrence(writer, config, architecture)


def _eps(config: Any) -> float:
    names = ("norm_eps", "layer_norm_epsilon", "rms_norm_eps")
    return next(float(getattr(config, name)) for name in names if hasattr(config, name))


def _inner_size(config: Any, architecture: MODEL_ARCH) -> int:
    if architecture is MODEL_ARCH.GRANITE_HYBRID:
        return int(config.intermediate_size if config.num_local_experts else config.shared_intermediate_size)
    if architecture is MODEL_ARCH.LFM2 and config.block_auto_adjust_ff_dim:
        return int(-(-int(2 * config.intermediate_size / 3) // config.block_multiple_of) * config.block_multiple_of)
    return int(getattr(config, "intermediate_size", None) or config.moe_intermediate_size)


def _add_recurrence(writer: GGUFWriter, config: Any, architecture: MODEL_ARCH) -> None:
    if architecture in _LFM2:
        writer.add_shortconv_l_cache(config.conv_L_cache)
        return
    if architecture in _QWEN35:
        if architecture in _TILED:
            writer.add_rope_dimension_sections([2, 1, 1, 0])
        writer.add_full_attention_interval(4)
        values = config.linear_num_value_heads, config.linear_value_head_dim
        sizes = config.linear_conv_kernel_dim, config.linear_key_head_dim, config.linear_num_key_heads, *values
    elif architecture is MODEL_ARCH.NEMOTRON_H:
        heads = config.mamba_num_heads, config.mamba_head_dim
        sizes = config.conv_kernel, config.ssm_state_size, config.n_groups, *heads
    else:
        heads = config.mamba_n_heads, config.mamba_d_head
        sizes = config.mamba_d_conv, config.mamba_d_state, config.mamba_n_groups, *heads
    kernel, state, groups, num_heads, head_dim = sizes
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_time_step_rank(num_heads)
    writer.add_ssm_inner_size(num_heads * head_dim)
    if architecture is MODEL_ARCH.GRANITE_HYBRID:
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def converted(name: str, weight: Array, config: Any, architecture: MODEL_ARCH) -> Iterator[tuple[str, Array]]:
    """Yields tensors as the converter writes them, by the names that the package gguf translates."""
    if name.endswith("in_proj_qkvz.weight"):
        yield from _taken_apart(name, weight, config)
        return
    if architecture is MODEL_ARCH.NEMOTRON_H:
        name = name.replace("model.", "backbone.", 1)
    name = name.replace("dt_bias", "dt_proj.bias")
    if weight.ndim == 3:  # a convolution
        weight = weight.squeeze(1)
    if name.endswith("A_log"):
        weight = -np.exp(weight)
    if architecture in _MAMBA:
        weight = _reshaped(name, weight, config)
    if architecture is MODEL_ARCH.GRANITE_HYBRID and name.endswith(("q_proj.weight", "k_proj.weight")):
        head_dim = config.hidden_size // config.num_attention_heads
        halves = weight.reshape(-1, 2, head_dim // 2, weight.shape[1])
        weight = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
    if architecture in _QWEN35:
        weight = _tiled(name, weight, config) if architecture in _TILED else weight
        if name.endswith("norm.weight") and "linear_attn" not in name:
            weight = weight + 1
    if architecture is MODEL_ARCH.FALCON_H1:
        weight = weight * _multiplied(name, config)
    yield from _named(name, weight)


def _named(name: str, weight: Array) -> Iterator[tuple[str, Array]]:
    if not name.endswith("shared_mlp.input_linear.weight"):
        yield name.replace("shared_mlp.output_linear", "mlp.down_proj"), weight
        return
    layer = name.removesuffix("shared_mlp.input_linear.weight")
    gate, up = np.split(weight, 2)
    yield f"{layer}mlp.gate_proj.weight", gate
    yield f"{layer}mlp.up_proj.weight", up


def _taken_apart(name: str, weight: Array, config: Any) -> Iterator[tuple[str, Array]]:
    """Yields queries, keys and values of all heads, and then their gates, where heads have all of these together."""
    num_values = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    keys, num_inputs = config.linear_key_head_dim, weight.shape[-1]
    heads = weight.reshape(config.linear_num_key_heads, -1, num_inputs)
    *mixed, gates = np.split(heads, [keys, 2 * keys, 2 * keys + num_values], axis=1)
    prefix = name.removesuffix("qkvz.weight")
    yield f"{prefix}qkv.weight", np.concatenate([each.reshape(-1, num_inputs) for each in mixed])
    yield f"{prefix}z.weight", np.ascontiguousarray(gates.reshape(-1, num_inputs))


def _reshaped(name: str, weight: Array, config: Any) -> Array:
    if name.endswith(("A_log", ".D")):
        return weight[:, None]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return weight.reshape(getattr(config, "n_groups", None) or config.mamba_n_groups, -1)
    return weight


def _tiled(name: str, weight: Array, config: Any) -> Array:
    """Value heads in the order in which the first of every key head comes first."""
    num_keys, num_values = config.linear_num_key_heads, config.linear_num_value_heads
    keys, length = 2 * num_keys * config.linear_key_head_dim, config.linear_value_head_dim
    if "linear_attn." not in name or name.endswith("linear_attn.norm.weight"):
        return weight
    if "in_proj_qkv" in name or "conv1d" in name:
        return np.concatenate((weight[:keys], _tile(weight[keys:], num_keys, length)))
    if "out_proj" in name:
        return np.ascontiguousarray(_tile(weight.T, num_keys, length).T)
    return _tile(weight, num_keys, len(weight) // num_values)


def _tile(rows: Array, num_keys: int, length: int) -> Array:
    heads = rows.reshape(num_keys, -1, length, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(0, 1).reshape(rows.shape))


def _multiplied(name: str, config: Any) -> Array | float:
    """The factor that the converter puts into a tensor."""
    by_name = {
        "gate_proj": config.mlp_multipliers[0],
        "down_proj": config.mlp_multipliers[1],
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "self_attn.o_proj": config.attention_out_multiplier,
        "mamba.out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    if "mamba.in_proj" in name:
        shared = config.mamba_n_groups * config.mamba_d_state
        lengths = [config.mamba_d_ssm, config.mamba_d_ssm, shared, shared, config.mamba_n_heads]
        factors = np.repeat(np.array(config.ssm_multipliers, dtype=np.float32), lengths)
        return np.asarray(config.ssm_in_multiplier * factors[:, None], dtype=np.float32)
    return next((factor for part, factor in by_name.items() if part in name), 1.0)
