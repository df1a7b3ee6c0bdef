"""Lengths of prompts and replies, in tokens: one for all, or drawn from a distribution.

Written as `128`, `uniform:64,256`, `normal:512,128` (mean, standard deviation) or `lognormal:300,0.8` (median, sigma of
the logarithm: the heavy tail that chats have). The last two take a third number, the most that is drawn:
`lognormal:300,0.8,4000`. Draws are rounded, and at least 1.
"""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

FORMS = "N, uniform:LOW,HIGH, normal:MEAN,STD[,MAX] or lognormal:MEDIAN,SIGMA[,MAX]"
MOST_TOKENS = 10_000_000

_FIXED, _UNIFORM, _NORMAL, _LOGNORMAL = "fixed", "uniform", "normal", "lognormal"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths. `numbers` are those of its written form, without the maximum."""

    kind: str
    numbers: tuple[float, ...]
    most: float = MOST_TOKENS

    @classmethod
    def parse(cls, text: int | str) -> Self:
        """Raises `ValueError`, with the forms that can be read, for any other."""
        kind, colon, rest = str(text).strip().rpartition(":")
        try:
            numbers = tuple(float(part) for part in rest.split(","))
            lengths = cls._of(kind if colon else _FIXED, numbers)
        except ValueError:
            raise ValueError(f"cannot read the length {text!r}: it must be {FORMS}, in numbers above 0") from None
        return lengths

    @classmethod
    def _of(cls, kind: str, numbers: tuple[float, ...]) -> Self:
        if not all(0 < number <= MOST_TOKENS for number in numbers):
            raise ValueError
        match kind, numbers:
            case ("fixed", (length,)) if length == int(length):
                return cls(_FIXED, numbers)
            case ("uniform", (low, high)) if low <= high:
                return cls(_UNIFORM, numbers)
            case ("normal" | "lognormal", (_, _)):
                return cls(kind, numbers)
            case ("normal" | "lognormal", (first, second, most)) if most >= 1:
                return cls(kind, (first, second), most)
            case _:
                raise ValueError

    def draw(self, count: int, generator: np.random.Generator) -> list[int]:
        """`count` lengths, each at least 1 and at most `most`. Asking for more keeps the first ones."""
        drawn = np.clip(np.rint(self._draw(count, generator)), 1, self.most)
        return [int(length) for length in drawn]

    def _draw(self, count: int, generator: np.random.Generator) -> "np.typing.NDArray[np.float64]":
        if self.kind == _FIXED:
            return np.full(count, self.numbers[0])
        first, second = self.numbers
        if self.kind == _UNIFORM:
            return generator.integers(round(first), round(second), size=count, endpoint=True).astype(np.float64)
        if self.kind == _NORMAL:
            return generator.normal(first, second, size=count)
        return generator.lognormal(math.log(first), second, size=count)
