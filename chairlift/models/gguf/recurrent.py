"""Translates the metadata of recurrent architectures into the fields of their configs."""

from chairlift.errors import CheckpointError, shown
from chairlift.models.config import LAYER_TYPES
from chairlift.models.gguf.fields import Config, Fields

_FULL, _ = sorted(LAYER_TYPES)
_LINEAR, _CONV, _MLP = "linear_attention", "conv", "mlp"
_INTERVAL = 4  # of layers that attend, where a file of a Qwen3.5 does not say it


def extend_qwen35(config: Config, fields: Fields) -> Config:
    """Adds what a Qwen3.5 has. The layers that guess further tokens, at the end, do not count."""
    num_layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    fields.any("rope.dimension_sections", 0)  # of images: for text they change nothing
    num_value_heads, num_features = fields.size("ssm.time_step_rank"), fields.size("ssm.inner_size")
    rope = {"partial_rotary_factor": 1.0, **config["rope_parameters"]}
    return {
        **config,
        "rope_parameters": rope,
        "layer_types": _qwen35_layer_types(fields, num_layers),
        "linear_conv_kernel_dim": fields.size("ssm.conv_kernel"),
        "linear_key_head_dim": fields.size("ssm.state_size"),
        "linear_num_key_heads": fields.size("ssm.group_count"),
        "linear_num_value_heads": num_value_heads,
        "linear_value_head_dim": _divide(num_features, num_value_heads, "linear value heads"),
        "has_tiled_heads": True,
        "head_dim": head_dim,
    }


def extend_qwen3_next(config: Config, fields: Fields) -> Config:
    """Adds what a Qwen3-Next has: as a Qwen3.5, and value heads that share a key head are neighbours."""
    return {**extend_qwen35(config, fields), "has_tiled_heads": False}


def _qwen35_layer_types(fields: Fields, num_layers: int) -> list[str]:
    interval = fields.size("full_attention_interval", _INTERVAL)
    is_recurrent = fields.any("attention.recurrent_layers", [])
    if not len(is_recurrent):
        is_recurrent = [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if len(is_recurrent) < num_layers:
        raise CheckpointError(f"its attention.recurrent_layers does not cover {num_layers} layers")
    return [_LINEAR if each else _FULL for each in is_recurrent[:num_layers]]


def extend_lfm2(config: Config, fields: Fields) -> Config:
    """Adds what an LFM2 has: layers without keys are convolutions."""
    return {
        **config,
        "layer_types": [_FULL if count else _CONV for count in config["key_value_heads_by_layer"]],
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": fields.size("shortconv.l_cache"),
        "conv_bias": fields.has_tensor("shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
    }


def extend_nemotron_h(config: Config, fields: Fields) -> Config:
    """Adds what a Nemotron-H has: layers are MLPs, or attend, or neither."""
    inner = config["inner_features_by_layer"]
    kinds = zip(config["key_value_heads_by_layer"], inner, strict=True)
    described = {
        **config,
        "layers_block_type": [_MLP if size else _FULL if num_heads else _LINEAR for num_heads, size in kinds],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "mamba_num_heads": fields.size("ssm.time_step_rank"),
        "ssm_state_size": fields.size("ssm.state_size"),
        "n_groups": fields.size("ssm.group_count"),
        "conv_kernel": fields.size("ssm.conv_kernel"),
        "use_bias": fields.has_tensor("ssm_in.bias"),
        "use_conv_bias": fields.has_tensor("ssm_conv1d.bias"),
        "time_step_min": 0.0,  # files say nothing of limits, and llama.cpp has none
    }
    num_features = fields.size("ssm.inner_size")
    described["mamba_head_dim"] = _divide(num_features, described["mamba_num_heads"], "Mamba heads")
    del described["rope_parameters"]  # its attention has no positions
    return described


def extend_granite_hybrid(config: Config, fields: Fields) -> Config:
    """Adds what a Granite 4 has: layers without keys are Mamba's; a flag says if attention has positions."""
    is_rotated = fields.any("rope.scaling.finetuned", True)
    if type(is_rotated) is not bool:
        raise CheckpointError(f"rope.scaling.finetuned must be true or false, not {shown(is_rotated)}")
    return {
        **config,
        **_mamba(config, fields),
        "layer_types": [_FULL if count else _LINEAR for count in config["key_value_heads_by_layer"]],
        "position_embedding_type": "rope" if is_rotated else None,
        "num_local_experts": 0,
        "shared_intermediate_size": fields.size("expert_shared_feed_forward_length", config["intermediate_size"]),
        "has_fused_mlps": False,
    }


def extend_falcon_h1(config: Config, fields: Fields) -> Config:
    """Adds what a Falcon-H1 has. Its multipliers are in the tensors, and norms come after gates."""
    return {
        **config,
        **_mamba(config, fields),
        "mamba_rms_norm": fields.has_tensor("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": fields.has_tensor("ssm_out.bias"),
    }


def _mamba(config: Config, fields: Fields) -> Config:
    num_features, num_heads = fields.size("ssm.inner_size"), fields.size("ssm.time_step_rank")
    return {
        "mamba_d_ssm": num_features,
        "mamba_expand": num_features // config["hidden_size"],
        "mamba_n_heads": num_heads,
        "mamba_d_head": _divide(num_features, num_heads, "Mamba heads"),
        "mamba_n_groups": fields.size("ssm.group_count"),
        "mamba_d_state": fields.size("ssm.state_size"),
        "mamba_d_conv": fields.size("ssm.conv_kernel"),
        "mamba_proj_bias": fields.has_tensor("ssm_in.bias"),
        "mamba_conv_bias": fields.has_tensor("ssm_conv1d.bias"),
    }


def _divide(num_features: int, num_heads: int, what: str) -> int:
    if num_features % num_heads:
        raise CheckpointError(f"{num_features} features do not make {num_heads} {what} of one size")
    return num_features // num_heads
