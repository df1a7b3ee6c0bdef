"""Files of Gemma 3n and 4 that tests write: what llama.cpp's converter writes of layers that differ from each other."""

import re
from collections.abc import Iterator
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import MODEL_ARCH, GGUFWriter

Array = npt.NDArray[np.float32]

ARCHITECTURES = {
    "gemma3n_text": MODEL_ARCH.GEMMA3N,
    "gemma4_text": MODEL_ARCH.GEMMA4,
    "gemma4_unified_text": MODEL_ARCH.GEMMA4,
}
_OF_A_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_NAMES = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "altup.correct_output_scale": "altup_correct_scale.weight",
}
_STREAMS = {"altup_projections": "altup_proj.weight", "altup_unembed_projections": "altup_unembd_proj.weight"}


def add_sizes(writer: GGUFWriter, config: Any, architecture: MODEL_ARCH) -> None:
    """Writes the model's numbers."""
    windows = [kind == "sliding_attention" for kind in config.layer_types]
    own = [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(windows)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(getattr(config, "hidden_size_per_layer_input", 0))
    if architecture is MODEL_ARCH.GEMMA3N:
        _add_sizes_of_gemma3n(writer, config)
        return
    full, near = own[windows.index(False)], own[windows.index(True)]
    writer.add_key_length(full.head_dim)
    writer.add_value_length(full.head_dim)
    writer.add_key_length_swa(near.head_dim)
    writer.add_value_length_swa(near.head_dim)
    writer.add_rope_dimension_count(full.head_dim)
    writer.add_rope_dimension_count_swa(near.head_dim)
    writer.add_head_count_kv([each.num_key_value_heads for each in own])
    first_shared = config.num_hidden_layers - config.num_kv_shared_layers
    sizes = [config.intermediate_size * (1 + (layer >= first_shared)) for layer in range(config.num_hidden_layers)]
    writer.add_feed_forward_length(sizes if config.use_double_wide_mlp else config.intermediate_size)
    num_pairs = full.head_dim // 2
    num_rotated = int(num_pairs * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    factors = [1.0] * num_rotated + [1e30] * (num_pairs - num_rotated)
    writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    if getattr(config, "enable_moe_block", False):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _add_sizes_of_gemma3n(writer: GGUFWriter, config: Any) -> None:
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_altup_active_idx(config.altup_active_idx)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    shares = config.activation_sparsity_pattern
    writer.add_activation_sparsity_scale([NormalDist().inv_cdf(each) if each else -np.inf for each in shares])


def converted(name: str, weight: Array, model: Any) -> Iterator[tuple[str, Array]]:
    """Yields what becomes of a tensor whose name the package does not know; nothing for others, which stay as they are.

    The first of AltUp's matrices becomes a stack of all; `is_gathered` tells the others.
    """
    if model.config.model_type not in ARCHITECTURES:
        return
    if match := _OF_A_LAYER.fullmatch(name):
        if match[2] in _NAMES:
            yield f"blk.{match[1]}.{_NAMES[match[2]]}", weight
        return
    stream = next((each for each in _STREAMS if f"model.{each}." in name), None)
    if stream is not None and ".0." in name:
        matrices = [each.weight.detach().float().numpy() for each in getattr(model.model, stream)]
        yield _STREAMS[stream], np.stack(matrices)


def is_gathered(name: str) -> bool:
    """True for a matrix that is in the stack of another."""
    return any(f"model.{each}." in name for each in _STREAMS) and ".0." not in name
