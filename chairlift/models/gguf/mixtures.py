"""Translates the metadata of mixtures of experts into the fields of their configs.

What llama.cpp does not write into a file, such as whether weights are normalised, is what it does for the architecture.
"""

from chairlift.errors import CheckpointError, shown
from chairlift.models.gguf.fields import Config, Fields
from chairlift.models.gguf.recurrent import extend_granite_hybrid, extend_lfm2, extend_qwen3_next, extend_qwen35

_SOFTMAX, SIGMOID, _SOFTMAX_OF_CHOSEN = 1, 2, 3  # llama.cpp's numbers of what makes scores of a router's logits


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
        **_counts(fields, scoring=SIGMOID),
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
        **_counts(fields, "n_routed_experts", scoring=SIGMOID),
        **_inner(config, fields),
        "n_shared_experts": _count(fields, "expert_shared_count", 0),
        "first_k_dense_replace": _count(fields, "leading_dense_block_count", 0),
        "n_group": _count(fields, "expert_group_count", 1),
        "topk_group": _count(fields, "expert_group_used_count", 1),
        "norm_topk_prob": is_normalised,
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
        "use_qk_norm": fields.has_tensor("attn_q_norm.weight"),
    }


def extend_deepseek2(config: Config, fields: Fields) -> Config:
    """Adds what a DeepSeek-V2 or V3 has, or a Youtu without experts. CheckpointError for sizes that are at odds."""
    turning, latent = config["head_dim"], fields.size("attention.kv_lora_rank")
    key, value = fields.size("attention.key_length"), fields.size("attention.value_length")
    if fields.has_tensor("attn_k_b.weight") and (key, value) != (latent + turning, latent):
        raise CheckpointError(f"slots keep {latent + turning} elements of a token, and attention.key_length is {key}")
    key, value = fields.size("attention.key_length_mla", key), fields.size("attention.value_length_mla", value)
    if key <= turning:
        raise CheckpointError(f"its heads have {key} elements, of which {turning} rotate; some must not")
    return {
        **config,
        **_experts_of_deepseek2(config, fields),
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": fields.size("attention.q_lora_rank") if fields.has("attention.q_lora_rank") else None,
        "kv_lora_rank": latent,
        "qk_rope_head_dim": turning,
        "qk_nope_head_dim": key - turning,
        "v_head_dim": value,
        "attention_bias": fields.has_tensor("attn_kv_a_mqa.bias"),
        "rope_parameters": _rope_of_deepseek2(config["rope_parameters"], fields),
    }


def _experts_of_deepseek2(config: Config, fields: Fields) -> Config:
    num_dense, num_shared = _count(fields, "leading_dense_block_count", 0), _count(fields, "expert_shared_count", 0)
    inner, scale = _inner(config, fields), fields.number("expert_weights_scale", 1.0)
    if not fields.has("expert_count"):
        return {}
    scoring = SIGMOID if fields.peek("expert_gating_func") == SIGMOID else _SOFTMAX
    is_normalised = fields.any("expert_weights_norm", False)
    if type(is_normalised) is not bool or (is_normalised and scoring == _SOFTMAX):
        raise CheckpointError(f"expert_weights_norm {shown(is_normalised)} is not supported in this architecture")
    num_groups, num_chosen = _count(fields, "expert_group_count", 1), _count(fields, "expert_group_used_count", 1)
    return {
        **_counts(fields, "n_routed_experts", scoring=scoring),
        **inner,
        "n_shared_experts": num_shared,
        "first_k_dense_replace": num_dense,
        "topk_method": "group_limited_greedy" if num_chosen < num_groups else "greedy",
        "n_group": num_groups,
        "topk_group": num_chosen,
        "norm_topk_prob": is_normalised,
        "routed_scaling_factor": scale,
    }


def _rope_of_deepseek2(rope: Config, fields: Fields) -> Config:
    """Adds what its YaRN has beside; a file says a tenth of `mscale_all_dim`, which `mscale` equals."""
    names = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}
    read = {theirs: fields.number(ours) for ours, theirs in names.items() if fields.has(ours)}
    if fields.has("rope.scaling.yarn_log_multiplier"):
        share = round(10 * fields.number("rope.scaling.yarn_log_multiplier"), 6)  # it is stored in 32 bits
        read |= {"mscale": share, "mscale_all_dim": share}
    return {**rope, **read}


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
