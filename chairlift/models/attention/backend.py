"""Defines attention over the cache slots: what a forward pass knows of its batch, and what a backend offers.

A backend's `prepare` looks at a batch once per step and returns `attend`, which every layer calls with its own
queries, keys and values: it appends keys and values to the slots in place and attends to all that each row may see.

Tokens of all rows lie end to end, decode rows first:

    tokens       | d0 | d1 | d2 | p3 p3 p3 p3 | p4 p4 |        T = num_tokens
    row_offsets  0    1    2    3             7       9        B + 1
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from chairlift.cache import ContinuousBatchingKVCacheCollection


@dataclass(frozen=True, slots=True)
class Projections:
    """Holds what a layer attends with: queries, and the keys and values of the same tokens."""

    query: torch.Tensor  # [T, Hq, D]
    key: torch.Tensor | None  # [T, Hkv, D]; None: another layer has appended these tokens' keys and values already
    value: torch.Tensor | None  # likewise
    sinks: torch.Tensor | None = None  # float32 [Hq]; see `AttentionConfig`

    @property
    def own(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Key and value of the layer itself, to be appended; None if it reads those of another layer."""
        return None if self.key is None or self.value is None else (self.key, self.value)

    def of_tokens(self, tokens: slice) -> "Projections":
        """Returns those of some of the tokens."""
        key, value = (None if each is None else each[tokens] for each in (self.key, self.value))
        return Projections(self.query[tokens], key, value, self.sinks)


Attend = Callable[[int, Projections], torch.Tensor]
"""`attend(layer_idx, new) -> [T, Hq, D]`: appends a layer's keys and values, if it has any of its own, and attends."""

Read = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""`read(layer_idx, query [N, Hq, D], keys [n_slots, S, Hkv, D], values, sinks) -> [N, Hq, D]`: attends to what slots
hold."""

_MAX_HEAD_DIM = 256  # of the kernels for GPUs


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Describes what attention computes in a layer: softmax(c tanh(scale q k / c)) v over the keys in its window.

    A sink is a score of its head that takes a part of the softmax, and has no value.
    """

    scale: float
    window: int | None = None  # keys that a query sees, its own included; None: all
    softcap: float | None = None  # c above; None: the scores as they are
    has_sinks: bool = False


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """Says where each row's tokens are: on the device, and on the host, which need not wait for the device."""

    row_offsets: torch.Tensor  # int32 [B + 1]
    positions: torch.Tensor  # int64 [T]: of each token in its sequence
    slots: tuple[int, ...]  # row -> slot
    num_new_tokens: tuple[int, ...]  # row -> tokens in this step
    num_cached_tokens: tuple[int, ...]  # row -> tokens in its slot before this step
    num_decode_rows: int  # the first rows, of one new token each

    @property
    def is_decode(self) -> bool:
        """Every row decodes."""
        return self.num_decode_rows == len(self.slots)


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Says where the tokens of a step lie that is padded to a fixed size, so that a CUDA graph can be any such step.

        tokens          | d0 | d1 | p2 p2 p2 | p3 p3 | pad pad |        T, fixed
        prompt_offsets            2          5       7         9

    All that differs between steps is in tensors on the device, the border between decode rows and prompts, too. Each of
    the first D tokens is a row that decodes, or else stands for an empty one in the scratch slot. From the border on
    there are P rows of tokens that lie end to end, and of any number, also none. The last that has some is the padding,
    which fills the scratch slot from its beginning.
    """

    token_slots: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]: of each token in its sequence
    decodes: torch.Tensor  # bool [D]
    decode_slots: torch.Tensor  # int32 [D]; the scratch slot for a token that does not decode
    decode_lengths: torch.Tensor  # int32 [D]: tokens in the slot with this step's; 1 for one that does not decode
    prompt_offsets: torch.Tensor  # int32 [P + 1]: from the border on; all tokens from there belong to a row
    prompt_slots: torch.Tensor  # int32 [P]
    prompt_lengths: torch.Tensor  # int32 [P]: tokens in the slot with this step's
    max_new_tokens: int  # of a row
    planes: tuple[int, ...] | None = None  # by layer: of its keys and values in the blocks; None: in order
    # int32 [R + 1]: where the tokens of all rows begin, those that decode first. None: only attention looks at rows.
    row_offsets: torch.Tensor | None = None

    @property
    def as_rows(self) -> BatchMetadata:
        """The same rows as a batch of which there is nothing on the host."""
        assert self.row_offsets is not None, "it is made for attention alone"
        return BatchMetadata(self.row_offsets, self.positions, (), (), (), num_decode_rows=0)


class Backend(Protocol):
    """Implements attention, bound to what each layer of a model computes: an `AttentionConfig` by layer.

    On a CUDA device neither `prepare` nor `attend` may wait for the device or copy to it from the host. Of a batch that
    only decodes they read nothing but tensors, `is_decode` and the cache's `max_cache_length`. So what they launch can
    be captured in a CUDA graph, and replayed with other slots and lengths.
    """

    def prepare(self, batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection) -> Attend:
        """Computes once per step what all layers share."""
        ...


@runtime_checkable
class AnyLength(Protocol):
    """A backend or a forward that may launch the same for rows that decode however long these are.

    Others launch what suffices up to the cache's `max_cache_length`.
    """

    @property
    def is_any_length(self) -> bool:
        """Tells if it does."""
        ...


@runtime_checkable
class PaddingBackend(Backend, Protocol):
    """Implements attention that can also be recorded for steps with prompts in them.

    What these methods and their results launch may not wait for the device, copy to it from the host or read memory
    that was never written. Blocks are the cache's, `[n_slots, 2, layers, S, Hkv, D]`.
    """

    def prepare_padded(self, batch: PaddedBatch, blocks: torch.Tensor) -> Attend:
        """Computes what all layers share of a padded step."""
        ...

    def read_prompts(self, batch: PaddedBatch, blocks: torch.Tensor) -> Read:
        """The attention of a padded step's prompts, which have been appended: for a backend that leaves prompts to
        this one. It gets all tokens, and may leave the results of those before the border unwritten."""
        ...


class Forward(Protocol):
    """Runs a model."""

    def hidden(
        self, batch: BatchMetadata, input_ids: torch.Tensor, cache: ContinuousBatchingKVCacheCollection
    ) -> torch.Tensor:
        """int64 `[T]` -> `[T, hidden]`; appends keys and values to the slots."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, hidden]` -> `[N, vocab]`, float32 or the model's type."""
        ...


@runtime_checkable
class PaddedForward(Forward, Protocol):
    """Runs a model also in padded steps, if its attention can."""

    @property
    def can_pad(self) -> bool:
        """Returns true if `padded_hidden` works."""
        ...

    def new_hidden(self, num_tokens: int) -> torch.Tensor:
        """Makes room for what `hidden` returns of that many tokens: zeros `[num_tokens, hidden]`."""
        ...

    def padded_hidden(
        self, batch: PaddedBatch, input_ids: torch.Tensor, cache: ContinuousBatchingKVCacheCollection
    ) -> torch.Tensor:
        """int64 `[T]` -> `[T, hidden]`, as `hidden`. `cache`: the R rows, of which nothing is on the host."""
        ...


def find_head_obstacle(head_dims: Iterable[int], alignment: int, largest: int = _MAX_HEAD_DIM) -> str | None:
    """Says why kernels that take multiples of `alignment` cannot take heads of those sizes; None if they can."""
    wrong = [head_dim for head_dim in head_dims if head_dim > largest or head_dim % alignment]
    if not wrong:
        return None
    return f"it needs a head_dim of at most {largest} that is a multiple of {alignment}, not {wrong[0]}"
