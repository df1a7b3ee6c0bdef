"""Reads the settings of a load test that are written as text: lengths, limits of latencies, values of a sweep."""

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import numpy as np

MAX_LENGTH = 10_000_000
LENGTH_FORMS = "N, uniform:LOW,HIGH, normal:MEAN,STD[,MAX] or lognormal:MEDIAN,SIGMA[,MAX]"
LIMIT_NAMES = ("ttft", "tpot", "e2el")
SWEPT_FIELDS = {"rate": "request_rate", "concurrency": "concurrency"}


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in tokens: one for all (`128`), or drawn from a distribution.

    `uniform:64,256`, `normal:512,128` (mean, standard deviation) or `lognormal:300,0.8` (median, sigma of the
    logarithm: the heavy tail that chats have). The last two take a third number, the maximum.
    """

    kind: str
    numbers: tuple[float, ...]

    @classmethod
    def parse(cls, text: int | str) -> Self:
        """Raises `ValueError` with the accepted forms."""
        kind, _, listed = str(text).strip().rpartition(":")
        with suppress(ValueError):
            lengths = cls(kind, tuple(map(float, listed.split(","))))
            if all(0 < number <= MAX_LENGTH for number in lengths.numbers) and lengths._has_its_numbers():
                return lengths
        raise ValueError(f"cannot read the length {text!r}: it must be {LENGTH_FORMS}, in numbers above 0")

    def _has_its_numbers(self) -> bool:
        match self.kind, self.numbers:
            case "", (length,):
                return length.is_integer()
            case "uniform", (low, high):
                return low <= high
            case "normal" | "lognormal", (_, _, *maximum):
                return len(maximum) <= 1 and all(number >= 1 for number in maximum)
        return False

    def draw(self, count: int, generator: "np.random.Generator") -> list[int]:
        """`count` rounded lengths, each at least 1. A larger `count` keeps the first ones."""
        if not self.kind:
            return [int(self.numbers[0])] * count
        first, second, *maximum = self.numbers
        if self.kind == "uniform":
            return list(map(int, generator.integers(round(first), round(second), size=count, endpoint=True)))
        center, draw = (first, generator.normal) if self.kind == "normal" else (math.log(first), generator.lognormal)
        most = int(maximum[0]) if maximum else MAX_LENGTH
        return [min(max(1, round(length)), most) for length in draw(center, second, size=count).tolist()]


def parse_limits(text: str) -> dict[str, float]:
    """Milliseconds by latency, from `ttft:500,tpot:50`. Raises `ValueError` with an example."""
    pairs = [part.strip().partition(":") for part in text.split(",")]
    with suppress(ValueError):
        limits = {name: float(number) for name, _, number in pairs if name in LIMIT_NAMES}
        if len(limits) == len(pairs) and all(0 < limit < math.inf for limit in limits.values()):
            return limits
    raise ValueError(
        f"cannot read the limits {text!r}: they must look like ttft:500,tpot:50, with milliseconds above 0 for any of "
        f"{', '.join(LIMIT_NAMES)}, each at most once"
    )


@dataclass(frozen=True, slots=True)
class SweepValues:
    """The values of a `rate` or a `concurrency` to test, ascending, each once."""

    name: str
    values: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `rate=1,2,4,8`. Raises `ValueError` with an example."""
        name, _, listed = text.partition("=")
        with suppress(ValueError):
            values = sorted({float(value) for value in listed.split(",")})
            is_whole = name == "rate" or all(map(float.is_integer, values))
            if name in SWEPT_FIELDS and is_whole and all(0 < value < math.inf for value in values):
                return cls(name, tuple(values))
        raise ValueError(
            f"cannot read the sweep {text!r}: it must look like rate=1,2,4,8 or concurrency=1,2,4,8, with numbers "
            "above 0 (whole ones for concurrency)"
        )
