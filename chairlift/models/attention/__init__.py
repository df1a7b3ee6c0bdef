"""Attention over the cache slots: what a forward pass knows of its batch, and what a backend must offer.

A backend's `prepare` looks at a batch once per step and returns `attend`, which every layer calls with its own
queries, keys and values: it appends keys and values to the slots in place and attends to all that each row may see.

Tokens of all rows lie end to end, decode rows first:

    tokens       | d0 | d1 | d2 | p3 p3 p3 p3 | p4 p4 |        T = num_tokens
    row_offsets  0    1    2    3             7       9        B + 1
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from chairlift.cache import ContinuousBatchingKVCacheCollection

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`attend(layer_idx, query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, D]) -> [T, Hq, D]`; appends key and value."""

_SHORTEST_VIEW = 256  # tokens
_MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Describes what attention computes in a layer: softmax(c tanh(scale q k / c)) v over the keys in its window."""

    scale: float
    window: int | None = None  # keys that a query sees, its own included; None: all
    softcap: float | None = None  # c above; None: the scores as they are


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """Where each row's tokens are, on the device and, known without waiting for the device, on the host."""

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


class Backend(Protocol):
    """An attention implementation, bound to what each layer of a model computes: an `AttentionConfig` by layer.

    On a CUDA device neither `prepare` nor `attend` may wait for the device or copy to it from the host, and of a batch
    that only decodes they must read nothing but tensors, `is_decode` and the cache's `max_cache_length`: so what they
    launch can be captured in a CUDA graph and replayed with other slots and lengths.
    """

    def prepare(self, batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection) -> Attend:
        """Computes once per step what all layers share."""
        ...


class Forward(Protocol):
    """A way to run a model."""

    def hidden(
        self, batch: BatchMetadata, input_ids: torch.Tensor, cache: ContinuousBatchingKVCacheCollection
    ) -> torch.Tensor:
        """int64 `[T]` -> `[T, hidden]`; appends keys and values to the slots."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, hidden]` -> float32 `[N, vocab]`."""
        ...


def find_head_obstacle(head_dims: Iterable[int], alignment: int) -> str | None:
    """Says why kernels that take multiples of `alignment` cannot take heads of those sizes; None if they can."""
    wrong = [head_dim for head_dim in head_dims if head_dim > _MAX_HEAD_DIM or head_dim % alignment]
    if not wrong:
        return None
    return f"it needs a head_dim of at most {_MAX_HEAD_DIM} that is a multiple of {alignment}, not {wrong[0]}"


def view_length(cache: ContinuousBatchingKVCacheCollection) -> int:
    """Tokens of each slot that a decode step looks at: the longest row's, rounded up to 256, 512, 1024, ...

    Few different lengths, so that few CUDA graphs serve all; and not the whole slot, since kernels split their work
    by the length that they might meet.
    """
    longest = max(cache.max_cache_length, _SHORTEST_VIEW)
    return min(1 << (longest - 1).bit_length(), cache.blocks.shape[3])


def token_slots(batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection) -> torch.Tensor:
    """The slot of each token: int64 `[T]`, on the device."""
    slots = cache.lookup_table.long()
    if batch.is_decode:
        return slots
    row_lengths = batch.row_offsets[1:] - batch.row_offsets[:-1]
    return torch.repeat_interleave(slots, row_lengths, output_size=len(batch.positions))


def append_tokens(
    batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection
) -> Callable[[int, torch.Tensor, torch.Tensor], None]:
    """The function that writes a layer's new keys and values, `[T, Hkv, D]` each, after those in the slots."""
    slots, positions = token_slots(batch, cache), batch.positions

    def append(layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> None:
        cache.get_key_cache(layer_idx)[slots, positions] = key
        cache.get_value_cache(layer_idx)[slots, positions] = value

    return append


def key_lengths(batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection) -> torch.Tensor:
    """Tokens that each row's slot holds with this step's: int32 `[B]`, on the device."""
    return cache.cache_lengths + batch.row_offsets[1:] - batch.row_offsets[:-1]


def prepare_apart(
    prepare: Callable[[BatchMetadata, ContinuousBatchingKVCacheCollection], Attend],
    batch: BatchMetadata,
    cache: ContinuousBatchingKVCacheCollection,
) -> Attend:
    """`prepare` for the decode rows of a mixed batch and again for its prefill rows, as batches of their own."""
    num_decode = batch.num_decode_rows  # of one token each, so prefill tokens begin here, too
    decode = prepare(*_rows_of(batch, cache, slice(None, num_decode)))
    prefill = prepare(*_rows_of(batch, cache, slice(num_decode, None)))

    def attend(layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        decoded = decode(layer_idx, query[:num_decode], key[:num_decode], value[:num_decode])
        prefilled = prefill(layer_idx, query[num_decode:], key[num_decode:], value[num_decode:])
        return torch.cat((decoded, prefilled))

    return attend


def _rows_of(
    batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection, rows: slice
) -> tuple[BatchMetadata, ContinuousBatchingKVCacheCollection]:
    """A part of the batch: its first rows, which decode, or its last rows, which prefill."""
    start = rows.start or 0
    num_new = batch.num_new_tokens[rows]
    part = BatchMetadata(
        row_offsets=batch.row_offsets[start : start + len(num_new) + 1] - start,
        positions=batch.positions[rows],
        slots=batch.slots[rows],
        num_new_tokens=num_new,
        num_cached_tokens=batch.num_cached_tokens[rows],
        num_decode_rows=max(0, batch.num_decode_rows - start),
    )
    return part, replace(
        cache,
        cache_lengths=cache.cache_lengths[rows],
        lookup_table=cache.lookup_table[rows],
        max_seq_length=cache.max_seq_length if start else 1,
    )
