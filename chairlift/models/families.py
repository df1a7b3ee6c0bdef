"""Reads and checks a Hugging Face config, and describes its model as a `ModelConfig`.

`FAMILIES` is a table from architectures to what differs from a Llama. A family that differs by these flags alone is one
more entry.
"""

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from chairlift.errors import CheckpointError, shown
from chairlift.models.blocks import (
    Activation,
    AttentionBlock,
    DenseMLPBlock,
    Norms,
    QKNorm,
    TensorNames,
)
from chairlift.models.claims import MAX_LAYERS
from chairlift.models.config import LAYER_TYPES, Layer, ModelConfig
from chairlift.models.family import ATTENTION_BIAS, MLP_BIAS, MULTIPLIERS, Differences, Family
from chairlift.models.fields import (
    check_heads,
    check_scales,
    check_sizes,
    has_fused_mlps,
    read_activation,
    read_dtype,
    read_growth,
    read_head_dim,
    read_lfm2_inner_size,
    read_plain_mlp,
    read_ropes_by_type,
    read_window,
    refuse_unreadable,
)
from chairlift.models.gemmas import (
    NAMES_OF_GEMMA3N,
    NAMES_OF_GEMMA4,
    read_gemma3n,
    read_gemma4,
    read_layer_inputs,
    read_num_streams,
)
from chairlift.models.mixers import (
    read_gated_delta_net,
    read_gated_short_conv,
    read_mamba2_of_falcon,
    read_mamba2_of_granite,
    read_mamba2_of_nemotron,
)
from chairlift.models.mixture_families import GRANITE_SPELLINGS, GRANITE_STACKED, MIXTURE_FAMILIES
from chairlift.models.mixtures import read_granite_moe_hybrid
from chairlift.models.plain_config import PLAIN_CLASSES, read_plain_config
from chairlift.models.rope import read_rope
from chairlift.models.rotary import RopeConfig
from chairlift.models.towers import NOT_TEXT, TOWERS, find_text_model, without_sections

_FULL, _SLIDING = sorted(LAYER_TYPES)

_MODEL: Differences = {"rms_norm_eps": attrgetter("rms_norm_eps")}
_MLP: Differences = {
    "intermediate_size": attrgetter("intermediate_size"),
    "activation": read_activation,
}
_GEMMA_ATTENTION = {**ATTENTION_BIAS, "scale": lambda config: config.query_pre_attn_scalar**-0.5}
_GEMMA = {
    "norms": Norms.PRE_AND_POST,
    "has_offset_norms": True,
    "embedding_scale": lambda config: config.hidden_size**0.5,
    "logits_softcap": attrgetter("final_logit_softcapping"),
}
_GEMMA_OF_UNLIKE_LAYERS = {**_GEMMA, "has_offset_norms": False, "layer_inputs": read_layer_inputs}
_GEMMA4 = {**_GEMMA_OF_UNLIKE_LAYERS, "has_layer_scales": True}
FAMILIES = {
    "LlamaForCausalLM": Family("LlamaConfig", ATTENTION_BIAS, MLP_BIAS),
    "MistralForCausalLM": Family("MistralConfig", has_windows=True),
    "Ministral3ForCausalLM": Family("Ministral3Config", {"growth": read_growth}, has_windows=True),
    "Qwen2ForCausalLM": Family("Qwen2Config", {"has_qkv_bias": True}, has_windows=True),
    "Qwen3ForCausalLM": Family("Qwen3Config", {**ATTENTION_BIAS, "qk_norm": QKNorm.HEAD}, has_windows=True),
    "SmolLM3ForCausalLM": Family(
        "SmolLM3Config",
        ATTENTION_BIAS,
        MLP_BIAS,
        has_windows=True,
        ropes=lambda config: [config.rope_parameters if has_rope else None for has_rope in config.no_rope_layers],
    ),
    "GraniteForCausalLM": Family(
        "GraniteConfig", {**ATTENTION_BIAS, "scale": attrgetter("attention_multiplier")}, MLP_BIAS, MULTIPLIERS
    ),
    "Phi3ForCausalLM": Family(
        "Phi3Config", {"is_fused": True}, {"is_fused": True}, has_windows=True, is_partly_rotated=True
    ),
    "Olmo2ForCausalLM": Family(
        "Olmo2Config", {**ATTENTION_BIAS, "qk_norm": QKNorm.ALL_HEADS}, model={"norms": Norms.POST}
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
        ropes=read_ropes_by_type,
    ),
    "Gemma3nForCausalLM": Family(
        "Gemma3nTextConfig",
        model={**_GEMMA_OF_UNLIKE_LAYERS, "num_streams": read_num_streams},
        layers=read_gemma3n,
        names=NAMES_OF_GEMMA3N,
    ),
    "Gemma4ForCausalLM": Family("Gemma4TextConfig", model=_GEMMA4, layers=read_gemma4, names=NAMES_OF_GEMMA4),
    "Gemma4UnifiedForCausalLM": Family(
        "Gemma4UnifiedTextConfig", model=_GEMMA4, layers=read_gemma4, names=NAMES_OF_GEMMA4
    ),
    "Qwen3_5ForCausalLM": Family(
        "Qwen3_5TextConfig",
        {**ATTENTION_BIAS, "qk_norm": QKNorm.HEAD, "has_output_gate": True},
        model={"has_offset_norms": True},
        is_partly_rotated=True,
        ropes=lambda config: [without_sections(config.rope_parameters)] * config.num_hidden_layers,
        mixers={"linear_attention": read_gated_delta_net},
        names=TensorNames(skipped=NOT_TEXT),
    ),
    "Lfm2ForCausalLM": Family(
        "Lfm2Config",
        {"qk_norm": QKNorm.HEAD},
        {"activation": Activation.SILU, "intermediate_size": read_lfm2_inner_size},
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
    "NemotronHForCausalLM": Family(
        "NemotronHConfig",
        model={"rms_norm_eps": attrgetter("layer_norm_epsilon")},
        ropes=lambda config: [None] * config.num_hidden_layers,
        mixers={"linear_attention": read_mamba2_of_nemotron, "mlp": read_plain_mlp},
        has_mlps=False,
        names=TensorNames(
            (
                ("embed_tokens", "embeddings"),
                ("norm", "norm_f"),
                ("input_layernorm", "norm"),
                ("post_attention_layernorm", "norm"),
                ("mamba.", "mixer."),
                ("self_attn.", "mixer."),
                ("mlp.", "mixer."),
            ),
            body="backbone.",
        ),
    ),
    "GraniteMoeHybridForCausalLM": Family(
        "GraniteMoeHybridConfig",
        {**ATTENTION_BIAS, "scale": attrgetter("attention_multiplier")},
        {"intermediate_size": attrgetter("shared_intermediate_size"), "is_fused": has_fused_mlps},
        MULTIPLIERS,
        ropes=lambda config: (
            [config.rope_parameters if config.position_embedding_type == "rope" else None] * config.num_hidden_layers
        ),
        mixers={"linear_attention": read_mamba2_of_granite},
        mixtures=read_granite_moe_hybrid,
        names=TensorNames(
            (
                *GRANITE_SPELLINGS,
                ("mlp.gate_up_proj", "shared_mlp.input_linear"),
                ("mlp.down_proj", "shared_mlp.output_linear"),
                ("shared_mlp.gate_up_proj", "shared_mlp.input_linear"),
                ("shared_mlp.down_proj", "shared_mlp.output_linear"),
            ),
            stacked=GRANITE_STACKED,
        ),
    ),
    "FalconH1ForCausalLM": Family(
        "FalconH1Config",
        {
            **ATTENTION_BIAS,
            "scale": lambda config: config.key_multiplier * read_head_dim(config) ** -0.5,
            "input_scale": attrgetter("attention_in_multiplier"),
            "output_scale": attrgetter("attention_out_multiplier"),
        },
        {
            **MLP_BIAS,
            "gate_scale": lambda config: config.mlp_multipliers[0],
            "output_scale": lambda config: config.mlp_multipliers[1],
        },
        {
            "embedding_scale": attrgetter("embedding_multiplier"),
            "logits_divisor": lambda config: 1 / config.lm_head_multiplier,
        },
        beside=read_mamba2_of_falcon,
        names=TensorNames(
            (("norm", "final_layernorm"), ("post_attention_layernorm", "pre_ff_layernorm"), ("mlp.", "feed_forward."))
        ),
    ),
    "SeedOssForCausalLM": Family(
        "SeedOssConfig", {**ATTENTION_BIAS, "has_output_bias": attrgetter("attention_out_bias")}, MLP_BIAS
    ),
    "InternLM3ForCausalLM": Family(  # not every version of transformers has its class, and Llama's keeps unknown fields
        "LlamaConfig",
        {
            "has_qkv_bias": lambda config: getattr(config, "qkv_bias", config.attention_bias),
            "has_output_bias": lambda config: getattr(config, "bias", config.mlp_bias),
        },
        {"has_bias": lambda config: getattr(config, "bias", config.mlp_bias)},
    ),
    **MIXTURE_FAMILIES,
}
"""By architecture, as `config.json` names it."""

ARCHITECTURES = (*FAMILIES, *TOWERS)
"""All that are described: families, and models whose text part is of one."""


def find_architecture(named: Sequence[str]) -> str | None:
    """The first of these names that is described here; None: there is none.

    A decoder without its head, as models of vectors are stored, is called `Qwen3Model` where the whole is
    `Qwen3ForCausalLM`.
    """
    bodies = [name.removesuffix("Model").removesuffix("Text") for name in named if name.endswith("Model")]
    return next((name for name in ARCHITECTURES if name in (*named, *(f"{body}ForCausalLM" for body in bodies))), None)


def preload() -> None:
    """Imports the nine hundred modules that transformers imports when the first config of any family is made."""
    import transformers

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
    config = _read_config(family.config, raw)
    check_sizes(config)
    check_scales(config)
    if config.num_hidden_layers > MAX_LAYERS:  # a list of layers, which is no number in the file
        raise CheckpointError(f"it has {config.num_hidden_layers} layers, and {MAX_LAYERS} are the most")
    layers = _read_layers(family, config)
    ropes = [block.rope for layer in layers for block in layer if isinstance(block, AttentionBlock) and block.rope]
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.vocab_size,
        layers=layers,
        max_position_embeddings=max([config.max_position_embeddings, *(rope.scaled_length for rope in ropes)]),
        dtype=read_dtype(config),
        hidden_size=config.hidden_size,
        is_tied=config.tie_word_embeddings,
        names=_without_unread_tensors(family.names, config, layers),
        **_resolve(_MODEL | family.model, config),
    )


def _read_config(class_name: str, raw: dict[str, Any]) -> Any:
    """Reads a config.json's fields as transformers' class does, whose defaults stand in for those that it lacks."""
    if class_name in PLAIN_CLASSES and (plain := read_plain_config(class_name, raw)) is not None:
        return plain
    import transformers  # slow

    config = getattr(transformers, class_name).from_dict(raw)
    # A model's construction does this again in transformers, when it knows what a config.json has beside rope's fields.
    config.standardize_rope_params()
    return config


def _without_unread_tensors(names: TensorNames, config: Any, layers: tuple[Layer, ...]) -> TensorNames:
    """Skips the layers after the last, which guess further tokens, and keys of layers that read those of others."""
    first, num_guessing = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0
    guessing = [f"layers.{layer}." for layer in range(first, first + min(num_guessing, MAX_LAYERS))]
    unread = [
        f"layers.{index}.{block.name}.{part}"
        for index, layer in enumerate(layers)
        for block in layer
        if isinstance(block, AttentionBlock)
        for part in block.unread
    ]
    return replace(names, skipped_in_body=(*guessing, *unread))


def _read_layers(family: Family, config: Any) -> tuple[Layer, ...]:
    if family.layers is not None:
        return tuple(family.layers(config))
    check_heads(config.num_attention_heads, config.num_key_value_heads)
    kinds, head_dim = _read_layer_types(family, config), read_head_dim(config)
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
    beside = () if family.beside is None else (family.beside(config),)
    after = (DenseMLPBlock(**_resolve(_MLP | family.mlp, config)),) if family.has_mlps else ()
    mixtures = [()] * len(kinds) if family.mixtures is None else family.mixtures(config)
    layers: list[Layer] = []
    for kind, rope, mixture in zip(kinds, _read_ropes(family, config, head_dim), mixtures, strict=True):
        seen = window if kind == _SLIDING else None
        mixer = mixers[kind] if kind in mixers else AttentionBlock(rope=rope, window=seen, **attention)
        layers.append((*beside, mixer, *(mixture or after)))
    return tuple(layers)


def _resolve(differences: Differences, config: Any) -> dict[str, Any]:
    return {name: value(config) if callable(value) else value for name, value in differences.items()}


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
