"""What came of a comparison, and what follows from it: medians, ratios, shares. Plain data, kept as JSON."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from comparison.ceiling import ModelShape, Rates, most_tokens_per_second
from comparison.engines import RIVALS
from comparison.workload import Workload

OURS = "chairlift"

Statistic = Callable[[list[float]], float]
"""Of several measurements, the one that counts: their median, their maximum."""


@dataclass(slots=True)
class Score:
    """An engine at a workload: its seconds, round by round. After a failure it sat out."""

    seconds: list[float] = field(default_factory=list)
    failure: str | None = None


@dataclass(slots=True)
class Standing:
    """An engine over the whole run. `failure`: it never started."""

    kind: str
    about: dict[str, Any] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    marks: dict[str, float] = field(default_factory=dict)  # seconds since the process was started
    peak_bytes: int = 0
    failure: str | None = None

    @property
    def first_token_s(self) -> float | None:
        """From the start of the process."""
        return self.marks.get("first_token")

    @property
    def after_imports_s(self) -> float | None:
        """From the moment at which everything was imported to the first token."""
        return self.marks["first_token"] - self.marks["imports_done"] if self.marks else None


@dataclass(slots=True)
class Trial:
    """All engines at one workload, and the machine's rates before each round and after the last."""

    workload: Workload
    scores: dict[str, Score]
    rates: list[Rates] = field(default_factory=list)

    def round_rates(self, name: str) -> list[float]:
        """Tokens per second, in the workload's unit, of every round that it finished."""
        return [self.workload.num_counted_tokens / seconds for seconds in self.scores[name].seconds]

    def median(self, name: str) -> float | None:
        """None for an engine that failed."""
        rates = self.round_rates(name)
        return statistics.median(rates) if rates and self.scores[name].failure is None else None

    def ratio(self, name: str) -> float | None:
        """How many times as fast as this one we are: the median of the rounds' ratios. None if either failed."""
        if self.median(name) is None or self.median(OURS) is None:
            return None
        pairs = zip(self.round_rates(OURS), self.round_rates(name), strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)

    def best_peer(self, standings: Mapping[str, Standing]) -> str | None:
        """The fastest engine that is made for the purpose."""
        medians = {name: self.median(name) for name in self.scores if standings[name].kind in RIVALS}
        finished = {name: rate for name, rate in medians.items() if rate is not None}
        return max(finished, key=finished.__getitem__) if finished else None

    def ceiling(self, shape: ModelShape, of: Statistic = statistics.median) -> float | None:
        """In the workload's unit. `of`: which of the measured rates counts; None where none were measured."""
        if not self.rates:
            return None
        rates = Rates(of([r.bytes_per_second for r in self.rates]), of([r.flops_per_second for r in self.rates]))
        return most_tokens_per_second(shape, self.workload, rates)

    def share(self, shape: ModelShape) -> float | None:
        """What we reach of the ceiling at the median rates."""
        ours, ceiling = self.median(OURS), self.ceiling(shape)
        return None if ours is None or ceiling is None else ours / ceiling


def record(trial: Trial, standings: Mapping[str, Standing], shape: ModelShape) -> dict[str, Any]:
    """A trial as JSON: raw figures first, then what the table shows of them."""
    scores = {
        name: asdict(score) | {"rates": trial.round_rates(name), "median": trial.median(name)}
        for name, score in trial.scores.items()
    }
    return {
        "workload": trial.workload.name,
        "unit": trial.workload.unit,
        "engines": scores,
        "machine_rates": [asdict(rates) for rates in trial.rates],
        "ceiling": trial.ceiling(shape),
        "ceiling_at_highest_rates": trial.ceiling(shape, max),
        "share": trial.share(shape),
        "ratios": {name: trial.ratio(name) for name in trial.scores if name != OURS},
        "best_peer": trial.best_peer(standings),
    }
