"""Draws a token from each row of logits: greedy, or with temperature, min-p, top-k and top-p.

A row is divided into parts, so that a single row keeps the whole device busy, and a part is read in tiles. Blocks of a
launch cannot wait for each other, so each question about a whole row is a launch: every part writes its share of the
answer, and the parts of the next launch add the shares up, always in the same order. These are the questions:

1. Which logit is the largest, and is one not finite? That is enough for greedy rows. Bias, masks and penalties are
   applied at that time, for the rows that ask for them (`peaks`).
2. Which logit is the k-th largest? How many are at least as large as each of `_WIDTH` bounds tells four bits of it.
3. Down to which logit do the largest have top-p of the mass that is left? Likewise, with masses instead of counts.
4. What mass do all logits that are left have, part by part?
5. At which token does the sum of masses, in the order of tokens, exceed the drawn number's share?

A float32 is searched for by its order (`logits.order_of`), an integer. All 32 bits take eight launches; the 16 that
bfloat16 has take four. A launch ends at once for rows that do not ask its question.
"""

# mypy: disable-error-code="untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from chairlift.kernels.changes import NO_CHANGES, Changes
from chairlift.kernels.logits import floor_of, knob, limit_of, mass_of, order_of, read, scale
from chairlift.kernels.peaks import PARTS, TILE, Grid, find_peaks

NUM_KNOBS = 5
"""Rows of a table before its uniform numbers: whether the row draws, temperature, min-p, top-k, top-p."""

_KNOBS = tl.constexpr(NUM_KNOBS)
_BITS = tl.constexpr(4)  # found by a launch
_WIDTH = tl.constexpr(16)  # bounds that tell them
_PARTS, _TILE = PARTS, TILE
_NUM_ORDER_BITS = {torch.bfloat16: 16}
_WARPS, _MANY_WARPS = 4, 8

_kernel = triton.jit(
    do_not_specialize=[
        *("table_stride", "num_rows", "num_parts", "num_tiles"),
        *("turn", "first_turn", "shift", "last_shift"),
    ]
)  # so that no number of rows is compiled on its own


@triton.jit
def _peak_of(peaks: tl.tensor, row: tl.tensor, num_parts: tl.tensor) -> tl.tensor:
    """Returns the row's largest logit."""
    part = tl.arange(0, _PARTS)
    return tl.max(tl.load(peaks + row * num_parts + part, mask=part < num_parts, other=-float("inf")), 0)


@triton.jit
def _measured(
    shares: tl.tensor, turn: tl.tensor, row: tl.tensor, num_rows: tl.tensor, num_parts: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Adds up the parts' answers of a launch: one for each bound, float32 `[_WIDTH]`."""
    part, bound = tl.arange(0, _PARTS)[:, None], tl.arange(0, _WIDTH)[None, :]
    first = (turn * num_rows + row) * num_parts
    return tl.sum(tl.load(shares + (first + part) * _WIDTH + bound, mask=part < num_parts, other=0.0), 0)


@triton.jit
def _settle(
    shares: tl.tensor, found: tl.tensor, turn: tl.tensor, shift: tl.tensor, wanted: tl.tensor, row: tl.tensor,
    num_rows: tl.tensor, num_parts: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Adds the bits that a launch tells to what was found before it: the largest bound that reaches what is wanted."""
    measured = _measured(shares, turn, row, num_rows, num_parts)
    is_reached = (measured >= wanted) & (tl.arange(0, _WIDTH) > 0)
    return tl.load(found + turn * num_rows + row) ^ (tl.sum(is_reached.to(tl.int32), 0) << shift)


@triton.jit
def _whole_mass(
    shares: tl.tensor, first_turn: tl.tensor, row: tl.tensor, num_rows: tl.tensor, num_parts: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Returns the mass that top-k and min-p leave, which the first search by mass has measured."""
    measured = _measured(shares, first_turn, row, num_rows, num_parts)
    return tl.sum(tl.where(tl.arange(0, _WIDTH) == 0, measured, 0.0), 0)


@triton.jit
def _limit_of_counts(
    table: tl.tensor, shares: tl.tensor, found: tl.tensor, limits: tl.tensor, peak: tl.tensor, size: tl.tensor,
    table_stride: tl.tensor, turn: tl.tensor, last_shift: tl.tensor, row: tl.tensor, num_rows: tl.tensor,
    num_parts: tl.tensor, IS_FIRST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Returns the smallest scaled logit that top-k keeps. The first search by mass settles it and writes it down."""
    limit, top_k = tl.full([], -float("inf"), tl.float32), knob(table, 3, table_stride, row)
    if top_k < size:
        if IS_FIRST:
            kth = _settle(shares, found, turn - 1, last_shift, top_k, row, num_rows, num_parts)
            limit = limit_of(kth, peak, knob(table, 1, table_stride, row), last_shift)
            if tl.program_id(1) == 0:
                tl.store(limits + row, limit)
        else:
            limit = tl.load(limits + row)
    return limit


@triton.jit
def _measure(
    logits: tl.tensor, row: tl.tensor, row_stride: tl.tensor, size: tl.tensor, num_tiles: tl.tensor, bounds: tl.tensor,
    peak: tl.tensor, temperature: tl.tensor, limit: tl.tensor, IS_MASS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Counts, or adds up the masses of, a part's logits that are at least as large as each bound."""
    measured = tl.full([_WIDTH, _TILE], 0.0, tl.float32)
    for tile in range(tl.program_id(1) * num_tiles, tl.program_id(1) * num_tiles + num_tiles):
        at = tile * _TILE + tl.arange(0, _TILE)
        x = read(logits, row, row_stride, at, size)
        share = mass_of(scale(x, peak, temperature), limit) if IS_MASS else tl.where(at < size, 1.0, 0.0)
        measured += tl.where(order_of(x)[None, :] >= bounds[:, None], share[None, :], 0.0)
    return tl.sum(measured, 1)


@_kernel
def _narrow(
    logits: tl.tensor, table: tl.tensor, peaks: tl.tensor, shares: tl.tensor, found: tl.tensor, limits: tl.tensor,
    size: tl.tensor, row_stride: tl.tensor, table_stride: tl.tensor, num_rows: tl.tensor, num_parts: tl.tensor,
    num_tiles: tl.tensor, turn: tl.tensor, first_turn: tl.tensor, shift: tl.tensor, last_shift: tl.tensor,
    IS_MASS: tl.constexpr, IS_FIRST: tl.constexpr,
) -> None:  # fmt: skip
    """Measures, for a part, what is at least as large as each bound: a count, or the mass that top-k and min-p leave.

    `turn` counts launches of both searches; `first_turn` is the first of the one by mass.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak = _peak_of(peaks, row, num_parts)
    if (tl.load(table + row) <= 0) | (tl.abs(peak) == float("inf")):
        return
    wanted, limit = knob(table, 3, table_stride, row), peak
    is_asked = wanted < size
    if IS_MASS:
        limit = _limit_of_counts(
            table, shares, found, limits, peak, size, table_stride, turn, last_shift, row, num_rows, num_parts, IS_FIRST
        )
        limit = tl.maximum(limit, floor_of(knob(table, 2, table_stride, row)))
        wanted = knob(table, 4, table_stride, row)
        is_asked = wanted < 1
    if is_asked:
        known = tl.full([], -0x80000000, tl.int32)
        if not IS_FIRST:
            if IS_MASS:
                wanted *= _whole_mass(shares, first_turn, row, num_rows, num_parts)
            known = _settle(shares, found, turn - 1, shift + _BITS, wanted, row, num_rows, num_parts)
        if part == 0:
            tl.store(found + turn * num_rows + row, known)
        bounds = known ^ (tl.arange(0, _WIDTH) << shift)
        temperature = knob(table, 1, table_stride, row)
        measured = _measure(logits, row, row_stride, size, num_tiles, bounds, peak, temperature, limit, IS_MASS)
        first = ((turn * num_rows + row) * num_parts + part) * _WIDTH
        tl.store(shares + first + tl.arange(0, _WIDTH), measured)


@_kernel
def _add_up(
    logits: tl.tensor, table: tl.tensor, peaks: tl.tensor, shares: tl.tensor, found: tl.tensor, limits: tl.tensor,
    masses: tl.tensor, size: tl.tensor, row_stride: tl.tensor, table_stride: tl.tensor, num_rows: tl.tensor,
    num_parts: tl.tensor, num_tiles: tl.tensor, turn: tl.tensor, first_turn: tl.tensor, last_shift: tl.tensor,
    IS_CUT: tl.constexpr,
) -> None:  # fmt: skip
    """Adds up the mass that is left of a part, float64, and writes the limit of what is left of the row, float32."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak = _peak_of(peaks, row, num_parts)
    if (tl.load(table + row) <= 0) | (tl.abs(peak) == float("inf")):
        return
    temperature = knob(table, 1, table_stride, row)
    limit = floor_of(knob(table, 2, table_stride, row))
    if IS_CUT:
        if knob(table, 3, table_stride, row) < size:
            limit = tl.maximum(limit, tl.load(limits + row))
        top_p = knob(table, 4, table_stride, row)
        if top_p < 1:
            wanted = top_p * _whole_mass(shares, first_turn, row, num_rows, num_parts)
            last = _settle(shares, found, turn - 1, last_shift, wanted, row, num_rows, num_parts)
            limit = tl.maximum(limit, limit_of(last, peak, temperature, last_shift))
    if part == 0:
        tl.store(limits + num_rows + row, limit)
    mass = tl.full([_TILE], 0.0, tl.float64)
    for tile in range(part * num_tiles, part * num_tiles + num_tiles):
        at = tile * _TILE + tl.arange(0, _TILE)
        scaled = scale(read(logits, row, row_stride, at, size), peak, temperature)
        mass += mass_of(scaled, limit).to(tl.float64)
    tl.store(masses + row * num_parts + part, tl.sum(mass, 0))


@triton.jit
def _pick_part(
    masses: tl.tensor, row: tl.tensor, num_parts: tl.tensor, uniform: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Finds the part with the drawn token: its index, and the share that its sum of masses has to exceed."""
    part = tl.arange(0, _PARTS)
    mass = tl.load(masses + row * num_parts + part, mask=part < num_parts, other=0.0)
    target = uniform * tl.sum(mass, 0)
    exceeding = tl.min(tl.where(tl.cumsum(mass, 0) > target, part, _PARTS), 0)
    last = tl.max(tl.where(mass > 0, part, 0), 0)  # rounding may leave none that exceeds it
    chosen = tl.minimum(exceeding, last)
    return chosen, target - tl.sum(tl.where(part < chosen, mass, 0.0), 0)


@_kernel
def _pick(
    logits: tl.tensor, table: tl.tensor, step: tl.tensor, peaks: tl.tensor, bests: tl.tensor, limits: tl.tensor,
    masses: tl.tensor, tokens: tl.tensor, size: tl.tensor, row_stride: tl.tensor, table_stride: tl.tensor,
    num_rows: tl.tensor, num_parts: tl.tensor, num_tiles: tl.tensor, IS_DRAWN: tl.constexpr,
) -> None:  # fmt: skip
    """Writes each row's token, int64; -1 if a logit is NaN or inf, or if all are -inf."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, _PARTS)
    peak = _peak_of(peaks, row, num_parts)
    own = tl.load(peaks + row * num_parts + part, mask=part < num_parts, other=-float("inf"))
    best = tl.load(bests + row * num_parts + part, mask=part < num_parts, other=size)
    token = tl.min(tl.where(own == peak, best, size), 0)
    is_valid = tl.abs(peak) != float("inf")
    is_drawn = is_valid & (tl.load(table + row) > 0) if IS_DRAWN else False
    if is_drawn:
        temperature = knob(table, 1, table_stride, row)
        limit = tl.load(limits + num_rows + row)
        uniform = tl.load(table + (_KNOBS + tl.load(step)) * table_stride + row)
        chosen, target = _pick_part(masses, row, num_parts, uniform)
        before, last = tl.full([], 0.0, tl.float64), token
        token = tl.full([], 0, tl.int32) + size
        for tile in range(chosen * num_tiles, chosen * num_tiles + num_tiles):
            if token == size:
                at = tile * _TILE + tl.arange(0, _TILE)
                mass = mass_of(scale(read(logits, row, row_stride, at, size), peak, temperature), limit)
                sums = before + tl.cumsum(mass.to(tl.float64), 0)
                token = tl.min(tl.where((sums > target) & (mass > 0), at, size), 0)
                last = tl.where(tl.max(mass, 0) > 0, tl.max(tl.where(mass > 0, at, 0), 0), last)
                before += tl.sum(mass.to(tl.float64), 0)
        token = tl.where(token == size, last, token)
    tl.store(tokens + row, tl.where(is_valid, token, -1).to(tl.int64))


class _Rows(NamedTuple):
    """Holds what all launches read, and what the first one finds."""

    logits: torch.Tensor
    table: torch.Tensor
    grid: Grid
    peaks: torch.Tensor  # float32 [R, parts]
    bests: torch.Tensor  # int32 [R, parts]

    @property
    def blocks(self) -> tuple[int, int]:
        return self.grid.num_rows, self.grid.num_parts

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes and strides, in the order in which kernels take them."""
        return self.logits.shape[1], self.logits.stride(0), self.table.stride(0), *self.grid


class _Search(NamedTuple):
    """Holds what the searches for top-k's and top-p's limits find."""

    shifts: range  # by launch of a search: of the bits that it finds
    shares: torch.Tensor  # float32 [launches, R, parts, _WIDTH]
    found: torch.Tensor  # int32 [launches, R]: the bits that were known before
    limits: torch.Tensor  # float32 [2, R]: of scaled logits; top-k's, then that of all

    @classmethod
    def of(cls, rows: _Rows, *, has_cutoffs: bool) -> "_Search":
        logits, (num_rows, num_parts, _) = rows.logits, rows.grid
        shifts = range(32 - _BITS.value, 31 - _NUM_ORDER_BITS.get(logits.dtype, 32), -_BITS.value)
        num_launches = 2 * len(shifts) if has_cutoffs else 0
        return cls(
            shifts,
            shares=logits.new_empty((num_launches, num_rows, num_parts, _WIDTH.value), dtype=torch.float32),
            found=logits.new_empty((num_launches, num_rows), dtype=torch.int32),
            limits=logits.new_empty((2, num_rows), dtype=torch.float32),
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.shares, self.found, self.limits


def draw_tokens(
    logits: torch.Tensor,
    table: torch.Tensor | None = None,
    step: torch.Tensor | None = None,
    changes: Changes = NO_CHANGES,
    *,
    has_cutoffs: bool = False,
) -> torch.Tensor:
    """Logits `[R, vocab]` of any float type -> tokens, int64 `[R]`; -1 where a logit is NaN or inf, or all are -inf.

    `table`: float64 `[NUM_KNOBS + steps, R]`, the knobs, then uniform numbers; None: all rows are greedy. `step`: int64
    `[1]` on the device, chooses among the latter. `changes` are made to the logits before. `has_cutoffs`: whether a
    row may have top-k or top-p. Elements of a row, and the values of a knob, must be adjacent. All is recordable.
    """
    assert logits.stride(1) == 1, "elements of a row must be adjacent"
    assert table is None or table.stride(1) == 1 or table.shape[1] == 1, "a knob's values must be adjacent"
    num_rows = len(logits)
    tokens = logits.new_empty(num_rows, dtype=torch.int64)
    if num_rows == 0:
        return tokens
    logits, grid, peaks, bests = find_peaks(logits, changes)
    rows = _Rows(logits, peaks if table is None else table, grid, peaks, bests)
    limits = masses = peaks  # greedy rows have none
    if table is not None:
        limits, masses = _weigh(rows, has_cutoffs=has_cutoffs)
    _pick[(num_rows,)](
        *(logits, rows.table, tokens if step is None else step, peaks, bests, limits, masses, tokens, *rows.sizes),
        IS_DRAWN=table is not None,
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )
    return tokens


def _weigh(rows: _Rows, *, has_cutoffs: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each row's limits, and what mass is left of each part, float64 `[R, parts]`."""
    search = _Search.of(rows, has_cutoffs=has_cutoffs)
    num_turns = len(search.shifts)
    if has_cutoffs:
        for turn in range(2 * num_turns):
            shift = search.shifts[turn % num_turns]
            _narrow[rows.blocks](
                *(rows.logits, rows.table, rows.peaks, *search.tensors, *rows.sizes),
                *(turn, num_turns, shift, search.shifts[-1]),
                IS_MASS=turn >= num_turns,
                IS_FIRST=shift == search.shifts[0],
                num_warps=_MANY_WARPS,
                enable_fp_fusion=False,
            )
    masses = torch.empty_like(rows.peaks, dtype=torch.float64)
    _add_up[rows.blocks](
        *(rows.logits, rows.table, rows.peaks, *search.tensors, masses, *rows.sizes),
        *(2 * num_turns, num_turns, search.shifts[-1]),
        IS_CUT=has_cutoffs,
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )
    return search.limits, masses
