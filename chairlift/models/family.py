"""Says how an architecture differs from a plain decoder; `families` and `mixture_families` have the tables."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from chairlift.models.blocks import AS_LLAMA, Block, TensorNames
from chairlift.models.config import Layer

Differences = dict[str, Any]
"""Fields and what they always are, or functions of a config that compute it."""


@dataclass(frozen=True, slots=True)
class Family:
    """Says how an architecture differs from a plain decoder with norms before attention and MLP."""

    config: str  # transformers' class, whose defaults stand in for what a config.json leaves out
    # Fields of AttentionBlock, DenseMLPBlock and ModelConfig: what they always are, or functions of its object.
    attention: Differences = field(default_factory=dict)
    mlp: Differences = field(default_factory=dict)
    model: Differences = field(default_factory=dict)
    has_windows: bool = False  # in the layers that layer_types says, or in all
    is_partly_rotated: bool = False  # rope turns the share of a head that partial_rotary_factor says
    ropes: Callable[[Any], list[Any]] = lambda config: [config.rope_parameters] * config.num_hidden_layers
    mixers: Mapping[str, Callable[[Any], Block]] = field(default_factory=dict)  # by layer type, instead of attention
    mixtures: Callable[[Any], list[Layer]] | None = None  # each layer's experts; none: it has a dense MLP
    layers: Callable[[Any], list[Layer]] | None = None  # reads all of them; then only `model` and `names` count beside
    beside: Callable[[Any], Block] | None = None  # what stands beside attention in every layer
    has_mlps: bool = True  # each layer has one after its mixer
    names: TensorNames = AS_LLAMA


ATTENTION_BIAS = {"has_qkv_bias": attrgetter("attention_bias"), "has_output_bias": attrgetter("attention_bias")}
MLP_BIAS = {"has_bias": attrgetter("mlp_bias")}
MULTIPLIERS = {
    "embedding_scale": attrgetter("embedding_multiplier"),
    "residual_scale": attrgetter("residual_multiplier"),
    "logits_divisor": attrgetter("logits_scaling"),
}
