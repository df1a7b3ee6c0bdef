"""Reads the layers of Gemma 3n and 4, which differ from each other: heads, windows, ropes, and whose keys they read."""

from typing import Any

from chairlift.errors import CheckpointError, shown
from chairlift.models.blocks import (
    AltUpBlock,
    AttentionBlock,
    Block,
    DenseMLPBlock,
    LaurelBlock,
    LayerInputsConfig,
    ParallelMLPBlock,
    PerLayerInputBlock,
    QKNorm,
    StackedExperts,
    TensorNames,
)
from chairlift.models.claims import MAX_HEAD_DIM
from chairlift.models.config import LAYER_TYPES, Layer
from chairlift.models.fields import check_heads, read_activation, read_ropes_by_type, read_window
from chairlift.models.mixtures import read_gemma4_experts
from chairlift.models.rope import read_rope, rope_frequencies
from chairlift.models.rotary import RopeConfig

_FULL, _SLIDING = sorted(LAYER_TYPES)
_MAX_STREAMS = 64
_VECTOR = 32  # elements that native code moves at a time, at most
_PER_LAYER_INPUT = (
    ("per_layer_input.gate", "per_layer_input_gate"),
    ("per_layer_input.projection", "per_layer_projection"),
)
NAMES_OF_GEMMA3N = TensorNames(_PER_LAYER_INPUT)
NAMES_OF_GEMMA4 = TensorNames(
    (
        *_PER_LAYER_INPUT,
        ("mlp.pre_norm", "pre_feedforward_layernorm"),
        ("mlp.post_norm", "post_feedforward_layernorm_1"),
        ("experts.pre_norm", "pre_feedforward_layernorm_2"),
        ("experts.post_norm", "post_feedforward_layernorm_2"),
        ("experts.router_scale", "router.scale"),
        ("experts.expert_scales", "router.per_expert_scale"),
        ("experts.router", "router.proj"),
    ),
    stacked=StackedExperts("experts.", "gate_up_proj", "down_proj"),
)


def read_gemma4(config: Any) -> list[Layer]:
    """Reads each layer's blocks. CheckpointError, here as below, for sizes and types that make none."""
    attention, activation, size = _read_attention(config), read_activation(config), config.intermediate_size
    experts, inputs = read_gemma4_experts(config), _read_input_block(config)
    layers: list[Layer] = []
    for block in attention:
        is_wide = block.source is not None and config.use_double_wide_mlp
        sizes: dict[str, Any] = {"intermediate_size": 2 * size if is_wide else size, "activation": activation}
        mlp = DenseMLPBlock(**sizes) if experts is None else ParallelMLPBlock(**sizes)
        layers.append((block, mlp, *(() if experts is None else (experts,)), *inputs))
    return layers


def read_gemma3n(config: Any) -> list[Layer]:
    """As above, with an AltUp and a Laurel block that stand around the others."""
    if config.altup_active_idx != 0:
        raise CheckpointError(f"altup_active_idx must be 0, not {shown(config.altup_active_idx)}")
    beside = (
        AltUpBlock(num_streams=read_num_streams(config), has_output_scale=config.altup_correct_scale),
        LaurelBlock(rank=_count(config, "laurel_rank", 1)),
    )
    inputs, activation = _read_input_block(config), read_activation(config)
    layers: list[Layer] = []
    parts = zip(_read_attention(config), config.intermediate_size, config.activation_sparsity_pattern, strict=True)
    for block, size, sparsity in parts:
        if type(sparsity) not in (int, float) or not 0 <= sparsity < 1:
            raise CheckpointError(
                f"activation_sparsity_pattern must be shares from 0 on below 1, not {shown(sparsity)}"
            )
        mlp = DenseMLPBlock(intermediate_size=size, activation=activation, sparsity=float(sparsity))
        layers.append((block, mlp, *inputs, *beside))
    return layers


def read_layer_inputs(config: Any) -> LayerInputsConfig | None:
    """Reads what layers get of each token; None: nothing."""
    size = _count(config, "hidden_size_per_layer_input", 0) if hasattr(config, "hidden_size_per_layer_input") else 0
    if not size:
        return None
    vocab_size = _count(config, "vocab_size_per_layer_input", 1)
    return LayerInputsConfig(size=size, num_layers=config.num_hidden_layers, vocab_size=vocab_size)


def read_num_streams(config: Any) -> int:
    """Reads how many streams of tokens AltUp has."""
    count = _count(config, "altup_num_inputs", 1)
    if count > _MAX_STREAMS:
        raise CheckpointError(f"altup_num_inputs must be at most {_MAX_STREAMS}, not {count}")
    return count


def _read_input_block(config: Any) -> tuple[Block, ...]:
    inputs = read_layer_inputs(config)
    return () if inputs is None else (PerLayerInputBlock(size=inputs.size, activation=read_activation(config)),)


def _read_attention(config: Any) -> list[AttentionBlock]:
    """The attention of each layer; the last ones may read the keys of the last layer of their kind that has some."""
    kinds, num_shared = _read_layer_types(config), _count(config, "num_kv_shared_layers", 0)
    num_own = len(kinds) - num_shared
    owners = {kind: layer for layer, kind in enumerate(kinds[: max(0, num_own)])}
    if missing := sorted(set(kinds) - owners.keys()):
        raise CheckpointError(
            f"num_kv_shared_layers is {num_shared}, which leaves no layer of type {missing[0]} its keys"
        )
    ropes = read_ropes_by_type(config)
    return [
        _read_layer_attention(
            config, layer, kinds[layer], ropes[layer], owners[kinds[layer]] if layer >= num_own else None
        )
        for layer in range(len(kinds))
    ]


def _read_layer_attention(config: Any, layer: int, kind: str, rope: Any, source: int | None) -> AttentionBlock:
    own, is_windowed = config.per_layer_config[layer], kind == _SLIDING
    head_dim, num_kv_heads = _count(own, "head_dim", 1), _count(own, "num_key_value_heads", 1)
    if head_dim > MAX_HEAD_DIM:
        raise CheckpointError(f"heads of layer {layer} have {head_dim} elements, and {MAX_HEAD_DIM} are the most")
    check_heads(config.num_attention_heads, num_kv_heads)
    has_own_keys = source is None
    rotation = read_rope(rope, config.max_position_embeddings, head_dim, is_partly_rotated=False)
    are_keys_values = has_own_keys and not is_windowed and getattr(config, "attention_k_eq_v", False)
    is_shared = are_keys_values and not config.num_kv_shared_layers  # readers would need the factors of its norm
    return AttentionBlock(
        num_heads=config.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=1.0,
        rope=rotation,
        window=read_window(config.sliding_window) if is_windowed else None,
        qk_norm=QKNorm.HEAD,
        has_qkv_bias=config.attention_bias,
        has_output_bias=config.attention_bias,
        has_value_norm=has_own_keys,
        are_keys_values=are_keys_values,
        num_common=_count_common(rotation, head_dim) if is_shared else 0,
        source=source,
    )


def _count_common(rope: RopeConfig, head_dim: int) -> int:
    """Elements of a head that do not rotate, which are behind the others of each half, in whole vectors."""
    if rope.kind != "proportional" or head_dim % (2 * _VECTOR):
        return 0
    frequencies, factor = rope_frequencies(rope, head_dim, 1)
    num_rotated = len(frequencies) if factor != 1.0 else int(frequencies.count_nonzero())
    return max(0, head_dim - 2 * max(_VECTOR, -(-num_rotated // _VECTOR) * _VECTOR))


def _read_layer_types(config: Any) -> list[str]:
    kinds = list(config.layer_types)
    if unknown := set(kinds) - LAYER_TYPES:
        raise CheckpointError(f"layer type {shown(min(unknown))} is not supported, only {_FULL}, {_SLIDING}")
    if len(kinds) != config.num_hidden_layers:
        raise CheckpointError(
            f"it has types for {len(kinds)} layers, and num_hidden_layers is {config.num_hidden_layers}"
        )
    return kinds


def _count(config: Any, name: str, least: int) -> int:
    count = getattr(config, name)
    if type(count) is not int or count < least:
        raise CheckpointError(f"{name} must be a whole number from {least} on, not {shown(count)}")
    return count
