"""Reads models with latent attention from a Hugging Face config: DeepSeek-V2 and V3, GLM-4.7-Flash and Youtu."""

import math
from collections.abc import Callable
from typing import Any

from chairlift.errors import CheckpointError, shown
from chairlift.models.blocks import DenseMLPBlock, LatentAttentionBlock
from chairlift.models.claims import MAX_HEAD_DIM
from chairlift.models.config import Layer
from chairlift.models.fields import check_heads, read_activation
from chairlift.models.mixtures import read_deepseek_v2, read_glm4_moe, read_glm4_moe_lite
from chairlift.models.rope import read_rope
from chairlift.models.rotary import RopeConfig

_LATENT_EPS = 1e-6  # of norms of latent vectors, whatever the config's: the default of transformers' classes


def read_deepseek_v2_layers(config: Any) -> list[Layer]:
    """Reads each layer's blocks. CheckpointError, here as below, for sizes that make none."""
    return _layers(config, read_deepseek_v2)


def read_deepseek_v3_layers(config: Any) -> list[Layer]:
    """As above; experts are scored each by itself, and compared with a number of each added."""
    return _layers(config, read_glm4_moe)


def read_glm4_moe_lite_layers(config: Any) -> list[Layer]:
    """As DeepSeek-V3, and a list says which layers are dense."""
    return _layers(config, read_glm4_moe_lite)


def read_youtu_layers(config: Any) -> list[Layer]:
    """As DeepSeek-V3, and all layers are dense."""
    return _layers(config, lambda config: [()] * config.num_hidden_layers)


def _layers(config: Any, read_mixtures: Callable[[Any], list[Layer]]) -> list[Layer]:
    attention = _read_attention(config)
    dense = DenseMLPBlock(
        intermediate_size=config.intermediate_size,
        activation=read_activation(config),
        has_bias=getattr(config, "mlp_bias", False),
    )
    return [(attention, *(mixture or (dense,))) for mixture in read_mixtures(config)]


def _read_attention(config: Any) -> LatentAttentionBlock:
    check_heads(config.num_attention_heads, config.num_key_value_heads)
    if config.num_key_value_heads != config.num_attention_heads:
        raise CheckpointError("num_key_value_heads must be num_attention_heads, as all share the latent vectors")
    still, turning, latent, value = (
        _size(config, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank", "v_head_dim")
    )
    rope = read_rope(config.rope_parameters, config.max_position_embeddings, turning, is_partly_rotated=False)
    return LatentAttentionBlock.of(
        latent_dim=latent,
        turning_dim=turning,
        num_heads=config.num_attention_heads,
        scale=(still + turning) ** -0.5 * _sharpness(rope),
        rope=rope,
        has_qkv_bias=config.attention_bias,
        has_output_bias=config.attention_bias,
        query_rank=None if config.q_lora_rank is None else _size(config, "q_lora_rank"),
        still_dim=still,
        value_dim=value,
        latent_eps=_LATENT_EPS,
        rotates_neighbours=bool(getattr(config, "rope_interleave", True)),
    )


def _sharpness(rope: RopeConfig) -> float:
    """The factor of scores where rope is scaled, as YaRN has it (arXiv 2309.00071, section 3.4)."""
    given = dict(rope.parameters)
    factor, share = given.get("factor", 1.0), given.get("mscale_all_dim", 0.0)
    if not share or factor <= 1:
        return 1.0
    return float((0.1 * share * math.log(factor) + 1.0) ** 2)


def _size(config: Any, name: str) -> int:
    size = getattr(config, name)
    if type(size) is not int or not 1 <= size <= MAX_HEAD_DIM:
        raise CheckpointError(f"{name} must be a whole number from 1 to {MAX_HEAD_DIM}, not {shown(size)}")
    return size
