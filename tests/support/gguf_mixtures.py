"""Files of models with experts that tests write: what llama.cpp's converter writes of routers and experts."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import MODEL_ARCH, ExpertGatingFuncType, GGUFWriter

from tests.support import gguf_latents

Array = npt.NDArray[np.float32]

ARCHITECTURES = {
    "mixtral": MODEL_ARCH.LLAMA,
    "qwen2_moe": MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "qwen3_5_moe_text": MODEL_ARCH.QWEN35MOE,
    "qwen3_next": MODEL_ARCH.QWEN3NEXT,
    "ernie4_5_moe": MODEL_ARCH.ERNIE4_5_MOE,
    "olmoe": MODEL_ARCH.OLMOE,
    "granitemoe": MODEL_ARCH.GRANITE_MOE,
    "lfm2_moe": MODEL_ARCH.LFM2MOE,
    "glm4_moe": MODEL_ARCH.GLM4_MOE,
    "gpt_oss": MODEL_ARCH.GPT_OSS,
}

_OF_A_LAYER = re.compile(r"model\.layers\.(\d+)\.(mlp|feed_forward|block_sparse_moe|shared_mlp)\.(.*)")
_SINKS = re.compile(r"model\.layers\.(\d+)\.self_attn\.sinks")
_NAMES = {
    "gate.weight": "ffn_gate_inp.weight",
    "router.weight": "ffn_gate_inp.weight",
    "router.bias": "ffn_gate_inp.bias",
    "shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "gate.e_score_correction_bias": "exp_probs_b.bias",
    "gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "expert_bias": "exp_probs_b.bias",
    "experts.down_proj": "ffn_down_exps.weight",
    "output_linear.weight": "ffn_down_shexp.weight",
}
_HALVES = {
    "experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "input_linear.weight": ("ffn_gate_shexp", "ffn_up_shexp"),
}
_SHARED = re.compile(r"shared_experts?\.(gate|up|down)_proj\.weight")


def num_experts_of(config: Any) -> int:
    """The experts of a layer; 0 for a model without."""
    if config.model_type not in (*ARCHITECTURES, *gguf_latents.ARCHITECTURES, "granitemoehybrid"):
        return 0  # whatever its defaults say
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    return next((int(getattr(config, name)) for name in names if getattr(config, name, None)), 0)


def add_experts(writer: GGUFWriter, config: Any, architecture: MODEL_ARCH) -> None:
    """Writes the numbers of experts, and how a router chooses."""
    writer.add_expert_count(num_experts_of(config))
    writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture is MODEL_ARCH.GPT_OSS:
        writer.add_expert_feed_forward_length(config.intermediate_size)
    elif inner := getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(inner)
    shared = getattr(config, "shared_expert_intermediate_size", None) or getattr(
        config, "shared_intermediate_size", None
    )
    if shared:
        writer.add_expert_shared_feed_forward_length(shared)
    if architecture is MODEL_ARCH.LFM2MOE:
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
    if architecture is MODEL_ARCH.ERNIE4_5_MOE:
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        writer.add_expert_shared_feed_forward_length(config.moe_num_shared_experts * config.moe_intermediate_size)
    if architecture is MODEL_ARCH.GLM4_MOE:
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def converted(name: str, weight: Array, config: Any) -> Iterator[tuple[str, Array]]:
    """Yields the tensors of a router, of experts and of shared ones by their names in the file; nothing for others."""
    if sinks := _SINKS.fullmatch(name):
        yield f"blk.{sinks[1]}.attn_sinks.weight", weight
    match = _OF_A_LAYER.fullmatch(name)
    if match is None or not num_experts_of(config):
        return
    layer, part = f"blk.{match[1]}.", match[3]
    if config.model_type == "gpt_oss" and part.startswith("experts."):
        yield from _alternating(layer, part, weight)
    elif part in _NAMES:
        is_row = part in ("shared_expert_gate.weight", "gate.moe_statics.e_score_correction_bias")
        yield layer + _NAMES[part], weight.squeeze(0) if is_row else weight
    elif part in _HALVES:
        for half, rows in zip(_HALVES[part], np.split(weight, 2, axis=-2), strict=True):
            yield f"{layer}{half}.weight", np.ascontiguousarray(rows)
    elif shared := _SHARED.fullmatch(part):
        yield f"{layer}ffn_{shared[1]}_shexp.weight", weight


def _alternating(layer: str, part: str, weight: Array) -> Iterator[tuple[str, Array]]:
    """A stack of gpt-oss: outputs come last, and those of gate and up in turns."""
    if part.endswith("_proj"):
        weight = weight.swapaxes(1, 2)
    leaf = "bias" if part.endswith("bias") else "weight"
    if "gate_up" in part:
        yield f"{layer}ffn_gate_exps.{leaf}", np.ascontiguousarray(weight[:, ::2])
        yield f"{layer}ffn_up_exps.{leaf}", np.ascontiguousarray(weight[:, 1::2])
    else:
        yield f"{layer}ffn_down_exps.{leaf}", np.ascontiguousarray(weight)
