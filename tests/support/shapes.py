"""Descriptions of models that differ from another one in fields of the model, or of all its blocks."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from chairlift.models.blocks import AttentionBlock, DenseMLPBlock
from chairlift.models.config import ModelConfig, ModelShape
from chairlift.models.rotary import RopeConfig


class Positions(NamedTuple):
    """Holds what differs from layer to layer in most of the families."""

    rope: RopeConfig | None
    window: int | None = None


def varied(config: ModelConfig, layers: Sequence[Positions] | None = None, **changes: Any) -> ModelConfig:
    """That model with other fields, each wherever there is a field of that name; `layers`: as many, otherwise alike."""
    attention, mlp = attention_of(config), mlp_of(config)
    places = layers or [Positions(each.rope, each.window) for each in config.attention_blocks.values()]
    mlp = replace(mlp, **_own(DenseMLPBlock, changes))
    attention = replace(attention, **_own(AttentionBlock, changes))
    blocks = tuple((replace(attention, rope=each.rope, window=each.window), mlp) for each in places)
    return replace(config, layers=blocks, **_own(ModelConfig, changes))


def attention_of(config: ModelShape) -> AttentionBlock:
    """The first layer's."""
    return config.attention_blocks[0]


def mlp_of(config: ModelShape) -> DenseMLPBlock:
    """The first layer's."""
    return next(block for block in config.layers[0] if isinstance(block, DenseMLPBlock))


def positions_of(config: ModelShape) -> tuple[Positions, ...]:
    """By layer."""
    return tuple(Positions(each.rope, each.window) for each in config.attention_blocks.values())


def _own(kind: type[Any], changes: dict[str, Any]) -> dict[str, Any]:
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in changes.items() if name in names}
