"""The rows of a mixed batch, apart: decode rows and prefill rows go through kernels of different shapes."""

from collections.abc import Callable
from dataclasses import replace

import torch

from chairlift.cache.collection import ContinuousBatchingKVCacheCollection
from chairlift.models.attention.batch import Attend, BatchMetadata

Prepare = Callable[[BatchMetadata, ContinuousBatchingKVCacheCollection], Attend]


def prepare_apart(prepare: Prepare, batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection) -> Attend:
    """`prepare` for the decode rows and again for the prefill rows of a batch that has both."""
    num_decode = batch.num_decode_rows  # of one token each, so that this is where prefill tokens begin, too
    decode = prepare(*_decode_part(batch, cache))
    prefill = prepare(*_prefill_part(batch, cache))

    def attend(layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        decoded = decode(layer_idx, query[:num_decode], key[:num_decode], value[:num_decode])
        prefilled = prefill(layer_idx, query[num_decode:], key[num_decode:], value[num_decode:])
        return torch.cat((decoded, prefilled))

    return attend


def _decode_part(
    batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection
) -> tuple[BatchMetadata, ContinuousBatchingKVCacheCollection]:
    rows = slice(None, batch.num_decode_rows)
    offsets = batch.row_offsets[: batch.num_decode_rows + 1]
    return _metadata_of(batch, rows, offsets, batch.num_decode_rows), _rows_of(cache, rows, max_seq_length=1)


def _prefill_part(
    batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection
) -> tuple[BatchMetadata, ContinuousBatchingKVCacheCollection]:
    rows = slice(batch.num_decode_rows, None)
    offsets = batch.row_offsets[batch.num_decode_rows :] - batch.num_decode_rows
    return _metadata_of(batch, rows, offsets, 0), _rows_of(cache, rows, max_seq_length=cache.max_seq_length)


def _metadata_of(batch: BatchMetadata, rows: slice, row_offsets: torch.Tensor, num_decode_rows: int) -> BatchMetadata:
    return BatchMetadata(
        row_offsets=row_offsets,
        positions=batch.positions[rows],
        slots=batch.slots[rows],
        num_new_tokens=batch.num_new_tokens[rows],
        num_cached_tokens=batch.num_cached_tokens[rows],
        num_decode_rows=num_decode_rows,
    )


def _rows_of(
    cache: ContinuousBatchingKVCacheCollection, rows: slice, max_seq_length: int
) -> ContinuousBatchingKVCacheCollection:
    return replace(
        cache,
        cache_lengths=cache.cache_lengths[rows],
        lookup_table=cache.lookup_table[rows],
        max_seq_length=max_seq_length,
    )
