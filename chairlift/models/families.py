"""Reads and checks a Hugging Face config, and describes its model as a `ModelConfig`.

`FAMILIES` is a table from architectures to what differs from a Llama. A family that differs by these flags alone is one
more entry.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import transformers

from chairlift.config import DType
from chairlift.errors import CheckpointError, named, shown
from chairlift.models.blocks import Activation, AttentionBlock, DenseMLPBlock, Norms, QKNorm
from chairlift.models.config import LAYER_TYPES, ModelConfig
from chairlift.models.rope import read_rope
from chairlift.models.rotary import MAX_POSITIONS, RopeConfig

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_REFUSED_FIELDS = ("attention_chunk_size", "use_bidirectional_attention")  # they change what a token may see

Differences = dict[str, Any]


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


_ATTENTION_BIAS = {"has_qkv_bias": attrgetter("attention_bias"), "has_output_bias": attrgetter("attention_bias")}
_MLP_BIAS = {"has_bias": attrgetter("mlp_bias")}
_MULTIPLIERS = {
    "embedding_scale": attrgetter("embedding_multiplier"),
    "residual_scale": attrgetter("residual_multiplier"),
    "logits_divisor": attrgetter("logits_scaling"),
}
_GEMMA_ATTENTION = {**_ATTENTION_BIAS, "scale": lambda config: config.query_pre_attn_scalar**-0.5}
_GEMMA = {
    "norms": Norms.PRE_AND_POST,
    "has_offset_norms": True,
    "embedding_scale": lambda config: config.hidden_size**0.5,
    "logits_softcap": attrgetter("final_logit_softcapping"),
}
FAMILIES = {
    "LlamaForCausalLM": Family("LlamaConfig", _ATTENTION_BIAS, _MLP_BIAS),
    "MistralForCausalLM": Family("MistralConfig", has_windows=True),
    "Qwen2ForCausalLM": Family("Qwen2Config", {"has_qkv_bias": True}, has_windows=True),
    "Qwen3ForCausalLM": Family("Qwen3Config", {**_ATTENTION_BIAS, "qk_norm": QKNorm.HEAD}, has_windows=True),
    "SmolLM3ForCausalLM": Family(
        "SmolLM3Config",
        _ATTENTION_BIAS,
        _MLP_BIAS,
        has_windows=True,
        ropes=lambda config: [config.rope_parameters if has_rope else None for has_rope in config.no_rope_layers],
    ),
    "GraniteForCausalLM": Family(
        "GraniteConfig", {**_ATTENTION_BIAS, "scale": attrgetter("attention_multiplier")}, _MLP_BIAS, _MULTIPLIERS
    ),
    "Phi3ForCausalLM": Family(
        "Phi3Config", {"is_fused": True}, {"is_fused": True}, has_windows=True, is_partly_rotated=True
    ),
    "Olmo2ForCausalLM": Family(
        "Olmo2Config", {**_ATTENTION_BIAS, "qk_norm": QKNorm.ALL_HEADS}, model={"norms": Norms.POST}
    ),
    "Gemma2ForCausalLM": Family(
        "Gemma2Config",
        {**_GEMMA_ATTENTION, "softcap": attrgetter("attn_logit_softcapping")},
        model=_GEMMA,
        has_windows=True,
    ),
    "Gemma3ForCausalLM": Family(
        "Gemma3TextConfig",
        {**_GEMMA_ATTENTION, "qk_norm": QKNorm.HEAD},
        model=_GEMMA,
        has_windows=True,
        ropes=lambda config: _ropes_by_type(config),
    ),
    "SeedOssForCausalLM": Family(
        "SeedOssConfig", {**_ATTENTION_BIAS, "has_output_bias": attrgetter("attention_out_bias")}, _MLP_BIAS
    ),
    "InternLM3ForCausalLM": Family(  # not every version of transformers has its class, and Llama's keeps unknown fields
        "LlamaConfig",
        {
            "has_qkv_bias": lambda config: getattr(config, "qkv_bias", config.attention_bias),
            "has_output_bias": lambda config: getattr(config, "bias", config.mlp_bias),
        },
        {"has_bias": lambda config: getattr(config, "bias", config.mlp_bias)},
    ),
}
"""By architecture, as `config.json` names it."""


def preload() -> None:
    """Imports the nine hundred modules that transformers imports when the first config of any family is made."""
    _ = transformers.LlamaConfig


def describe_family(architecture: str, raw: dict[str, Any]) -> ModelConfig:
    """From the config.json of an architecture in `FAMILIES`. CheckpointError if it asks for what is not supported."""
    family = FAMILIES[architecture]
    refuse_unreadable(raw)
    config: Any = getattr(transformers, family.config).from_dict(raw)
    _check_sizes(config)
    # A model's construction does this again in transformers, when it knows what a config.json has beside rope's fields.
    config.standardize_rope_params()
    head_dim: int | None = getattr(config, "head_dim", None)
    if head_dim is None:
        head_dim = config.hidden_size // config.num_attention_heads
    windows = _read_windows(config) if family.has_windows else [None] * config.num_hidden_layers
    ropes = _read_ropes(family, config, head_dim)
    attention = {
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        **_resolve(family.attention, config),
    }
    mlp = DenseMLPBlock(
        intermediate_size=config.intermediate_size,
        activation=_read_activation(config),
        **_resolve(family.mlp, config),
    )
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.vocab_size,
        layers=tuple(
            (AttentionBlock(rope=rope, window=window, **attention), mlp)
            for rope, window in zip(ropes, windows, strict=False)
        ),
        max_position_embeddings=max([config.max_position_embeddings, *(rope.scaled_length for rope in ropes if rope)]),
        dtype=read_dtype(config),
        hidden_size=config.hidden_size,
        rms_norm_eps=config.rms_norm_eps,
        is_tied=config.tie_word_embeddings,
        **_resolve(family.model, config),
    )


def _resolve(differences: Differences, config: Any) -> dict[str, Any]:
    return {name: value(config) if callable(value) else value for name, value in differences.items()}


def _ropes_by_type(config: Any) -> list[Any]:
    by_type = {kind: config.rope_parameters.get(kind) for kind in config.layer_types}
    if without := sorted(kind for kind, rope in by_type.items() if not isinstance(rope, dict)):
        raise CheckpointError(f"rope_parameters has none for layers of type {named(without[0])}")
    for rope in by_type.values():
        rope.pop("truncate", None)  # transformers looks for it beside the types, where it is not
    return [by_type[kind] for kind in config.layer_types]


def _read_ropes(family: Family, config: Any, head_dim: int) -> list[RopeConfig | None]:
    """Each layer's. CheckpointError as for `read_rope`, and if there are not as many as layers."""
    given: list[Any] = family.ropes(config)
    read: dict[int, RopeConfig] = {}
    if len(given) != config.num_hidden_layers:
        raise CheckpointError(
            f"it has rope for {len(given)} layers, and num_hidden_layers is {config.num_hidden_layers}"
        )
    for rope in given:
        if rope is not None and id(rope) not in read:  # layers share them
            read[id(rope)] = read_rope(
                rope, config.max_position_embeddings, head_dim, is_partly_rotated=family.is_partly_rotated
            )
    return [None if rope is None else read[id(rope)] for rope in given]


def _read_windows(config: Any) -> list[int | None]:
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    if unknown := set(kinds) - LAYER_TYPES:
        raise CheckpointError(
            f"layer type {shown(min(unknown))} is not supported, only {', '.join(sorted(LAYER_TYPES))}"
        )
    window = read_window(config.sliding_window) if getattr(config, "use_sliding_window", True) else None
    return [window if kind == "sliding_attention" else None for kind in kinds]


def read_window(window: object) -> int | None:
    """Checks how many keys a query may see; None: all. CheckpointError for what is no such number."""
    if window is not None and not (type(window) is int and 1 <= window <= MAX_POSITIONS):
        raise CheckpointError(f"sliding_window must be a whole number from 1 to {MAX_POSITIONS}, not {shown(window)}")
    return window


def refuse_unreadable(raw: dict[str, Any]) -> None:
    """CheckpointError for fields that would silently change results."""
    for name in _REFUSED_FIELDS:
        if raw.get(name):
            raise CheckpointError(f"{name} is not supported")


def _check_sizes(config: Any) -> None:
    for name in (*_SIZES, "max_position_embeddings", "head_dim"):
        size = getattr(config, name, None)
        if size is not None and size < 1:
            raise CheckpointError(f"{name} must be at least 1, not {size}")
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise CheckpointError(f"{num_heads} attention heads cannot share {num_kv_heads} key/value heads")


def _read_activation(config: Any) -> Activation:
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    if name not in _ACTIVATIONS:
        raise CheckpointError(f"activation {shown(name)} is not supported, only {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def read_dtype(config: Any) -> DType:
    """The number format of the weights. CheckpointError for one that cannot be computed in."""
    name = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    if name not in tuple(DType):
        raise CheckpointError(f"dtype {named(name)} is not supported, only {', '.join(DType)}")
    return DType(name)
