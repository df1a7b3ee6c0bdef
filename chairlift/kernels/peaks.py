"""The first look at logits: changes those of rows that ask for it, and finds the largest of each part.

Rows that ask for bias, masks or penalties are changed in the launch that reads all logits anyway. It writes what they
became, in float32, and the launches after it read that.
"""

# mypy: disable-error-code="untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from chairlift.kernels.changes import NO_CHANGES, Changes

PARTS = tl.constexpr(64)
"""A row has at most so many parts; a power of two."""

TILE = tl.constexpr(1024)
"""Logits that are read at once."""

_FEW = tl.constexpr(8)  # entries that are compared with a tile at once
_MOST_BLOCKS = 2048  # more keep the device no busier
_WARPS = 4


class Grid(NamedTuple):
    """Says how rows are divided."""

    num_rows: int
    num_parts: int
    num_tiles: int  # of a part

    @classmethod
    def of(cls, num_rows: int, size: int) -> "Grid":
        most = max(1, min(PARTS.value, _MOST_BLOCKS // num_rows))
        num_tiles = triton.cdiv(triton.cdiv(size, TILE.value), most)
        return cls(num_rows, triton.cdiv(size, num_tiles * TILE.value), num_tiles)


class Peaks(NamedTuple):
    """Holds what the first launch found."""

    logits: torch.Tensor  # [R, vocab]: changed, if a row asked for it
    grid: Grid
    peaks: torch.Tensor  # float32 [R, parts]: the largest logit, inf if one is NaN
    bests: torch.Tensor  # int32 [R, parts]: the first token that has it


@triton.jit
def _add(
    x: tl.tensor, at: tl.tensor, start: tl.tensor, row: tl.tensor, pieces: tl.tensor, ends: tl.tensor,
    tokens: tl.tensor, values: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Adds a row's entries to a tile of its logits. Those of a piece are in order, so it has them in one place."""
    for piece in range(tl.load(pieces + row), tl.load(pieces + row + 1)):
        first, last = tl.load(ends + piece), tl.load(ends + piece + 1)
        num_before, num_here = 0, 0
        for begin in range(first, last, TILE):
            entry = begin + tl.arange(0, TILE)
            token = tl.load(tokens + entry, mask=entry < last, other=0x7FFFFFFF)
            num_before += tl.sum((token < start).to(tl.int32), 0)
            num_here += tl.sum(((token >= start) & (token < start + TILE)).to(tl.int32), 0)
        for begin in range(first + num_before, first + num_before + num_here, _FEW):
            entry = begin + tl.arange(0, _FEW)
            is_here = entry < first + num_before + num_here
            token = tl.load(tokens + entry, mask=is_here, other=-1)
            value = tl.load(values + entry, mask=is_here, other=0.0)
            x += tl.sum(tl.where(token[:, None] == at[None, :], value[:, None], 0.0), 0)
    return x


@triton.jit
def _keep(
    x: tl.tensor, at: tl.tensor, size: tl.tensor, row: tl.tensor, words: tl.tensor, index: tl.tensor, width: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Forbids the tokens of a tile that are not in the row's set."""
    chosen = tl.load(index + row)
    if chosen >= 0:
        word = tl.load(words + chosen * width + at // 32, mask=at < size, other=0)
        x = tl.where((word >> (at % 32)) & 1 != 0, x, -float("inf"))
    return x


@triton.jit
def _penalise(
    x: tl.tensor, at: tl.tensor, size: tl.tensor, row: tl.tensor, slots: tl.tensor, factors: tl.tensor,
    num_generated: tl.tensor, is_in_prompt: tl.tensor, num_rows: tl.tensor, state_stride: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Applies a row's penalties to a tile, in the same steps as `PenaltyState.apply`."""
    slot = tl.load(slots + row)
    if slot >= 0:
        place = slot.to(tl.int64) * state_stride + at
        count = tl.load(num_generated + place, mask=at < size, other=0)
        is_seen = (tl.load(is_in_prompt + place, mask=at < size, other=0) != 0) | (count > 0)
        repetition = tl.load(factors + row)
        x = tl.where(is_seen, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
        presence, frequency = tl.load(factors + num_rows + row), tl.load(factors + 2 * num_rows + row)
        x -= frequency * count.to(tl.float32) + presence * (count > 0).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["num_parts", "num_tiles", "num_rows", "allowed_width", "mask_width"])
def _find_peaks(
    logits: tl.tensor, peaks: tl.tensor, bests: tl.tensor, changed: tl.tensor,
    pieces: tl.tensor, ends: tl.tensor, tokens: tl.tensor, values: tl.tensor,
    allowed: tl.tensor, allowed_index: tl.tensor, masks: tl.tensor, mask_index: tl.tensor,
    slots: tl.tensor, factors: tl.tensor, num_generated: tl.tensor, is_in_prompt: tl.tensor,
    size: tl.tensor, row_stride: tl.tensor, num_parts: tl.tensor, num_tiles: tl.tensor, num_rows: tl.tensor,
    allowed_width: tl.tensor, mask_width: tl.tensor, state_stride: tl.tensor,
    HAS_ADDITIONS: tl.constexpr, HAS_ALLOWED: tl.constexpr, HAS_MASKS: tl.constexpr, HAS_PENALTIES: tl.constexpr,
) -> None:  # fmt: skip
    """Finds each part's largest logit, float32, and the first token that has it, int32; writes changed logits."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak, best = tl.full([TILE], -float("inf"), tl.float32), tl.full([TILE], 0, tl.int32)
    for tile in range(part * num_tiles, part * num_tiles + num_tiles):
        at = tile * TILE + tl.arange(0, TILE)
        x = tl.load(logits + row * row_stride + at, mask=at < size, other=-float("inf")).to(tl.float32)
        if HAS_ADDITIONS:
            x = _add(x, at, tile * TILE, row, pieces, ends, tokens, values)
        if HAS_ALLOWED:
            x = _keep(x, at, size, row, allowed, allowed_index, allowed_width)
        if HAS_MASKS:
            x = _keep(x, at, size, row, masks, mask_index, mask_width)
        if HAS_PENALTIES:
            x = _penalise(
                x, at, size, row, slots, factors, num_generated, is_in_prompt, num_rows, state_stride
            )  # fmt: skip
        x = tl.where(x == x, x, float("inf"))
        if HAS_ADDITIONS or HAS_ALLOWED or HAS_MASKS or HAS_PENALTIES:
            tl.store(changed + row * size + at, x, mask=at < size)
        best = tl.where(x > peak, at, best)
        peak = tl.maximum(x, peak)
    top = tl.max(peak, 0)
    tl.store(peaks + row * num_parts + part, top)
    tl.store(bests + row * num_parts + part, tl.min(tl.where(peak == top, best, size), 0))


def find_peaks(logits: torch.Tensor, changes: Changes = NO_CHANGES) -> Peaks:
    """Makes the changes to logits `[R, vocab]` of any float type, which stay as they are, and finds the largest.

    The counts of penalties have the vocabulary of the logits, and elements of each tensor's rows must be adjacent.
    """
    num_rows, size = logits.shape
    grid = Grid.of(num_rows, size)
    peaks = logits.new_empty((num_rows, grid.num_parts), dtype=torch.float32)
    bests = torch.empty_like(peaks, dtype=torch.int32)
    additions, allowed, masks, penalties = changes
    is_changed = any(part is not None for part in changes)
    changed = logits.new_empty((num_rows, size), dtype=torch.float32) if is_changed else logits
    widths = [1 if part is None else part.words.stride(0) for part in (allowed, masks)]
    _find_peaks[num_rows, grid.num_parts](
        *(logits, peaks, bests, changed),
        *(additions or [bests, bests, bests, peaks]),
        *(allowed or [bests, bests]),
        *(masks or [bests, bests]),
        *(penalties or [bests, peaks, bests, bests]),
        *(size, logits.stride(0), grid.num_parts, grid.num_tiles, num_rows, *widths),
        1 if penalties is None else penalties.num_generated.stride(0),
        HAS_ADDITIONS=additions is not None,
        HAS_ALLOWED=allowed is not None,
        HAS_MASKS=masks is not None,
        HAS_PENALTIES=penalties is not None,
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )
    return Peaks(changed, grid, peaks, bests)
