"""Computes what several backends need of a batch: where its tokens go, how long its slots are, and its parts."""

from collections.abc import Callable
from dataclasses import replace

import torch

from chairlift.cache import ContinuousBatchingKVCacheCollection
from chairlift.models.attention.backend import Attend, BatchMetadata, PaddedBatch, Projections, Read

_SHORTEST_VIEW = 256  # tokens
_ALL_KEEP = "layers of a padded step keep keys and values of their own"

Append = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""`append(keys [n_slots, S, Hkv, D], values, key [T, Hkv, D], value, slots [T], positions [T])`: writes into slots."""


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
    rows = slice(None, num_decode), slice(num_decode, None)
    decode, prefill = (prepare(*_rows_of(batch, cache, each)) for each in rows)

    def attend(layer_idx: int, new: Projections) -> torch.Tensor:
        decoded, prefilled = decode(layer_idx, new.of_tokens(rows[0])), prefill(layer_idx, new.of_tokens(rows[1]))
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


def _append_by_index(
    keys: torch.Tensor,
    values: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    keys[slots, positions] = key
    values[slots, positions] = value


def without_sinks(read: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> Read:
    """Makes a `Read` of a function for layers that have no sinks."""

    def read_alone(
        layer_idx: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        assert sinks is None, "layers with sinks have another backend"
        return read(layer_idx, query, keys, values)

    return read_alone


def attend_padded(
    batch: PaddedBatch, blocks: torch.Tensor, decode: Read, prefill: Read, append: Append = _append_by_index
) -> Attend:
    """The attention of a padded step, made of one call that writes into the slots and two that read them.

    `decode` gets the first D tokens, each of them a row. `prefill` gets all T, and may leave the results of those
    before the border unwritten. A token keeps the result of its own kind.
    """
    slots, positions, is_decode = batch.token_slots, batch.positions, batch.decodes[:, None, None]
    most = len(batch.decodes)

    def attend(layer_idx: int, new: Projections) -> torch.Tensor:
        assert new.own is not None, _ALL_KEEP
        plane = layer_idx if batch.planes is None else batch.planes[layer_idx]
        keys, values = blocks[:, 0, plane], blocks[:, 1, plane]
        append(keys, values, *new.own, slots, positions)
        output = prefill(layer_idx, new.query, keys, values, new.sinks)
        if most:
            decoded = decode(layer_idx, new.query[:most], keys, values, new.sinks)
            output[:most] = torch.where(is_decode, decoded, output[:most])
        return output

    return attend
