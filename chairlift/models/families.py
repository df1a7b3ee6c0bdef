"""Reads and checks a Hugging Face config, and describes its model as a `ModelConfig`.

`FAMILIES` is a table from architectures to what differs from a Llama. A family that differs by these flags alone is one
more entry.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import transformers

from chairlift.config import DType
from chairlift.errors import CheckpointError, named, shown
from chairlift.models.blocks import (
    AS_LLAMA,
    Activation,
    AttentionBlock,
    Block,
    DenseMLPBlock,
    Norms,
    QKNorm,
    QueryGrowth,
    TensorNames,
)
from chairlift.models.claims import MAX_HEAD_DIM
from chairlift.models.config import LAYER_TYPES, Layer, ModelConfig
from chairlift.models.mixers import read_gated_delta_net, read_gated_short_conv
from chairlift.models.rope import check_rope_numbers, read_rope
from chairlift.models.rotary import MAX_POSITIONS, RopeConfig
from chairlift.models.towers import NOT_TEXT, TOWERS, find_text_model, without_sections

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
}
_FULL, _SLIDING = sorted(LAYER_TYPES)
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SCALES = (
    *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
)
_LARGEST_SCALE = 1e38  # about what float32 represents
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
    mixers: Mapping[str, Callable[[Any], Block]] = field(default_factory=dict)  # by layer type, instead of attention
    names: TensorNames = AS_LLAMA


_MODEL: Differences = {"rms_norm_eps": attrgetter("rms_norm_eps")}
_MLP: Differences = {
    "intermediate_size": attrgetter("intermediate_size"),
    "activation": lambda config: _read_activation(config),
}
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
    "Ministral3ForCausalLM": Family(
        "Ministral3Config", {"growth": lambda config: _read_growth(config.rope_parameters)}, has_windows=True
    ),
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
    "Qwen3_5ForCausalLM": Family(
        "Qwen3_5TextConfig",
        {**_ATTENTION_BIAS, "qk_norm": QKNorm.HEAD, "has_output_gate": True},
        model={"has_offset_norms": True},
        is_partly_rotated=True,
        ropes=lambda config: [without_sections(config.rope_parameters)] * config.num_hidden_layers,
        mixers={"linear_attention": read_gated_delta_net},
        names=TensorNames(skipped=NOT_TEXT),
    ),
    "Lfm2ForCausalLM": Family(
        "Lfm2Config",
        {"qk_norm": QKNorm.HEAD},
        {"activation": Activation.SILU, "intermediate_size": lambda config: _lfm2_inner_size(config)},
        {"rms_norm_eps": attrgetter("norm_eps")},
        mixers={"conv": read_gated_short_conv},
        names=TensorNames(
            (
                ("norm", "embedding_norm"),
                ("input_layernorm", "operator_norm"),
                ("post_attention_layernorm", "ffn_norm"),
                ("self_attn.o_proj", "self_attn.out_proj"),
                ("self_attn.q_norm", "self_attn.q_layernorm"),
                ("self_attn.k_norm", "self_attn.k_layernorm"),
                ("mlp.gate_proj", "feed_forward.w1"),
                ("mlp.up_proj", "feed_forward.w3"),
                ("mlp.down_proj", "feed_forward.w2"),
            )
        ),
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

ARCHITECTURES = (*FAMILIES, *TOWERS)
"""All that are described: families, and models whose text part is of one."""


def preload() -> None:
    """Imports the nine hundred modules that transformers imports when the first config of any family is made."""
    _ = transformers.LlamaConfig


def describe_family(architecture: str, raw: dict[str, Any]) -> ModelConfig:
    """From the config.json of an architecture in `ARCHITECTURES`.

    CheckpointError if it asks for what is not supported.
    """
    if architecture in TOWERS:
        text = find_text_model(architecture, raw)
        described = describe_family(text.architecture, text.raw)
        return replace(described, architecture=architecture, names=replace(described.names, skipped=NOT_TEXT))
    family = FAMILIES[architecture]
    refuse_unreadable(raw)
    config: Any = getattr(transformers, family.config).from_dict(raw)
    _check_sizes(config)
    _check_scales(config)
    # A model's construction does this again in transformers, when it knows what a config.json has beside rope's fields.
    config.standardize_rope_params()
    head_dim: int | None = getattr(config, "head_dim", None)
    if head_dim is None:
        head_dim = config.hidden_size // config.num_attention_heads
    if head_dim > MAX_HEAD_DIM:
        raise CheckpointError(f"its heads have {head_dim} elements, and {MAX_HEAD_DIM} are the most")
    layers = _read_layers(family, config, head_dim)
    ropes = [block.rope for layer in layers for block in layer if isinstance(block, AttentionBlock) and block.rope]
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.vocab_size,
        layers=layers,
        max_position_embeddings=max([config.max_position_embeddings, *(rope.scaled_length for rope in ropes)]),
        dtype=read_dtype(config),
        hidden_size=config.hidden_size,
        is_tied=config.tie_word_embeddings,
        names=family.names,
        **_resolve(_MODEL | family.model, config),
    )


def _read_layers(family: Family, config: Any, head_dim: int) -> tuple[Layer, ...]:
    kinds = _read_layer_types(family, config)
    has_window = _SLIDING in kinds and getattr(config, "use_sliding_window", True)
    window = read_window(config.sliding_window) if has_window else None
    attention = {
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        **_resolve(family.attention, config),
    }
    mixers = {kind: read(config) for kind, read in family.mixers.items() if kind in kinds}
    mlp = DenseMLPBlock(**_resolve(_MLP | family.mlp, config))
    layers: list[Layer] = []
    for kind, rope in zip(kinds, _read_ropes(family, config, head_dim), strict=True):
        seen = window if kind == _SLIDING else None
        mixer = mixers[kind] if kind in mixers else AttentionBlock(rope=rope, window=seen, **attention)
        layers.append((mixer, mlp))
    return tuple(layers)


def _resolve(differences: Differences, config: Any) -> dict[str, Any]:
    return {name: value(config) if callable(value) else value for name, value in differences.items()}


def _read_growth(rope: dict[str, Any]) -> QueryGrowth | None:
    beta, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    if beta is None:
        return None
    check_rope_numbers({"factor": beta, "original_max_position_embeddings": length})
    if length is None:
        raise CheckpointError("llama_4_scaling_beta of its rope needs original_max_position_embeddings")
    return QueryGrowth(beta, length)


def _lfm2_inner_size(config: Any) -> int:
    """The inner features of its MLPs: two thirds of what the config says, scaled, and rounded up."""
    size: int = config.intermediate_size
    if not config.block_auto_adjust_ff_dim:
        return size
    multiplier, multiple = config.block_ffn_dim_multiplier, config.block_multiple_of
    size = int((1 if multiplier is None else multiplier) * int(2 * size / 3))
    return size if multiplier is None else multiple * -(-size // multiple)


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


def _read_layer_types(family: Family, config: Any) -> list[str]:
    """Each layer's. CheckpointError for one that the family has not."""
    if not family.has_windows and not family.mixers:
        return [_FULL] * config.num_hidden_layers
    supported = {*family.mixers, *(LAYER_TYPES if family.has_windows else {_FULL})}
    kinds = list(getattr(config, "layer_types", None) or [_SLIDING] * config.num_hidden_layers)
    if unknown := set(kinds) - supported:
        raise CheckpointError(f"layer type {shown(min(unknown))} is not supported, only {', '.join(sorted(supported))}")
    if len(kinds) != config.num_hidden_layers:
        raise CheckpointError(
            f"it has types for {len(kinds)} layers, and num_hidden_layers is {config.num_hidden_layers}"
        )
    return kinds


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


def _check_scales(config: Any) -> None:
    for name in _SCALES:
        scale = getattr(config, name, None)
        if scale is not None and not (type(scale) in (int, float) and 0 < scale < _LARGEST_SCALE):
            raise CheckpointError(f"{name} must be a positive number, not {shown(scale)}")


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
