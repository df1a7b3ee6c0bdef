"""Weights in the layout that the kernels read.

A matrix `[out, in]` becomes panels of 16 outputs. Within a panel, 32-bit words (one float32, two bfloat16 or four bytes
of one output) are transposed: word k of all 16 outputs, then word k + 1. So sequential reads deliver what a processor's
dot-product instructions take. Outputs are padded to 16 with zeros, and so are the inputs of floating dtypes to 64.

Integers in groups become bytes, as `csrc/grouped/panel.h` draws them: 8 bits with 128 added; with 4 bits, words 2 k and
2 k + 1 are the low and high halves of one. A table says what halves stand for, if not for themselves. 2, 3, 5 and 6
bits are in planes before, too. Their scales and offsets are transposed likewise.

Queries and keys are rotated as whole heads, each half with the other. If only some elements of a head rotate, they come
first in both halves (`blocks/head_orders.py`), and the angle of the others is 0. If a half is no multiple of 16, the
last eight elements of both stand behind all others.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from chairlift.models.blocks import head_order
from chairlift.models.cpu.loading import Change, write_panels
from chairlift.models.grouped import GROUP_ALIGNMENT, POWERS_OF_TWO, GroupedWeight
from chairlift.models.layers import pad_rows
from chairlift.models.rope import rope_tables
from chairlift.models.rotary import RopeConfig
from chairlift.models.side_by_side import compute_each, elements_of_part

LANES = 16
DEPTH_ALIGNMENT = 64
_CHANGES = {4: Change.FOLD_HALVES, 8: Change.TO_UNSIGNED}  # of values; those in planes stand as they are
_UNITS = {3: 1 / 8, 4: 1 / 16}  # the kernels see multiples of these values
_SHARING_BYTES = 2  # bits of values of which a scale and an offset share a byte
_ZERO_OF_4_BITS = 8  # the value that represents 0 in a matrix without offsets
_OFFSET_OF_BYTE = -240.0  # units of an offset per step of its byte


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """`[out, in]` in panels; for integers in groups also their scales, and offsets unless all are zero."""

    panels: torch.Tensor  # int32 words [padded out / 16, padded in * bits / 32, 16]
    num_outputs: int  # as the kernels count: without the last panel's padding
    depth: int
    bias: torch.Tensor | None  # float32 [padded out]
    num_bits: int
    group_size: int = 0
    scales: torch.Tensor | None = None  # float16 or bytes [padded out / 16, depth / group_size, 16], in units or steps,
    # or exponents of powers of two
    offsets: torch.Tensor | None = None  # likewise
    steps: torch.Tensor | None = None  # float16 [padded out / 16, runs, 16], or 2 runs: of scales, then of offsets
    scales_per_step: int = 0
    units: torch.Tensor | None = None  # float32 [padded out]
    table: torch.Tensor | None = None  # uint8 [16]: bytes that values of 4 bits stand for


def pack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedMatrix:
    """`[out, in]` (and `[out]`) -> panels."""
    num_outputs, num_inputs = weight.shape
    missing = (0, -num_inputs % DEPTH_ALIGNMENT)
    padded = pad(weight, missing) if any(missing) else weight  # padding copies, and a head is large
    return PackedMatrix(_panels(padded), num_outputs, padded.shape[1], _bias(bias), 8 * weight.itemsize)


def pack_grouped(
    weight: GroupedWeight, bias: torch.Tensor | None = None, *, has_byte_scales: bool = False
) -> PackedMatrix:
    """Packs the same integers. Scales and offsets keep the precision of float16, at any magnitude; steps stay.

    `has_byte_scales`: they fit into bytes, as those of `quantize` with 4 bits do. ValueError for groups that are no
    multiple of 32.
    """
    if weight.scale_steps is not None and weight.group_size <= GROUP_ALIGNMENT:
        return _pack_with_steps(weight, weight.scale_steps, bias)
    weight = weight.regular()
    if weight.group_size % GROUP_ALIGNMENT:
        raise ValueError(f"the kernels multiply groups of 32, 64, 96, ... weights, not of {weight.group_size}")
    if weight.table is not None and weight.offsets is not None:
        weight = weight.widened()
    weight = weight.without_steps()
    if weight.scales.dtype is POWERS_OF_TWO and weight.offsets is None and weight.table is not None:
        return _pack_powers_of_two(weight, bias)
    scales = weight.scales.float()
    offsets = None if weight.offsets is None else weight.offsets.float()
    if weight.num_bits == 4 and weight.table is None:
        if offsets is None:
            offsets = torch.zeros_like(scales)
        elif torch.equal(offsets, -_ZERO_OF_4_BITS * scales):
            offsets = None
        scales = scales / 16  # the kernels see 16 times the value
    if has_byte_scales:
        assert offsets is not None, "bytes are for 4 bits with offsets"
        units = scales.amax(dim=1) / 255
        dtype, offset_unit = torch.uint8, _OFFSET_OF_BYTE
    else:
        units = _powers_of_two(scales if offsets is None else torch.cat((scales, offsets), dim=1))
        dtype, offset_unit = torch.float16, 1.0
    return PackedMatrix(
        *_values_of(weight, bias),
        _by_panel(_in_units(scales, units, dtype)),
        None if offsets is None else _by_panel(_in_units(offsets, offset_unit * units, dtype)),
        units=pad_rows(units, LANES),
        table=_table_of(weight),
    )


def _values_of(
    weight: GroupedWeight, bias: torch.Tensor | None
) -> tuple[torch.Tensor, int, int, torch.Tensor | None, int, int]:
    """Returns the first fields of a packed matrix, which do not depend on how scales are kept."""
    sizes = weight.num_bits, weight.group_size
    change = _CHANGES.get(weight.num_bits, Change.NONE)
    return _panels(weight.values, change), weight.num_outputs, weight.num_inputs, _bias(bias), *sizes


def _pack_powers_of_two(weight: GroupedWeight, bias: torch.Tensor | None) -> PackedMatrix:
    """Packs a matrix whose scales are E8M0 as it is."""
    return PackedMatrix(
        *_values_of(weight, bias),
        _by_panel(weight.scales.view(torch.uint8)),
        units=pad_rows(torch.ones(weight.num_outputs), LANES),
        table=_table_of(weight),
    )


def _table_of(weight: GroupedWeight) -> torch.Tensor | None:
    return None if weight.table is None else weight.table.view(torch.uint8) ^ 128


def _pack_with_steps(weight: GroupedWeight, steps: torch.Tensor, bias: torch.Tensor | None) -> PackedMatrix:
    """Packs a matrix as it is. `steps`: `[out, runs]`, of scales; those in float32 have 11 significant bits."""
    if weight.offset_steps is not None:
        steps = torch.stack((steps, weight.offset_steps), dim=2).flatten(1)
    units = torch.ones(weight.num_outputs)
    if steps.dtype is torch.float32:
        units = _powers_of_two(steps)
        steps = _in_units(steps, units, torch.float16)
    units *= _UNITS.get(weight.num_bits, 1.0)
    scales, offsets = weight.scales, weight.offsets
    if weight.num_bits == _SHARING_BYTES and offsets is not None:
        scales, offsets = scales | offsets << 4, None
    return PackedMatrix(
        *_values_of(weight, bias),
        _by_panel(scales),
        None if offsets is None else _by_panel(offsets),
        _by_panel(steps),
        weight.scales_per_step,
        pad_rows(units, LANES),
    )


def rope_table(rope: RopeConfig, head_dim: int, max_seq_len: int) -> torch.Tensor:
    """float32 `[max_seq_len, head_dim]`: the cosines of half a head, and the sines, in the order of two halves."""
    cosines, sines = rope_tables(rope, head_dim, max_seq_len, torch.device("cpu"))
    num_turning = cosines.shape[-1] // 2
    still = (0, head_dim // 2 - num_turning)
    both = torch.cat((pad(cosines[:, :num_turning], still, value=1.0), pad(sines[:, :num_turning], still)), dim=-1)
    return both if head_dim % (2 * LANES) == 0 else both[:, head_order(head_dim, head_dim, LANES)]


def _panels(rows: torch.Tensor, change: Change = Change.NONE) -> torch.Tensor:
    """`[out, in]` -> int32 words `[padded out / 16, words of a row, 16]`"""
    values = rows.contiguous()
    num_panels, num_words = -(-len(values) // LANES), values.shape[1] * values.itemsize // 4
    panels = torch.empty(num_panels, num_words, LANES, dtype=torch.int32)
    num_at_once = max(1, elements_of_part(values.numel()) // (LANES * values.shape[1]))

    def write(start: int) -> None:
        some = slice(start, start + num_at_once)
        write_panels(values[some.start * LANES : some.stop * LANES], panels[some], change)

    compute_each(write, range(0, num_panels, num_at_once), values.numel())
    return panels


def _powers_of_two(rows: torch.Tensor) -> torch.Tensor:
    """`[out]`: units in which each row's largest number is just below 2^15, where float16 is most precise."""
    largest = rows.abs().amax(dim=1)
    if not largest.isfinite().all():  # rare, and slow for all numbers of a large matrix
        largest = rows.abs().nan_to_num(0.0, 0.0).amax(dim=1)
    return torch.ldexp(torch.ones_like(largest), largest.frexp().exponent - 15)


def _in_units(rows: torch.Tensor, units: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[out, n]`, each row divided by its unit; zeros for a unit of 0."""
    counts = rows / torch.where(units == 0, 1.0, units)[:, None]
    return counts.to(dtype) if dtype.is_floating_point else counts.nan_to_num().round().to(dtype)


def _by_panel(rows: torch.Tensor) -> torch.Tensor:
    """`[out, n]` -> `[padded out / 16, n, 16]`"""
    return pad_rows(rows, LANES).view(-1, LANES, rows.shape[1]).transpose(1, 2).contiguous()


def _bias(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else pad_rows(bias.float(), LANES)
