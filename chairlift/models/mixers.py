"""Reads the recurrent blocks of a Hugging Face config. Families say which layers have them (`models/families.py`)."""

from typing import Any

from chairlift.errors import CheckpointError, shown
from chairlift.models.blocks.gated_delta_net import GatedDeltaNetBlock
from chairlift.models.blocks.gated_short_conv import GatedShortConvBlock
from chairlift.models.blocks.mamba2 import Mamba2Block, ProjectionScales


def read_gated_delta_net(config: Any) -> GatedDeltaNetBlock:
    """From the `linear_` sizes of a config. CheckpointError if they make no block."""
    num_key_heads, num_value_heads = _size(config, "linear_num_key_heads"), _size(config, "linear_num_value_heads")
    if num_value_heads % num_key_heads:
        raise CheckpointError(f"{num_value_heads} linear value heads cannot share {num_key_heads} key heads")
    _require_silu(config.hidden_act, "a Gated DeltaNet")
    return GatedDeltaNetBlock(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=_size(config, "linear_key_head_dim"),
        value_dim=_size(config, "linear_value_head_dim"),
        kernel_size=_size(config, "linear_conv_kernel_dim", least=2),
        norm_eps=config.rms_norm_eps,
        has_tiled_heads=getattr(config, "has_tiled_heads", False),
    )


def read_gated_short_conv(config: Any) -> GatedShortConvBlock:
    """From the `conv_` fields of a config. CheckpointError for a size that is none."""
    return GatedShortConvBlock(
        num_features=config.hidden_size,
        kernel_size=_size(config, "conv_L_cache", least=2),
        has_bias=config.conv_bias,
    )


def read_mamba2_of_nemotron(config: Any) -> Mamba2Block:
    """From the fields of a Nemotron-H. CheckpointError if they make no block."""
    _require_silu(config.mamba_hidden_act, "Mamba 2")
    return Mamba2Block(
        num_heads=_size(config, "mamba_num_heads"),
        head_dim=_size(config, "mamba_head_dim"),
        num_groups=_num_groups(config, "mamba_num_heads", "n_groups"),
        state_size=_size(config, "ssm_state_size"),
        kernel_size=_size(config, "conv_kernel", least=2),
        norm_eps=config.layer_norm_epsilon,
        has_bias=config.use_bias,
        has_output_bias=config.use_bias,
        has_conv_bias=config.use_conv_bias,
        dt_limits=(_least_step(config), float("inf")),  # all that transformers heeds of the fields for time steps
    )


def read_mamba2_of_granite(config: Any) -> Mamba2Block:
    """From the `mamba_` fields of a Granite 4. CheckpointError if they make no block."""
    return Mamba2Block(**_mamba_sizes(config), has_output_bias=config.mamba_proj_bias)


def read_mamba2_of_falcon(config: Any) -> Mamba2Block:
    """From the `mamba_` and `ssm_` fields of a Falcon-H1. CheckpointError if they make no block."""
    return Mamba2Block(
        **_mamba_sizes(config),
        has_output_bias=config.projectors_bias,
        has_norm=config.mamba_rms_norm,
        is_gated_last=config.mamba_rms_norm and config.mamba_norm_before_gate,
        input_scale=config.ssm_in_multiplier,
        output_scale=config.ssm_out_multiplier,
        scales=ProjectionScales(*config.ssm_multipliers),
    )


def _mamba_sizes(config: Any) -> dict[str, Any]:
    _require_silu(config.hidden_act, "Mamba 2")
    return {
        "num_heads": _size(config, "mamba_n_heads"),
        "head_dim": _size(config, "mamba_d_head"),
        "num_groups": _num_groups(config, "mamba_n_heads", "mamba_n_groups"),
        "state_size": _size(config, "mamba_d_state"),
        "kernel_size": _size(config, "mamba_d_conv", least=2),
        "norm_eps": config.rms_norm_eps,
        "has_bias": config.mamba_proj_bias,
        "has_conv_bias": config.mamba_conv_bias,
        "dt_limits": _limits(config.time_step_limit),
    }


def _num_groups(config: Any, heads: str, groups: str) -> int:
    num_heads, num_groups = _size(config, heads), _size(config, groups)
    if num_heads % num_groups:
        raise CheckpointError(f"{num_heads} Mamba heads do not make {num_groups} groups of one size")
    return num_groups


def _least_step(config: Any) -> float:
    least = config.time_step_min
    if type(least) not in (int, float) or not 0 <= least < float("inf"):
        raise CheckpointError(f"time_step_min must be a number from 0 on, not {shown(least)}")
    return float(least)


def _limits(limits: Any) -> tuple[float, float]:
    if limits is None:
        return 0.0, float("inf")
    low, high = map(float, limits)
    if not 0 <= low <= high:
        raise CheckpointError(f"time_step_limit must be two rising numbers from 0 on, not {shown(limits)}")
    return low, high


def _require_silu(activation: str, block: str) -> None:
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"activation {shown(activation)} is not supported in {block}, only silu")


def _size(config: Any, name: str, least: int = 1) -> int:
    size: int = getattr(config, name)
    if size < least:
        raise CheckpointError(f"{name} must be at least {least}, not {size}")
    return size
