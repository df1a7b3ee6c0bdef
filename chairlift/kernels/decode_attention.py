"""Attention of rows that decode, over keys and values that stay where they are in their slots.

Rows differ in length, so each row's keys are divided into chunks of one size, which the device chooses from the lengths
of all rows such that the chunks occupy the whole GPU. A program attends to a chunk with all query heads that share a
key/value head, and a second kernel joins what the chunks of a row came to. No number comes from the host but the number
of rows, so what is launched can be recorded in a CUDA graph and serves rows of any lengths.

Results are those of softmax in float32. Since the size of a chunk depends on all rows of the batch, the last bits of a
row depend on its neighbours; nothing else of it does.
"""

# mypy: disable-error-code="untyped-decorator"

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from chairlift.kernels.softmax import add_sinks, add_tile, find_scores

_TILE_BYTES = 16_384  # of keys, and as much of values, that a program loads at a time
_SHORTEST_CHUNK = 128  # tokens; shorter ones cost more to join than they gain
_CHUNKS_PER_PROCESSOR = 8  # so that rows of uneven lengths end at nearly the same time
_FEW_ROWS = 256  # of a batch: up to here all are planned by one kernel
_FIELDS = tl.constexpr(8)  # numbers that describe a chunk, of which 5 are used
_LEAST_QUERIES = 16  # rows of a tensor core's tile
_JOINED_AT_ONCE = 16  # chunks
_NUM_INTERPRETED = 2  # processors of no GPU


@dataclass(frozen=True, slots=True)
class Chunks:
    """The parts that the keys of a batch of rows are attended to in."""

    items: torch.Tensor  # int32 [most chunks, 8]: row (-1: unused), slot, first key, end, 1 if it is all the row's
    starts: torch.Tensor  # int32 [B + 1]: the first chunk of each row


def plan_chunks(lengths: torch.Tensor, slots: torch.Tensor, num_kv_heads: int, window: int | None = None) -> Chunks:
    """Divides rows that hold `lengths` keys, int32 `[B]`, in `slots`, int32 `[B]`, and see `window` of them.

    Lengths are at least 1. All layers of a step with that window and number of heads can use the result.
    """
    num_rows, device = len(lengths), lengths.device
    num_wanted = triton.cdiv(_num_processors(device) * _CHUNKS_PER_PROCESSOR, num_kv_heads)
    num_items = num_wanted + num_rows  # each row may have a chunk that is not full
    items = torch.empty(num_items, _FIELDS.value, dtype=torch.int32, device=device)
    starts = torch.empty(num_rows + 1, dtype=torch.int32, device=device)
    block = max(_FEW_ROWS, triton.next_power_of_2(num_rows))
    most = 0 if window is None else window
    _plan[(num_rows,)](
        lengths, slots, items, starts, num_rows, num_items, num_wanted, most, SHORTEST=_SHORTEST_CHUNK, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return Chunks(items, starts)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chunks: Chunks,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(c tanh(scale q k / c)) v: `query` `[B, Hq, D]` over `keys` and `values` `[n_slots, S, Hkv, D]`.

    The keys are those that `chunks` were planned for. Slots have any strides, the same for keys and for values, but
    elements of a head are dense, as are those of `query`'s heads. `sinks`, float32 `[Hq]`: scores without a value that
    take part in the softmax. The result is `[B, Hq, D]`, dense.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[2]
    assert keys.stride() == values.stride()
    assert keys.stride(3) == query.stride(2) == 1
    group, padded_dim = num_heads // num_kv_heads, max(16, triton.next_power_of_2(head_dim))
    padded_group = max(_LEAST_QUERIES, triton.next_power_of_2(group))
    num_items = len(chunks.items)
    output = torch.empty(num_rows, num_heads, head_dim, dtype=query.dtype, device=query.device)
    sums = torch.empty(num_items, num_heads, head_dim, dtype=torch.float32, device=query.device)
    stats = torch.empty(2, num_items, num_heads, dtype=torch.float32, device=query.device)
    sizes = {"HQ": num_heads, "D": head_dim, "DP": padded_dim, "SINKS": sinks is not None}
    sink = stats if sinks is None else sinks
    _attend[(num_kv_heads, num_items)](
        query, keys, values, chunks.items, sink, output, sums, stats, stats[1], scale, softcap or 1.0, query.stride(0),
        query.stride(1), keys.stride(0), keys.stride(1), keys.stride(2), G=group, GP=padded_group,
        N=max(16, _TILE_BYTES // (padded_dim * keys.element_size())), CAPS=softcap is not None, **sizes,
        num_warps=4 if padded_dim < 256 else 8, num_stages=3,
    )  # fmt: skip
    _join[(num_rows, num_heads)](
        chunks.starts, sink, output, sums, stats, stats[1], C=_JOINED_AT_ONCE, num_warps=2, **sizes
    )
    return output


@functools.cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _NUM_INTERPRETED
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit(
    do_not_specialize=["num_rows", "num_items", "num_wanted", "window"],
    do_not_specialize_on_alignment=["lengths", "slots"],
)
def _plan(
    lengths: tl.tensor, slots: tl.tensor, items: tl.tensor, starts: tl.tensor, num_rows: tl.tensor,
    num_items: tl.tensor, num_wanted: tl.tensor, window: tl.tensor, SHORTEST: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Describes the chunks of one row, whose place follows from the lengths of all; the last row marks unused ones."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    seen = tl.load(lengths + at, mask=at < num_rows, other=0)
    seen = tl.where(window > 0, tl.minimum(seen, window), seen)
    chunk = tl.maximum(tl.cdiv(tl.cdiv(tl.sum(seen), num_wanted), SHORTEST), 1) * SHORTEST
    counts = tl.cdiv(seen, chunk)
    start, count = tl.sum(tl.where(at < row, counts, 0)), tl.sum(tl.where(at == row, counts, 0))
    length, slot = tl.load(lengths + row), tl.load(slots + row)
    oldest = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    tl.store(starts + row, start)
    for first in range(0, count, 32):
        index = first + tl.arange(0, 32)
        is_in = index < count
        item = items + (start + index) * _FIELDS
        begin = oldest + index * chunk
        tl.store(item, row + tl.zeros_like(index), mask=is_in)
        tl.store(item + 1, slot + tl.zeros_like(index), mask=is_in)
        tl.store(item + 2, begin, mask=is_in)
        tl.store(item + 3, tl.minimum(begin + chunk, length), mask=is_in)
        tl.store(item + 4, tl.where(count == 1, 1, 0) + tl.zeros_like(index), mask=is_in)
    if row == num_rows - 1:
        tl.store(starts + num_rows, start + count)
        for first in range(start + count, num_items, 32):
            index = first + tl.arange(0, 32)
            tl.store(items + index * _FIELDS, tl.full([32], -1, tl.int32), mask=index < num_items)


@triton.jit
def _attend(
    query: tl.tensor, keys: tl.tensor, values: tl.tensor, items: tl.tensor, sinks: tl.tensor, output: tl.tensor,
    sums: tl.tensor, bests: tl.tensor, masses: tl.tensor, scale: tl.tensor, softcap: tl.tensor, row_stride: tl.tensor,
    query_stride: tl.tensor, slot_stride: tl.tensor, token_stride: tl.tensor, head_stride: tl.tensor,
    HQ: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr,
    CAPS: tl.constexpr, SINKS: tl.constexpr,
) -> None:  # fmt: skip
    """Attends to one chunk with the query heads of one key/value head. Scores are in powers of 2."""
    head, item = tl.program_id(0), tl.program_id(1)
    row = tl.load(items + item * _FIELDS)
    slot = tl.load(items + item * _FIELDS + 1).to(tl.int64)
    begin, end = tl.load(items + item * _FIELDS + 2), tl.load(items + item * _FIELDS + 3)
    is_whole = tl.load(items + item * _FIELDS + 4)
    if row < 0:
        return
    group, at, tokens = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, N)
    heads, is_query = head * G + group, (group[:, None] < G) & (at[None, :] < D)
    places = heads[:, None] * query_stride + at[None, :]
    q = tl.load(query + row.to(tl.int64) * row_stride + places, mask=is_query, other=0.0)
    key_tile = keys + slot * slot_stride + begin.to(tl.int64) * token_stride + head * head_stride
    value_tile = values + slot * slot_stride + begin.to(tl.int64) * token_stride + head * head_stride
    places = tokens[:, None] * token_stride + at[None, :]
    best = tl.full([GP], -float("inf"), tl.float32)
    mass, total = tl.zeros([GP], tl.float32), tl.zeros([GP, DP], tl.float32)
    for first in range(begin, end, N):
        is_in = first + tokens < end
        is_loaded = is_in[:, None] & (at[None, :] < D)
        k = tl.load(key_tile + places, mask=is_loaded, other=0.0)
        scores = find_scores(q, k, scale, softcap, CAPS)
        scores = tl.where(is_in[None, :], scores, -float("inf"))
        v = tl.load(value_tile + places, mask=is_loaded, other=0.0)
        best, mass, total = add_tile(best, mass, total, scores, v)
        key_tile += N * token_stride.to(tl.int64)
        value_tile += N * token_stride.to(tl.int64)
    if is_whole:
        if SINKS:
            best, mass, total = add_sinks(best, mass, total, tl.load(sinks + heads, mask=group < G, other=0.0))
        targets = (row.to(tl.int64) * HQ + heads)[:, None] * D + at[None, :]
        tl.store(output + targets, (total / mass[:, None]).to(output.dtype.element_ty), mask=is_query)
    else:
        place = item.to(tl.int64) * HQ + heads
        tl.store(sums + place[:, None] * D + at[None, :], total, mask=is_query)
        tl.store(bests + place, best, mask=group < G)
        tl.store(masses + place, mass, mask=group < G)


@triton.jit
def _join(
    starts: tl.tensor, sinks: tl.tensor, output: tl.tensor, sums: tl.tensor, bests: tl.tensor, masses: tl.tensor,
    HQ: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SINKS: tl.constexpr, C: tl.constexpr,
) -> None:  # fmt: skip
    """Adds up the chunks of one row and query head, if there are several."""
    row, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    if end - start == 1:
        return
    at = tl.arange(0, DP)
    best = tl.full([1], -float("inf"), tl.float32)
    mass, total = tl.zeros([1], tl.float32), tl.zeros([1, DP], tl.float32)
    for first in range(start, end, C):
        item = first + tl.arange(0, C)
        is_in, place = item < end, item.to(tl.int64) * HQ + head
        own = tl.load(bests + place, mask=is_in, other=-float("inf"))
        own_mass = tl.load(masses + place, mask=is_in, other=0.0)
        is_loaded = is_in[:, None] & (at[None, :] < D)
        parts = tl.load(sums + place[:, None] * D + at[None, :], mask=is_loaded, other=0.0)
        newest = tl.maximum(best, tl.max(own, 0))
        weights, shrink = tl.exp2(own - newest), tl.exp2(best - newest)
        mass = mass * shrink + tl.sum(own_mass * weights, 0)
        total = total * shrink[:, None] + tl.sum(parts * weights[:, None], 0)[None, :]
        best = newest
    if SINKS:
        best, mass, total = add_sinks(best, mass, total, tl.load(sinks + head) + tl.zeros([1], tl.float32))
    place = (row.to(tl.int64) * HQ + head) * D + at[None, :]
    tl.store(output + place, (total / mass[:, None]).to(output.dtype.element_ty), mask=at[None, :] < D)
