"""Weights as small integers in groups: what quantized files hold, and what the kernels multiply."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch.nn.functional import pad

from chairlift.models import planes
from chairlift.models.group_rounding import (
    GROUP_SIZE,
    HALF_GROUP_SIZE,
    inverse,
    round_to_4_bits,
    round_to_5_bits,
    round_to_6_bits,
    round_to_8_bits,
    shares_in_groups,
)
from chairlift.models.side_by_side import compute_each

FLOAT8 = torch.float8_e4m3fn
POWERS_OF_TWO = torch.float8_e8m0fnu
LARGEST_FLOAT8 = torch.finfo(FLOAT8).max
_FLOAT8_NUMBERS = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()  # torch converts them one by one on a CPU
GROUP_ALIGNMENT = 32  # of rows that kernels quantize: they multiply groups that are a whole number of these
_WORKSPACE_ELEMENTS = 1 << 27  # at most, of a matrix that is dequantized to be multiplied
_ELEMENTS_AT_ONCE = 1 << 18  # float32 copies of this size stay in a processor's cache from one operator to the next
_ELEMENTS_ROUNDED_AT_ONCE = 1 << 24  # to float8, on a GPU
_CODES = 16


class _InPlanes(NamedTuple):
    """Describes values whose bits are stored apart."""

    group_size: int
    zero: int  # the value that stands for 0
    has_offsets: bool


_IN_PLANES = {
    2: _InPlanes(16, 0, has_offsets=True),
    3: _InPlanes(16, 4, has_offsets=False),
    5: _InPlanes(32, 0, has_offsets=True),
    6: _InPlanes(16, 32, has_offsets=False),
}
_ROUNDING: dict[int, Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, ...]]] = {
    4: round_to_4_bits,
    5: round_to_5_bits,
    6: round_to_6_bits,
    8: lambda groups, shares: round_to_8_bits(groups),  # noqa: ARG005
}
_PARTS_OF_ROUNDED = {5: ("scales", "offsets", "scale_steps", "offset_steps"), 6: ("scales", "scale_steps")}
_FEW_BITS = 3  # values of which times a count of 6 bits make 8 at most
BITS_IN_PLANES = tuple(_IN_PLANES)


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A matrix `[out, in]` of integers, with a scale and perhaps an offset for each group of neighbours along `in`.

    An element is `scale * value + offset`, or with a table `scale * table[value] + offset`. Values of 8 bits are int8
    `[out, in]`, or float8 (e4m3). Values of 4 bits, 0 to 15, are uint8 `[out, in / 2]`: the first of two neighbours is
    in the low half. Values of 2, 3, 5 and 6 bits are uint8 `[out, in * bits / 8]` in planes (`planes.py`). Those
    of 2 bits, 0 to 3, and of 5 bits, 0 to 31, have offsets. Those of 6 bits, 0 to 63, stand for 32 less, and those of 3
    bits for 4 less; they have no offsets. Of 2, 3 and 6 bits 16 share a scale. Counts of 2 bits are below 16.

    Scales and offsets are `[out, in / group_size]`, of any floating dtype. Scales of values by a table may be E8M0:
    powers of two. With steps they are uint8, and stand for so many times the step that they share with neighbours along
    `in`. Without offsets they are int8. Only 4 bits with offsets and no table, and bits in planes have steps.
    """

    num_bits: int
    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None  # None: they are all zero
    table: torch.Tensor | None = None  # int8 [16]: what values of 4 bits stand for; None: for themselves
    scale_steps: torch.Tensor | None = None  # float16 or float32 [out, n], for n runs of as many scales
    offset_steps: torch.Tensor | None = None  # likewise; both or neither

    def __post_init__(self) -> None:
        if self.num_bits not in (4, 8, *BITS_IN_PLANES):
            raise ValueError(f"grouped weights have 2, 3, 4, 5, 6 or 8 bits, not {self.num_bits}")
        if self.table is not None and (self.num_bits != 4 or len(self.table) != _CODES):
            raise ValueError(f"a table is of the {_CODES} values of 4 bits")
        if self.scales.shape[1] < 1 or self.num_inputs % self.scales.shape[1]:
            raise ValueError(f"{self.num_inputs} inputs do not make {self.scales.shape[1]} groups of one size")
        own = _IN_PLANES.get(self.num_bits)
        if own is not None and (self.group_size, self.offsets is not None) != (own.group_size, own.has_offsets):
            has = "and offsets" if own.has_offsets else "and no offsets"
            raise ValueError(f"values of {self.num_bits} bits have a scale for {own.group_size} neighbours, {has}")
        if self.scale_steps is not None:
            self._check_steps(self.scale_steps)

    def _check_steps(self, scale_steps: torch.Tensor) -> None:
        has_them = self.is_in_planes or (self.num_bits == 4 and self.table is None and self.offsets is not None)
        if not has_them or (self.offsets is None) != (self.offset_steps is None):
            raise ValueError("steps are of the scales and offsets of 4 bits without a table, or in planes")
        is_alike = self.offset_steps is None or self.offset_steps.shape == scale_steps.shape
        # Of planes, kernels multiply whole groups at once.
        scales_together = planes.GROUP_SIZE // self.group_size if self.is_in_planes else 1
        if not is_alike or self.scales.shape[1] % (scale_steps.shape[1] * scales_together):
            raise ValueError(f"{self.scales.shape[1]} scales do not make runs of one size that share a step")

    @property
    def is_in_planes(self) -> bool:
        """True for values whose bits are stored apart: the kernels of CPUs multiply these, and no others."""
        return self.num_bits in BITS_IN_PLANES

    @property
    def num_outputs(self) -> int:
        return self.values.shape[0]

    @property
    def num_inputs(self) -> int:
        return self.values.shape[1] * 8 // self.num_bits

    @property
    def is_float(self) -> bool:
        """Tells if values are float8 numbers."""
        return self.values.dtype is FLOAT8

    @property
    def group_size(self) -> int:
        """Elements that share a scale."""
        return self.num_inputs // self.scales.shape[1]

    @property
    def scales_per_step(self) -> int:
        """Scales that share a step; 0: they have none."""
        return 0 if self.scale_steps is None else self.scales.shape[1] // self.scale_steps.shape[1]

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        parts = (self.values, self.scales, self.offsets, self.scale_steps, self.offset_steps)
        return sum(part.nbytes for part in parts if part is not None)

    def without_steps(self) -> Self:
        """The same numbers, with scales and offsets in float32 if they had steps."""
        if self.scale_steps is None:
            return self
        offsets = None
        if self.offsets is not None and self.offset_steps is not None:
            offsets = _times(self.offsets, self.offset_steps)
        scales = _times(self.scales, self.scale_steps)
        return replace(self, scales=scales, offsets=offsets, scale_steps=None, offset_steps=None)

    def regular(self) -> "GroupedWeight":
        """The same numbers with 4 or 8 bits; 2 and 6 bits become the nearest of 255 steps in groups of 32.

        So do 3 bits with counts of more than 6.
        """
        if not self.is_in_planes:
            return self
        return self._by_rows(lambda rows: rows._in_regular_groups())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """`[out, in]`: computed in float32, then rounded once."""
        plain = self.without_steps()
        grouped = self._integers().view(*plain.scales.shape, self.group_size)
        exact = grouped * plain.scales.float()[..., None]
        if plain.offsets is not None:
            exact += plain.offsets.float()[..., None]
        return exact.flatten(1).to(dtype)

    def widened(self) -> "GroupedWeight":
        """The same numbers with values of 8 bits, as in `regular`."""
        regular = self.regular()
        return regular if regular.num_bits == 8 else self._by_rows(lambda rows: rows._in_bytes())

    def without_table(self) -> "GroupedWeight":
        """The same numbers, with those of 8 bits in place of values that stand for them."""
        return self if self.table is None else self.widened()

    def regrouped(self, group_size: int) -> Self:
        """The same numbers in smaller groups, of which the present ones are multiples."""
        num_times, plain = self.group_size // group_size, self.without_steps()
        offsets = None if plain.offsets is None else plain.offsets.repeat_interleave(num_times, dim=1)
        return replace(plain, scales=plain.scales.repeat_interleave(num_times, dim=1), offsets=offsets)

    def rows(self, some: slice) -> Self:
        return self.map_rows(lambda rows: rows[some])

    def on(self, device: str) -> Self:
        """The same there, in dense tensors."""
        return self.map_rows(lambda rows: rows.contiguous().to(device))

    def compacted(self) -> Self:
        """The same numbers, with scales and offsets in 16 bits where these lose nothing: many files have so few."""
        plain = self.without_steps()
        offsets = None if plain.offsets is None else _compacted(plain.offsets)
        return replace(plain, scales=_compacted(plain.scales), offsets=offsets)

    def map_rows(self, arrange: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """With rows chosen, reordered or zero-padded by a function that treats the rows of every tensor alike."""

        def arranged(rows: torch.Tensor | None) -> torch.Tensor | None:
            return None if rows is None else arrange(rows)

        is_power = self.scales.dtype is POWERS_OF_TWO  # torch pads none of these

        return replace(
            self,
            values=arrange(self.values),
            scales=arrange(self.scales.view(torch.uint8)).view(POWERS_OF_TWO) if is_power else arrange(self.scales),
            offsets=arranged(self.offsets),
            scale_steps=arranged(self.scale_steps),
            offset_steps=arranged(self.offset_steps),
        )

    def _by_rows(self, convert: Callable[[Self], "GroupedWeight"]) -> "GroupedWeight":
        """Converts some rows at a time, so that copies in float32 are never of the whole."""
        num_rows = max(1, _ELEMENTS_AT_ONCE // self.num_inputs)
        parts = [slice(start, start + num_rows) for start in range(0, self.num_outputs, num_rows)]
        num_elements = self.num_outputs * self.num_inputs
        return stack_rows(compute_each(lambda some: convert(self.rows(some)), parts, num_elements))

    def _in_regular_groups(self) -> "GroupedWeight":
        if self.group_size == planes.GROUP_SIZE:
            return self._in_bytes()
        exact = self._times_counts() if self.num_bits == _FEW_BITS else None
        return quantize(self.dequantize(), 8) if exact is None else exact

    def _times_counts(self) -> Self | None:
        """Multiplies values by the counts of their scales. None for counts that 8 bits do not suffice for."""
        if self.scale_steps is None or int(self.scales.max()) > 31 or int(self.scales.min()) < -32:
            return None
        # -32 times -4 is the one product that 8 bits lack; its opposite they have.
        products = self._integers().view(*self.scales.shape, -1) * -self.scales.float()[..., None]
        num_groups = self.num_inputs // planes.GROUP_SIZE
        scales = -self.scale_steps.repeat_interleave(num_groups // self.scale_steps.shape[1], dim=1)
        return replace(self, num_bits=8, values=products.flatten(1).to(torch.int8), scales=scales, scale_steps=None)

    def _in_bytes(self) -> Self:
        plain = self.without_steps()
        values, scales = self._integers().to(torch.int8), _without_powers(plain.scales)
        return replace(plain, num_bits=8, values=values, scales=scales, table=None)

    def _integers(self) -> torch.Tensor:
        """float32 `[out, in]`"""
        if self.is_float and self.values.device.type == "cpu":
            codes = self.values.view(torch.uint8).int().flatten()
            return _FLOAT8_NUMBERS.index_select(0, codes).view(self.values.shape)
        if self.num_bits == 8:
            return self.values.float()
        if self.is_in_planes:
            return planes.joined(self.values, self.num_bits).float() - _IN_PLANES[self.num_bits].zero
        values = torch.stack((self.values & 15, self.values >> 4), dim=-1).flatten(1)
        return values.float() if self.table is None else self.table.float()[values.int()]


def _times(counts: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """float32 `[out, n]`: each run of counts times its step."""
    runs = counts.float().view(*steps.shape, -1)
    return (runs * steps.float()[..., None]).flatten(1)


def _without_powers(numbers: torch.Tensor) -> torch.Tensor:
    """The same numbers, in bfloat16 if they are E8M0, which few of torch's operators take."""
    return numbers.to(torch.bfloat16) if numbers.dtype is POWERS_OF_TWO else numbers


def _compacted(numbers: torch.Tensor) -> torch.Tensor:
    """In bfloat16 or float16, if one of them holds all of the numbers exactly."""
    numbers = _without_powers(numbers)
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(numbers.to(dtype).to(numbers.dtype), numbers):
            return numbers.to(dtype)
    return numbers


def workspace_elements(num_outputs: int, num_inputs: int) -> int:
    """Counts the numbers of a matrix that are dequantized at a time: all of them, or whole outputs of a large one."""
    return min(num_outputs, max(1, _WORKSPACE_ELEMENTS // num_inputs)) * num_inputs


def quantize(weight: torch.Tensor, num_bits: int, importance: torch.Tensor | None = None) -> GroupedWeight:
    """`[out, in]` of any floating dtype -> integers of 4, 5, 6 or 8 bits, with inputs padded with zeros to 32.

    Groups are of 32, and with 6 bits of 16. 8 bits are symmetric, with scales of 11 significant bits, as in float16.
    With 4 bits, scales are up to 255 units and offsets up to 255 times -15 units, so that a byte holds each; the row's
    largest scale sets the unit. With 5 bits scales and offsets, and with 6 bits, which are symmetric, scales are counts
    of a step of their row. A NaN makes scales NaN: its group's with 8 bits, all of its row's with fewer.

    `importance`: float32 `[in]`, the weight of each input's squared errors with less than 8 bits; None: all are alike.
    """
    group_size = HALF_GROUP_SIZE if num_bits == 6 else GROUP_SIZE
    missing = -weight.shape[1] % GROUP_SIZE
    padded = pad(weight, (0, missing)) if missing else weight
    shares = (
        None if importance is None or num_bits == 8 else shares_in_groups(pad(importance, (0, missing)), group_size)
    )
    num_rows = max(1, _ELEMENTS_AT_ONCE // padded.shape[1])
    round_groups = _ROUNDING[num_bits]

    def round_part(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return round_groups(rows.float().reshape(len(rows), -1, group_size), shares)

    parts = compute_each(round_part, torch.split(padded, num_rows), padded.numel())
    values, *others = (torch.cat(part) for part in zip(*parts, strict=True))
    names = _PARTS_OF_ROUNDED.get(num_bits, ("scales", "offsets"))
    return GroupedWeight(num_bits, values.flatten(1), **dict(zip(names, others, strict=False)))


def round_to_float8(weight: torch.Tensor) -> GroupedWeight:
    """`[out, in]` of any floating dtype -> float8 numbers with a scale for each row, whose largest number is float8's.

    On the weight's device, a part of the rows at a time. A NaN makes its row's scale NaN.
    """
    values = torch.empty(weight.shape, dtype=FLOAT8, device=weight.device)
    scales = torch.empty(len(weight), 1, device=weight.device)
    num_rows = max(1, _ELEMENTS_ROUNDED_AT_ONCE // weight.shape[1])
    for start in range(0, len(weight), num_rows):
        some = slice(start, start + num_rows)
        wide = weight[some].float()
        scales[some] = wide.abs().amax(dim=1, keepdim=True) / LARGEST_FLOAT8
        values[some] = (wide * inverse(scales[some])).clamp_(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(FLOAT8)
    return GroupedWeight(8, values, scales)


@dataclass(frozen=True, slots=True)
class GroupedParts:
    """Reads a matrix in groups whose rows are those of several, one after the other."""

    parts: Sequence[Callable[[], GroupedWeight]]
    num_elements: int  # of all of them

    def __call__(self) -> GroupedWeight:
        """All of it."""
        return stack_rows(self.read_each())

    def read_each(self) -> list[GroupedWeight]:
        """Returns its parts, in order."""
        return compute_each(lambda part: part(), self.parts, self.num_elements)


def stack_rows(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """Stacks matrices, as for the projections of queries, keys and values. They must have one group size.

    If they differ in bits, or in what these stand for, the result has 8, as in `regular`. ValueError for group sizes
    that differ.
    """
    if len(weights) == 1:
        return weights[0]
    if len({weight.num_bits for weight in weights}) > 1:
        weights = [weight.regular() for weight in weights]
    if len({weight.group_size for weight in weights}) > 1:
        raise ValueError("matrices with groups of different sizes cannot be stacked")
    if len({weight.scales_per_step for weight in weights}) > 1:
        weights = [weight.without_steps() for weight in weights]
    tables = {None if weight.table is None else tuple(weight.table.tolist()) for weight in weights}
    if len(tables) > 1 or len({weight.num_bits for weight in weights}) > 1:
        weights = [weight.widened() for weight in weights]
    offsets = None
    if any(each.offsets is not None for each in weights):
        offsets = torch.cat(
            [torch.zeros_like(each.scales) if each.offsets is None else each.offsets for each in weights]
        )
    values, scales = torch.cat([each.values for each in weights]), [each.scales for each in weights]
    if len({each.dtype for each in scales}) > 1:
        scales = [_without_powers(each) for each in scales]
    steps: list[torch.Tensor | None] = [None, None]
    if weights[0].scale_steps is not None:
        both = ([getattr(each, name) for each in weights] for name in ("scale_steps", "offset_steps"))
        steps = [None if each[0] is None else torch.cat(each) for each in both]
    return GroupedWeight(weights[0].num_bits, values, torch.cat(scales), offsets, weights[0].table, *steps)
