"""What is counted of an engine since it was made: for /metrics, and for the line that the log gets now and then.

Counting happens in the engine's thread after each launch, so it is integers and lists; whoever wants to know takes a
copy, and turns that into whatever shape is asked for.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from chairlift.engine.snapshot import Totals

STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Bounds for what takes a step or so."""

WAIT_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
"""Bounds for what a client waits for."""

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TOKEN_COUNTS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True, slots=True)
class Distribution:
    """How many values fell into each range. Range i ends with `bounds[i]`, which is in it; the last has no end."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]  # one more than bounds
    sum: float  # of all values

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def cumulative(self) -> list[int]:
        """Values up to each bound, and last all of them: what Prometheus calls buckets."""
        return list(accumulate(self.counts))


class Histogram:
    """A `Distribution` while it grows. Adding to it costs a fraction of a microsecond."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """That value, so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def read(self) -> Distribution:
        """As it is now."""
        return Distribution(self._bounds, tuple(self._counts), self._sum)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine's counts after its newest launch or, if that was later, request that came or left."""

    time: float  # seconds since the engine was made
    totals: Totals
    num_waiting: int
    num_prefilling: int  # requests that have a slot, and whose prompt is not computed yet
    num_decoding: int  # all others that have a slot
    num_warm: int  # slots that nobody has, with tokens that can be reused
    step_seconds: Distribution  # a launch of several steps counts as that many, each with its share of the time
    step_rows: Distribution
    step_tokens: Distribution  # whose keys and values a step computed
    queue_seconds: Distribution  # from a request's coming to its first slot; of requests whose prompt was computed
    first_token_seconds: Distribution  # from a request's coming to its first token
    inter_token_seconds: Distribution  # from one token of a request to the next; tokens of a launch share its time

    @property
    def num_running(self) -> int:
        return self.num_prefilling + self.num_decoding
