"""Attention with torch's scaled_dot_product_attention: any device, no extra package.

Grouped-query attention: the query heads of a group are passed as query rows of their key/value head in decoding
(several times faster on a CPU than `enable_gqa`), and as heads that share an expanded key (stride 0, no copy) in
prefill. On a CPU decode rows are computed in groups: a group reads a range of neighbouring slots in place as one
strided batch. Elsewhere that would need the slots' numbers on the host, and kernels that cannot be captured in a CUDA
graph; so there the slots of decode rows are copied together, layer by layer.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from chairlift.cache.collection import ContinuousBatchingKVCacheCollection
from chairlift.models.attention.batch import Attend, BatchMetadata, append_tokens, view_length


class _DecodeRows(Protocol):
    """Some of the decode rows, and where their keys lie."""

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, output: torch.Tensor) -> None:
        """Fills the rows' part of `output` [T, Hq, D]; keys and values `[n_slots, S, H, D]`."""
        ...


@dataclass(frozen=True, slots=True)
class _NeighbouringSlots:
    """Decode rows whose slots lie in `[first_slot, first_slot + num_slots)`, read in place."""

    rows: torch.Tensor  # int64 [n]: which decode rows
    offsets: torch.Tensor  # int64 [n]: their slots, counted from first_slot
    first_slot: int
    mask: torch.Tensor  # [num_slots, 1, 1, longest]: 0 where a slot's row may look, -inf elsewhere

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, output: torch.Tensor) -> None:
        num_kv_heads, head_dim = keys.shape[2:]
        # Slots of the range that are not in the batch get a query of zeros, and their output is dropped.
        grouped = query.new_zeros(self.mask.shape[0], num_kv_heads, query.shape[1] // num_kv_heads, head_dim)
        grouped[self.offsets] = query[self.rows].view(-1, *grouped.shape[1:])
        attended = scaled_dot_product_attention(grouped, self._view(keys), self._view(values), attn_mask=self.mask)
        output[self.rows] = attended[self.offsets].flatten(1, 2)

    def _view(self, cache: torch.Tensor) -> torch.Tensor:
        """`[n_slots, S, H, D]` -> `[num_slots, H, longest, D]`."""
        num_slots, longest = self.mask.shape[0], self.mask.shape[-1]
        return cache[self.first_slot : self.first_slot + num_slots, :longest].transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _CopiedSlots:
    """All decode rows, wherever their slots lie."""

    slots: torch.Tensor  # int32 [n]
    mask: torch.Tensor  # bool [n, 1, 1, longest]: where a row may look

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, output: torch.Tensor) -> None:
        num_rows, num_kv_heads = len(self.slots), keys.shape[2]
        grouped = query[:num_rows].reshape(num_rows, num_kv_heads, -1, query.shape[2])  # [n, H, group, D]
        attended = scaled_dot_product_attention(grouped, self._copy(keys), self._copy(values), attn_mask=self.mask)
        output[:num_rows] = attended.flatten(1, 2)

    def _copy(self, cache: torch.Tensor) -> torch.Tensor:
        """`[n_slots, S, H, D]` -> `[n, H, longest, D]`."""
        return cache[:, : self.mask.shape[-1]].index_select(0, self.slots).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _PrefillRow:
    """One row of several tokens: `[start, stop)` in the batch, `end` tokens in its slot afterwards."""

    start: int
    stop: int
    slot: int
    end: int
    mask: torch.Tensor | None  # [tokens, end]; None: plain causal, nothing was cached

    def keys(self, cache: torch.Tensor, group_size: int) -> torch.Tensor:
        """`[n_slots, S, H, D]` -> `[H, group_size, end, D]`, a view."""
        return cache[self.slot, : self.end].transpose(0, 1).unsqueeze(1).expand(-1, group_size, -1, -1)


class TorchBackend:
    """Writes the slots in place; `is_in_place`: decode rows read them in place too (see above)."""

    def __init__(self, is_in_place: bool = True) -> None:
        self._is_in_place = is_in_place

    def prepare(self, batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection) -> Attend:
        """See `Backend.prepare`."""
        append = append_tokens(batch, cache)
        decode = _neighbouring_slots(batch, cache.blocks) if self._is_in_place else _copied_slots(batch, cache)
        prefill = _prefill_rows(batch, cache.blocks.device)

        def attend(layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            append(layer_idx, key, value)
            key_cache, value_cache = cache.get_key_cache(layer_idx), cache.get_value_cache(layer_idx)
            output = torch.empty_like(query)
            for rows in decode:
                rows.attend(query, key_cache, value_cache, output)
            for row in prefill:
                _attend_prefill(row, query, key_cache, value_cache, output)
            return output

        return attend


def _attend_prefill(
    row: _PrefillRow, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, output: torch.Tensor
) -> None:
    num_kv_heads = keys.shape[2]
    group_size = query.shape[1] // num_kv_heads
    grouped = query[row.start : row.stop].view(-1, num_kv_heads, group_size, query.shape[2]).permute(1, 2, 0, 3)
    attended = scaled_dot_product_attention(
        grouped,
        row.keys(keys, group_size),
        row.keys(values, group_size),
        attn_mask=row.mask,
        is_causal=row.mask is None,
    )
    output[row.start : row.stop] = attended.permute(2, 0, 1, 3).flatten(1, 2)


def _copied_slots(batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection) -> list[_DecodeRows]:
    if not batch.num_decode_rows:
        return []
    slots, lengths = cache.lookup_table[: batch.num_decode_rows], cache.cache_lengths[: batch.num_decode_rows]
    places = torch.arange(view_length(cache), device=lengths.device)
    return [_CopiedSlots(slots, (places <= lengths[:, None])[:, None, None, :])]


def _neighbouring_slots(batch: BatchMetadata, blocks: torch.Tensor) -> list[_DecodeRows]:
    """Rows in order of their slots, cut wherever a range would be more than half empty."""
    by_slot = sorted(range(batch.num_decode_rows), key=lambda row: batch.slots[row])
    groups: list[list[int]] = []
    for row in by_slot:
        group = groups[-1] if groups else []
        if group and batch.slots[row] - batch.slots[group[0]] + 1 <= 2 * (len(group) + 1):
            group.append(row)
        else:
            groups.append([row])
    return [_group(rows, batch, blocks) for rows in groups]


def _group(rows: list[int], batch: BatchMetadata, blocks: torch.Tensor) -> _NeighbouringSlots:
    first, last = batch.slots[rows[0]], batch.slots[rows[-1]]
    lengths = [1] * (last - first + 1)
    for row in rows:
        lengths[batch.slots[row] - first] = batch.num_cached_tokens[row] + 1
    device = blocks.device
    is_hidden = torch.arange(max(lengths), device=device) >= torch.tensor(lengths, device=device)[:, None]
    mask = torch.zeros(is_hidden.shape, dtype=blocks.dtype, device=device).masked_fill_(is_hidden, -torch.inf)
    return _NeighbouringSlots(
        rows=torch.tensor(rows, device=device),
        offsets=torch.tensor([batch.slots[row] - first for row in rows], device=device),
        first_slot=first,
        mask=mask[:, None, None, :],
    )


def _prefill_rows(batch: BatchMetadata, device: torch.device) -> list[_PrefillRow]:
    rows = []
    start = batch.num_decode_rows
    for row in range(batch.num_decode_rows, len(batch.slots)):
        num_new, num_cached = batch.num_new_tokens[row], batch.num_cached_tokens[row]
        end = num_cached + num_new
        mask = None
        if num_cached:
            mask = torch.ones(num_new, end, dtype=torch.bool, device=device).tril_(num_cached)
        rows.append(_PrefillRow(start, start + num_new, batch.slots[row], end, mask))
        start += num_new
    return rows
