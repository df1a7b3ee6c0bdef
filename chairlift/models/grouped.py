"""Weights as small integers in groups: what quantized files hold, and what the kernels multiply."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A matrix `[out, in]` of integers, with a scale and perhaps an offset for each group of neighbours along `in`.

    An element is `scale * value + offset`. Values of 8 bits are int8 `[out, in]`. Values of 4 bits, 0 to 15, are uint8
    `[out, in / 2]`: of two neighbours the first is in the low half. Scales and offsets are `[out, in / group_size]`, of
    any floating dtype.
    """

    num_bits: int
    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None  # None: they are all zero

    def __post_init__(self) -> None:
        if self.num_bits not in (4, 8):
            raise ValueError(f"grouped weights have 4 or 8 bits, not {self.num_bits}")
        if self.scales.shape[1] < 1 or self.num_inputs % self.scales.shape[1]:
            raise ValueError(f"{self.num_inputs} inputs do not make {self.scales.shape[1]} groups of one size")

    @property
    def num_outputs(self) -> int:
        return self.values.shape[0]

    @property
    def num_inputs(self) -> int:
        return self.values.shape[1] * (8 // self.num_bits)

    @property
    def group_size(self) -> int:
        """Elements that share a scale."""
        return self.num_inputs // self.scales.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + (0 if self.offsets is None else self.offsets.nbytes)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """`[out, in]`: computed in float32, then rounded once."""
        grouped = self._integers().view(self.num_outputs, -1, self.group_size)
        exact = grouped * self.scales.float()[..., None]
        if self.offsets is not None:
            exact += self.offsets.float()[..., None]
        return exact.flatten(1).to(dtype)

    def widened(self) -> Self:
        """The same numbers with values of 8 bits."""
        return self if self.num_bits == 8 else replace(self, num_bits=8, values=self._integers().to(torch.int8))

    def map_rows(self, arrange: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """With rows chosen, reordered or padded with zeros by a function that treats every tensor's rows alike."""
        offsets = None if self.offsets is None else arrange(self.offsets)
        return replace(self, values=arrange(self.values), scales=arrange(self.scales), offsets=offsets)

    def _integers(self) -> torch.Tensor:
        """float32 `[out, in]`"""
        if self.num_bits == 8:
            return self.values.float()
        return torch.stack((self.values & 15, self.values >> 4), dim=-1).flatten(1).float()


def stack_rows(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """Matrices above each other, as the projections of queries, keys and values are. They must have one group size.

    If they differ in bits, all get 8. ValueError for group sizes that differ.
    """
    if len({weight.group_size for weight in weights}) > 1:
        raise ValueError("matrices with groups of different sizes cannot be stacked")
    if len({weight.num_bits for weight in weights}) > 1:
        weights = [weight.widened() for weight in weights]
    offsets = None
    if any(weight.offsets is not None for weight in weights):
        offsets = torch.cat(
            [torch.zeros_like(each.scales) if each.offsets is None else each.offsets for each in weights]
        )
    values, scales = (torch.cat([getattr(each, name) for each in weights]) for name in ("values", "scales"))
    return GroupedWeight(weights[0].num_bits, values, scales, offsets)
