"""Reads the recurrent blocks of a Hugging Face config. Families say which layers have them (`models/families.py`)."""

from typing import Any

from chairlift.errors import CheckpointError, shown
from chairlift.models.blocks import GatedDeltaNetBlock, GatedShortConvBlock


def read_gated_delta_net(config: Any) -> GatedDeltaNetBlock:
    """From the `linear_` sizes of a config. CheckpointError if they make no block."""
    num_key_heads, num_value_heads = _size(config, "linear_num_key_heads"), _size(config, "linear_num_value_heads")
    if num_value_heads % num_key_heads:
        raise CheckpointError(f"{num_value_heads} linear value heads cannot share {num_key_heads} key heads")
    if config.hidden_act != "silu":
        raise CheckpointError(f"activation {shown(config.hidden_act)} is not supported in a Gated DeltaNet, only silu")
    return GatedDeltaNetBlock(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=_size(config, "linear_key_head_dim"),
        value_dim=_size(config, "linear_value_head_dim"),
        kernel_size=_size(config, "linear_conv_kernel_dim", least=2),
        norm_eps=config.rms_norm_eps,
    )


def read_gated_short_conv(config: Any) -> GatedShortConvBlock:
    """From the `conv_` fields of a config. CheckpointError for a size that is none."""
    return GatedShortConvBlock(
        num_features=config.hidden_size,
        kernel_size=_size(config, "conv_L_cache", least=2),
        has_bias=config.conv_bias,
    )


def _size(config: Any, name: str, least: int = 1) -> int:
    size: int = getattr(config, name)
    if size < least:
        raise CheckpointError(f"{name} must be at least {least}, not {size}")
    return size
