"""The tests of a sweep side by side, and the highest load that meets the limits."""

from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.bench.config import BenchConfig
from chairlift.bench.summary import BenchResult, Summary
from chairlift.bench.sweep_values import SweepValues


@dataclass(frozen=True, slots=True)
class SweepStep:
    """One test of a sweep; `is_good` if the wanted share of its requests were within the limits."""

    value: float
    result: BenchResult
    summary: Summary
    is_good: bool


@dataclass(frozen=True, slots=True)
class Sweep:
    """Steps in ascending order of their values."""

    values: SweepValues
    steps: Sequence[SweepStep]

    @property
    def highest(self) -> float | None:
        """The highest value whose test is good; None if none is."""
        return max((step.value for step in self.steps if step.is_good), default=None)


def sweep_configs(config: BenchConfig, values: SweepValues) -> list[BenchConfig]:
    """The test of each value. Each has a seed of its own, so that no prompt is in a cache from an earlier test."""
    return [
        config.model_copy(update={**values.settings(value), "sweep": None, "seed": config.seed + position})
        for position, value in enumerate(values.values)
    ]


def sweep_step(value: float, result: BenchResult, summary: Summary) -> SweepStep:
    """Judges a test. The limits are among its settings."""
    assert summary.goodput is not None, "a sweep has limits"
    return SweepStep(value, result, summary, is_good=summary.goodput.share >= result.config.goodput_share)
