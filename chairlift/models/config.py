"""The description of a model that its wiring is built from, and what the engine, the cache and attention know of it.

A layer is a sequence of blocks (`models/blocks/`), and layers may differ in any of their fields. `models/families.py`
builds a description from a config; the wiring (`models/decoder.py`) and the native code read nothing else.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from chairlift.cache.layout import CacheLayout, Kept, StateLayout, StateParams
from chairlift.config import DType
from chairlift.models import grouped_experts
from chairlift.models.attention import AttentionConfig
from chairlift.models.blocks import (
    AS_LLAMA,
    AttentionBlock,
    Block,
    ExpertsBlock,
    LayerInputsConfig,
    Norms,
    TensorNames,
    Weight,
    weights_of_ends,
    weights_of_layer,
    weights_of_layer_inputs,
    weights_of_streams,
)
from chairlift.models.rotary import RopeTable

TORCH_DTYPES = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}

LAYER_TYPES = {"full_attention", "sliding_attention"}

Layer = tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Holds what the engine, the cache and attention need to know of a decoder."""

    architecture: str
    vocab_size: int
    layers: tuple[Layer, ...]
    max_position_embeddings: int
    dtype: DType
    has_head: bool = True  # False: it makes vectors only, and its logits mean nothing

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention_blocks(self) -> dict[int, AttentionBlock]:
        """By layer; there are none for layers that do not attend."""
        return {
            index: block
            for index, layer in enumerate(self.layers)
            for block in layer
            if isinstance(block, AttentionBlock)
        }

    @property
    def attention(self) -> dict[int, AttentionConfig]:
        """Describes by layer what an attention backend computes."""
        return {index: block.attention for index, block in self.attention_blocks.items()}

    @property
    def head_dims(self) -> list[int]:
        """Returns the size of the heads of each layer that attends."""
        return [block.head_dim for block in self.attention_blocks.values()]

    @property
    def projected_head_dims(self) -> list[int]:
        """Returns likewise the size of the heads that a product makes, which latent attention multiplies again."""
        return [block.projected_head_dim for block in self.attention_blocks.values()]

    @property
    def rope_tables(self) -> set[RopeTable]:
        """The rotary tables that its layers read."""
        return {block.table for block in self.attention_blocks.values() if block.table is not None}

    @property
    def unscaled_positions(self) -> int:
        """Positions up to which results do not depend on `max_seq_len`."""
        lengths = [table.rope.original_length for table in self.rope_tables]
        return min([self.max_position_embeddings, *(length for length in lengths if length is not None)])

    @property
    def table_bytes(self) -> int:
        """Bytes that rotary tables take for one position: a cosine and a sine of each element, in float32."""
        return sum(8 * table.head_dim for table in self.rope_tables)

    def kept(self, dtype: DType) -> list[Kept]:
        """Declares by layer the keys and values that a slot keeps of it."""
        return [_kept(layer, TORCH_DTYPES[dtype]) for layer in self.layers]

    def states(self) -> list[StateParams | None]:
        """Declares by layer the recurrent state that a slot keeps of it."""
        return [_state(layer) for layer in self.layers]

    @property
    def state_layout(self) -> StateLayout | None:
        """The places and sizes of recurrent states; None if no layer has one."""
        return StateLayout.of(self.states())

    def token_bytes(self, dtype: DType) -> int:
        """Counts the bytes that a slot keeps for each token."""
        return CacheLayout.of(self.kept(dtype), self.num_layers).token_bytes

    @property
    def is_plain(self) -> bool:
        """True if all layers keep the same, so that the cache is a single tensor."""
        return CacheLayout.of(self.kept(self.dtype), self.num_layers, self.states()).is_plain

    @property
    def can_record(self) -> bool:
        """True if CUDA graphs can record a decode step: all keys and values are in one tensor, and it launches the same
        for any data. Recurrent layers and experts need their kernels for that."""
        groups = CacheLayout.of(self.kept(self.dtype), self.num_layers).groups
        return len(groups) == 1 and not groups[0].params.num_common

    def groups_experts(self, dtype: DType, device: torch.device) -> bool:  # noqa: ARG002
        """Returns true if one kernel there can compute the products of all experts of a layer in that type."""
        return not self.num_experts

    @property
    def num_experts(self) -> int:
        """Counts the experts of all layers."""
        return sum(block.router.num_experts for block in self.experts_blocks)

    @property
    def experts_blocks(self) -> list[ExpertsBlock]:
        """Returns all blocks that are mixtures of experts."""
        return [block for layer in self.layers for block in layer if isinstance(block, ExpertsBlock)]

    def describe(self) -> str:
        """One line for the log."""
        blocks = self.attention_blocks.values()
        heads = dict.fromkeys(f"{block.num_heads}/{block.num_kv_heads} heads of {block.head_dim}" for block in blocks)
        ropes = sorted({table.rope.kind for table in self.rope_tables})
        windows = sorted({block.window for block in blocks if block.window is not None})
        num_windowed = sum(block.window is not None for block in blocks)
        num_readers = sum(block.source is not None for block in blocks)
        return (
            f"{self.architecture}: {self.num_layers} layers, {' and '.join(heads)}, vocabulary {self.vocab_size}"
            + (f", rope {', '.join(ropes)}" if ropes else "")
            + (f", window {', '.join(map(str, windows))} in {num_windowed} layers" if windows else "")
            + (f", {num_readers} layers read the keys and values of others" if num_readers else "")
        )


def _kept(layer: Layer, dtype: torch.dtype) -> Kept:
    kept = [each for block in layer if (each := block.kept(dtype)) is not None]
    assert len(kept) <= 1, "a slot keeps one thing of a layer"
    return kept[0] if kept else None


def _state(layer: Layer) -> StateParams | None:
    states = [each for block in layer if (each := block.state()) is not None]
    assert len(states) <= 1, "a slot keeps one state of a layer"
    return states[0] if states else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ModelShape):
    """A decoder of one of the families: everything that its wiring depends on."""

    hidden_size: int
    rms_norm_eps: float
    is_tied: bool
    names: TensorNames = AS_LLAMA
    norms: Norms = Norms.PRE
    has_offset_norms: bool = False  # norms multiply by 1 + weight, in float32
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what each block adds
    logits_divisor: float = 1.0
    logits_softcap: float | None = None  # c tanh(logits / c)
    has_layer_scales: bool = False  # each layer multiplies the tokens that leave it by a number of its own
    layer_inputs: LayerInputsConfig | None = None  # what layers get of each token; None: nothing
    num_streams: int | None = None  # of features that AltUp has between layers; None: there is no AltUp

    def weights(self) -> tuple[Weight, ...]:
        """Every module of the wiring that holds weights, and the tensors of a checkpoint that belong in it."""
        return _weights_of(self)

    def groups_experts(self, dtype: DType, device: torch.device) -> bool:
        """See `ModelShape`."""
        sizes, format = {block.intermediate_size for block in self.experts_blocks}, TORCH_DTYPES[dtype]
        return all(grouped_experts.can_multiply(self.hidden_size, size, format, device) for size in sizes)


@lru_cache(maxsize=4)  # a model with many experts has tens of thousands of tensors, and loading asks several times
def _weights_of(config: ModelConfig) -> tuple[Weight, ...]:
    *body, head = weights_of_ends(config.vocab_size)
    weights = [*map(config.names.of_body, body), config.names.of_head(head)]
    if config.layer_inputs is not None:
        inputs = map(config.names.of_body, weights_of_layer_inputs())
        weights += [each.within("model.layer_inputs.", "", "") for each in inputs]
    if config.num_streams is not None:
        streams = map(config.names.of_body, weights_of_streams(config.num_streams))
        weights += [each.within("model.streams.", "", "") for each in streams]
    for index, layer in enumerate(config.layers):
        for each in weights_of_layer(layer, config.norms, has_scale=config.has_layer_scales):
            spelled = config.names.of_body(each, f"layers.{index}.")
            weights.append(spelled.within(f"model.layers.{index}.", "", f"blk.{index}."))
    return tuple(weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedConfig(ModelShape):
    """A decoder in transformers' code, of whose layers the attention is known. `source` is its config there."""

    num_parameters: int
    source: Any = field(compare=False, repr=False)

    @property
    def can_record(self) -> bool:
        """See `ModelShape`. Its code may wait for the device during a step, for example to route tokens."""
        return False
