"""Computes attention with torch's scaled_dot_product_attention: any device, no extra package.

The query heads of a group share a key/value head. In decoding they are passed as query rows of that head, which is
several times faster on a CPU than `enable_gqa`. In prefill they are heads that share an expanded key (stride 0, no
copy).

On a CPU decode rows are computed in groups: a group reads a range of neighbouring slots in place as one strided batch.
Elsewhere that would need the slots' numbers on the host, and kernels that cannot be captured in a CUDA graph; so there
the slots of decode rows are copied together, layer by layer. With a window shorter than a sequence, the windows of
decode rows are copied together on any device, so that steps do not get slower beyond the window.

Torch's function has no soft cap and no sinks: scores that have one are computed by separate operators.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from chairlift.cache import ContinuousBatchingKVCacheCollection
from chairlift.models.attention.backend import Attend, AttentionConfig, BatchMetadata, Projections
from chairlift.models.attention.batches import append_tokens, view_length


def attend_to(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    config: AttentionConfig,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends `[..., n, D]` to `[..., m, D]`; `mask` is bool (what is seen) or added to the scores.

    `sinks` stand beside the scores, `[..., n, 1]` or what becomes that.
    """
    if config.softcap is None and sinks is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=config.scale)
    scores = query @ key.transpose(-1, -2) * config.scale
    if config.softcap is not None:
        scores = torch.tanh(scores / config.softcap) * config.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is None:
        return scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype) @ value
    beside = torch.cat((scores.float(), sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    return beside.softmax(dim=-1)[..., :-1].to(value.dtype) @ value


@dataclass(frozen=True, slots=True)
class _DecodeRows:
    """Decode rows, and what is read for them: n sequences of keys (or values), in place or as copies."""

    config: AttentionConfig
    rows: torch.Tensor | slice  # which of the batch
    read: Callable[[torch.Tensor], torch.Tensor]  # [n_slots, S, H, D] -> [n, length, H, D]
    mask: torch.Tensor  # [n, 1, 1, length]: which of the keys may be seen
    places: torch.Tensor | None = None  # int64: the rows' own sequences among those that are read; None: all, in order

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        output: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:
        """Fills the rows' part of `output` [T, Hq, D]; keys and values `[n_slots, S, H, D]`."""
        num_kv_heads, head_dim = keys.shape[2:]
        grouped = query[self.rows].reshape(-1, num_kv_heads, query.shape[1] // num_kv_heads, head_dim)
        if self.places is not None:  # slots of the range that have no row get a query of zeros
            grouped = grouped.new_zeros(len(self.mask), *grouped.shape[1:]).index_copy_(0, self.places, grouped)
        key, value = (self.read(x).transpose(1, 2) for x in (keys, values))
        own = None if sinks is None else sinks.view(num_kv_heads, -1, 1)
        attended = attend_to(grouped, key, value, self.config, self.mask, own)
        output[self.rows] = (attended if self.places is None else attended[self.places]).flatten(1, 2)


@dataclass(frozen=True, slots=True)
class _PrefillRow:
    """One row of several tokens: `[start, stop)` in the batch, which see `[begin, end)` of its slot."""

    config: AttentionConfig
    start: int
    stop: int
    slot: int
    begin: int
    end: int
    mask: torch.Tensor | None  # [tokens, end - begin]; None: causal, nothing was cached

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        output: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:
        """As `_DecodeRows.attend`."""
        num_kv_heads, head_dim = keys.shape[2:]
        grouped = query[self.start : self.stop].view(self.stop - self.start, num_kv_heads, -1, head_dim)
        grouped = grouped.permute(1, 2, 0, 3)  # [H, group, tokens, D]
        key, value = (self._read(x).expand(-1, grouped.shape[1], -1, -1) for x in (keys, values))
        if self.mask is None:
            attended = scaled_dot_product_attention(grouped, key, value, is_causal=True, scale=self.config.scale)
        else:
            own = None if sinks is None else sinks.view(num_kv_heads, -1, 1, 1)
            attended = attend_to(grouped, key, value, self.config, self.mask, own)
        output[self.start : self.stop] = attended.permute(2, 0, 1, 3).flatten(1, 2)

    def _read(self, cache: torch.Tensor) -> torch.Tensor:
        """`[n_slots, S, H, D]` -> `[H, 1, end - begin, D]`, a view."""
        return cache[self.slot, self.begin : self.end].transpose(0, 1).unsqueeze(1)


class TorchBackend:
    """Writes the slots in place; `is_in_place`: decode rows read them in place too (see above)."""

    def __init__(self, layers: Mapping[int, AttentionConfig], *, is_in_place: bool = True) -> None:
        self._kinds = list(dict.fromkeys(layers.values()))
        self._kind_of = {layer_idx: self._kinds.index(config) for layer_idx, config in layers.items()}
        self._is_in_place = is_in_place

    def prepare(self, batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection) -> Attend:
        append = append_tokens(batch, cache)
        parts = [self._parts(batch, cache, config) for config in self._kinds]

        def attend(layer_idx: int, new: Projections) -> torch.Tensor:
            if new.own is not None:
                append(layer_idx, *new.own)
            keys, values = cache.get_key_cache(layer_idx), cache.get_value_cache(layer_idx)
            output = torch.empty_like(new.query)
            for part in parts[self._kind_of[layer_idx]]:
                part.attend(new.query, keys, values, output, new.sinks)
            return output

        return attend

    def _parts(
        self, batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection, config: AttentionConfig
    ) -> list[_DecodeRows | _PrefillRow]:
        window = config.window
        if window is not None and window >= cache.max_cache_length:
            window = None  # no sequence is longer than it
        prefill = _prefill_rows(batch, config, window, cache.blocks.device)
        if not batch.num_decode_rows:
            return [*prefill]
        if window is not None:
            return [_windows(batch, cache, config, window), *prefill]
        if self._is_in_place:
            return [*_neighbouring_slots(batch, cache.blocks, config), *prefill]
        return [_copied_slots(batch, cache, config), *prefill]


def _windows(
    batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection, config: AttentionConfig, window: int
) -> _DecodeRows:
    """Copies of the tokens in the windows; a sequence shorter than its window fills the end of it."""
    rows = slice(0, batch.num_decode_rows)
    slots = cache.lookup_table[rows, None].long()
    ages = torch.arange(window - 1, -1, -1, device=cache.blocks.device)
    positions = cache.cache_lengths[rows, None] - ages  # int64 [n, window]; the last one is the row's own
    mask = (positions >= 0)[:, None, None, :]
    positions = positions.clamp(min=0)
    return _DecodeRows(config, rows, lambda x: x[slots, positions], mask)


def _copied_slots(
    batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection, config: AttentionConfig
) -> _DecodeRows:
    rows, longest = slice(0, batch.num_decode_rows), view_length(cache)
    slots = cache.lookup_table[rows]
    mask = torch.arange(longest, device=cache.blocks.device) <= cache.cache_lengths[rows, None]
    return _DecodeRows(config, rows, lambda x: x[:, :longest].index_select(0, slots), mask[:, None, None, :])


def _neighbouring_slots(batch: BatchMetadata, blocks: torch.Tensor, config: AttentionConfig) -> list[_DecodeRows]:
    """Rows in order of their slots, cut wherever a range would be more than half empty."""
    groups: list[list[int]] = []
    for row in sorted(range(batch.num_decode_rows), key=lambda row: batch.slots[row]):
        group = groups[-1] if groups else []
        if group and batch.slots[row] - batch.slots[group[0]] + 1 <= 2 * (len(group) + 1):
            group.append(row)
        else:
            groups.append([row])
    return [_slot_range(rows, batch, blocks, config) for rows in groups]


def _slot_range(rows: list[int], batch: BatchMetadata, blocks: torch.Tensor, config: AttentionConfig) -> _DecodeRows:
    first, last = batch.slots[rows[0]], batch.slots[rows[-1]]
    lengths = [1] * (last - first + 1)
    for row in rows:
        lengths[batch.slots[row] - first] = batch.num_cached_tokens[row] + 1
    longest = max(lengths)
    is_hidden = torch.arange(longest) >= torch.tensor(lengths)[:, None]
    mask = torch.zeros(is_hidden.shape, dtype=blocks.dtype).masked_fill_(is_hidden, -torch.inf)
    places = torch.tensor([batch.slots[row] - first for row in rows])
    mask = mask[:, None, None, :]
    return _DecodeRows(config, torch.tensor(rows), lambda x: x[first : last + 1, :longest], mask, places)


def _prefill_rows(
    batch: BatchMetadata, config: AttentionConfig, window: int | None, device: torch.device
) -> list[_PrefillRow]:
    rows = []
    start = batch.num_decode_rows
    for row in range(batch.num_decode_rows, len(batch.slots)):
        num_new, num_cached = batch.num_new_tokens[row], batch.num_cached_tokens[row]
        begin, end = 0 if window is None else max(0, num_cached - window + 1), num_cached + num_new
        mask = None
        if num_cached or config.softcap is not None or config.has_sinks or window is not None:
            mask = torch.ones(num_new, end - begin, dtype=torch.bool, device=device).tril_(num_cached - begin)
        if mask is not None and window is not None:
            mask.triu_(num_cached - begin - window + 1)
        rows.append(_PrefillRow(config, start, start + num_new, batch.slots[row], begin, end, mask))
        start += num_new
    return rows


def attend_alone(
    layers: Mapping[int, AttentionConfig],
    slots: torch.Tensor,
    positions: torch.Tensor,
    cache: ContinuousBatchingKVCacheCollection,
) -> Attend:
    """Each token attends in a call of its own, whose shape depends on nothing but the token's position.

    `slots`, `positions`: int64 `[T]`. The tokens of a slot come in order; the last one may be repeated as padding.
    """
    ends = list(zip(slots.tolist(), (positions + 1).tolist(), strict=True))

    def attend(layer_idx: int, new: Projections) -> torch.Tensor:
        keys, values = cache.get_key_cache(layer_idx), cache.get_value_cache(layer_idx)
        if new.own is not None:
            keys[slots, positions], values[slots, positions] = new.own
        num_kv_heads, head_dim = keys.shape[2:]
        grouped = new.query.reshape(len(ends), num_kv_heads, -1, head_dim)
        output = torch.empty_like(grouped)
        config = layers[layer_idx]
        window = config.window
        for row, (slot, end) in enumerate(ends):
            if row and ends[row - 1] == (slot, end):
                output[row] = output[row - 1]
                continue
            seen = slice(0 if window is None else max(0, end - window), end)
            key_view, value_view = (x[slot, seen].transpose(0, 1).unsqueeze(0) for x in (keys, values))
            own = None if new.sinks is None else new.sinks.view(num_kv_heads, -1, 1)
            output[row] = attend_to(grouped[row : row + 1], key_view, value_view, config, sinks=own)[0]
        return output.view_as(new.query)

    return attend
