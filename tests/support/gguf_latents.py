"""Files of models with latent attention that tests write: what llama.cpp's converter writes of latent vectors."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import MODEL_ARCH, ExpertGatingFuncType, GGUFWriter, RopeScalingType

Array = npt.NDArray[np.float32]

ARCHITECTURES = dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"), MODEL_ARCH.DEEPSEEK2)

_HEADS = re.compile(r"model\.layers\.(\d+)\.self_attn\.kv_b_proj\.weight")


def add_sizes(writer: GGUFWriter, config: Any) -> None:
    """Writes the sizes of all, with those of latent vectors and heads, and how a router chooses."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    _add_rope(writer, config)
    if config.model_type == "youtu":
        writer.add_leading_dense_block_count(config.num_hidden_layers)
    else:
        _add_experts(writer, config)


def _add_experts(writer: GGUFWriter, config: Any) -> None:
    is_dense = [kind == "dense" for kind in getattr(config, "mlp_layer_types", [])]
    writer.add_leading_dense_block_count(sum(is_dense) if is_dense else config.first_k_dense_replace)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    is_softmax = config.model_type == "deepseek_v2"
    if config.norm_topk_prob and not is_softmax:
        writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(ExpertGatingFuncType.SOFTMAX if is_softmax else ExpertGatingFuncType.SIGMOID)
    if config.n_group is not None:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def _add_rope(writer: GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def converted(name: str, weight: Array, config: Any) -> Iterator[tuple[str, Array]]:
    """Yields the heads' matrices of keys, transposed, and of values, by their names in the file."""
    match = _HEADS.fullmatch(name)
    if match is None or config.model_type not in ARCHITECTURES:
        return
    heads = weight.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
    yield f"blk.{match[1]}.attn_k_b.weight", np.ascontiguousarray(keys.swapaxes(1, 2))
    yield f"blk.{match[1]}.attn_v_b.weight", np.ascontiguousarray(values)
