"""Translates the metadata of mixtures of experts into the fields of their configs.

What llama.cpp does not write into a file, such as whether weights are normalised, is what it does for the architecture.
"""

from chairlift.errors import CheckpointError, shown
from chairlift.models.gguf.fields import Config, Fields
from chairlift.models.gguf.recurrent import extend_granite_hybrid, extend_lfm2, extend_qwen3_next, extend_qwen35

_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = 1, 2, 3  # llama.cpp's numbers of what makes scores of a router's logits


def extend_qwen2_moe(config: Config, fields: Fields) -> Config:
    """Adds what a Qwen2-MoE has: a shared expert, and weights that are not normalised."""
    return {
        **config,
        **_counts(fields),
        **_inner(config, fields),
        **_shared(fields),
        "norm_topk_prob": False,
        "qkv_bias": config["attention_bias"],
    }


def extend_qwen3_moe(config: Config, fields: Fields) -> Config:
    """Adds what a Qwen3-MoE has."""
    return {**config, **_counts(fields), **_inner(config, fields), "norm_topk_prob": True}


def extend_qwen35_moe(config: Config, fields: Fields) -> Config:
    """Adds what a Qwen3.5 with experts has."""
    config = extend_qwen35(config, fields)
    return {**config, **_counts(fields), **_inner(config, fields), **_shared(fields)}


def extend_qwen3_next_moe(config: Config, fields: Fields) -> Config:
    """Adds what a Qwen3-Next has: weights are normalised."""
    config = extend_qwen3_next(config, fields)
    return {**config, **_counts(fields), **_inner(config, fields), **_shared(fields), "norm_topk_prob": True}


def extend_ernie4_5_moe(config: Config, fields: Fields) -> Config:
    """Adds what an Ernie 4.5 has. CheckpointError for shared experts of another size."""
    counts, inner, num_shared = _counts(fields), _inner(config, fields), _count(fields, "expert_shared_count", 0)
    size = num_shared * inner["moe_intermediate_size"]
    if num_shared and fields.size("expert_shared_feed_forward_length", size) != size:
        raise CheckpointError(f"its shared experts must have {size} inner features")
    return {
        **config,
        "moe_num_experts": counts["num_experts"],
        "moe_k": counts["num_experts_per_tok"],
        **inner,
        "moe_num_shared_experts": num_shared,
        "moe_layer_start_index": _count(fields, "leading_dense_block_count", 0),
        "moe_layer_interval": fields.size("interleave_moe_layer_step", 1),
        "use_bias": config["attention_bias"],
    }


def extend_olmoe(config: Config, fields: Fields) -> Config:
    """Adds what an OLMoE has: weights are not normalised."""
    return {**config, **_counts(fields), "norm_topk_prob": False}


def extend_llama(config: Config, fields: Fields) -> Config:
    """Adds the experts of a Mixtral, if it has any."""
    return {**config, **_counts(fields, "num_local_experts")} if fields.has("expert_count") else config


def extend_granite_moe(config: Config, fields: Fields) -> Config:
    """Adds what a Granite MoE has."""
    return {**config, **_counts(fields, "num_local_experts")}


def extend_granite_moe_hybrid(config: Config, fields: Fields) -> Config:
    """Adds what a Granite 4 has, with experts or without."""
    config = extend_granite_hybrid(config, fields)
    return {**config, **_counts(fields, "num_local_experts")} if fields.has("expert_count") else config


def extend_lfm2_moe(config: Config, fields: Fields) -> Config:
    """Adds what an LFM2 with experts has."""
    config = extend_lfm2(config, fields)
    return {
        **config,
        **_counts(fields, scoring=_SIGMOID),
        **_inner(config, fields),
        "num_dense_layers": _count(fields, "leading_dense_block_count", 0),
        "use_expert_bias": fields.has_tensor("exp_probs_b.bias"),
        "norm_topk_prob": True,
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
    }


def extend_glm4_moe(config: Config, fields: Fields) -> Config:
    """Adds what a GLM-4.5 has."""
    is_normalised = fields.any("expert_weights_norm", True)
    if type(is_normalised) is not bool:
        raise CheckpointError(f"expert_weights_norm must be true or false, not {shown(is_normalised)}")
    return {
        **config,
        **_counts(fields, "n_routed_experts", scoring=_SIGMOID),
        **_inner(config, fields),
        "n_shared_experts": _count(fields, "expert_shared_count", 0),
        "first_k_dense_replace": _count(fields, "leading_dense_block_count", 0),
        "n_group": _count(fields, "expert_group_count", 1),
        "topk_group": _count(fields, "expert_group_used_count", 1),
        "norm_topk_prob": is_normalised,
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
        "use_qk_norm": fields.has_tensor("attn_q_norm.weight"),
    }


def extend_gpt_oss(config: Config, fields: Fields) -> Config:
    """Adds what a gpt-oss has. The bounds of its angles are not whole numbers, which a file does not say."""
    rope = config["rope_parameters"]
    return {
        **config,
        **_counts(fields, "num_local_experts", scoring=_SOFTMAX_OF_CHOSEN),
        "intermediate_size": _inner(config, fields)["moe_intermediate_size"],
        "rope_parameters": {**rope, "truncate": False} if rope["rope_type"] == "yarn" else rope,
    }


def _counts(fields: Fields, name: str = "num_experts", scoring: int = _SOFTMAX) -> Config:
    """Reads how many experts there are and are chosen. CheckpointError for scores of another kind."""
    given = fields.any("expert_gating_func", scoring)
    if given not in (0, scoring):
        raise CheckpointError(f"a router of kind {shown(given)} is not supported in this architecture, only {scoring}")
    return {name: fields.size("expert_count"), "num_experts_per_tok": fields.size("expert_used_count")}


def _inner(config: Config, fields: Fields) -> Config:
    return {"moe_intermediate_size": fields.size("expert_feed_forward_length", config["intermediate_size"])}


def _shared(fields: Fields) -> Config:
    return {"shared_expert_intermediate_size": fields.size("expert_shared_feed_forward_length")}


def _count(fields: Fields, name: str, default: int) -> int:
    """A number that may be 0."""
    value = fields.any(name, default)
    if type(value) is not int or not 0 <= value <= 2**16:
        raise CheckpointError(f"{name} must be a count, not {shown(value)}")
    return value
