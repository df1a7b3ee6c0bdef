"""What rounds of users come to: medians of times to first token, and how many times later each server's come."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from comparison.results import OURS

from serving.visits import Arrival, Round


@dataclass(slots=True)
class Series:
    """A server's rounds at one way of arriving. After a failure it sat out."""

    rounds: list[Round] = field(default_factory=list)
    failure: str | None = None


@dataclass(slots=True)
class Trial:
    """All servers at one way of arriving."""

    arrival: Arrival
    series: dict[str, Series]

    def quantile_ms(self, name: str, percent: float, turn: int | None = None) -> float | None:
        """Of the time to first token: the median over rounds of each round's. `turn` None: of all turns together.

        None for a server that failed.
        """
        quantiles = self._quantiles(name, percent, turn)
        return statistics.median(quantiles) if quantiles else None

    def ratio(self, name: str, turn: int | None = None) -> float | None:
        """How many times as late as ours this server's median comes: the median of the rounds' ratios."""
        ours, theirs = self._quantiles(OURS, 50, turn), self._quantiles(name, 50, turn)
        if not ours or not theirs:
            return None
        return statistics.median(their / our for our, their in zip(ours, theirs, strict=True))

    def cached_share(self, name: str) -> float | None:
        """Of the prompts' tokens over all rounds. None for a server that failed."""
        series = self.series[name]
        if series.failure is not None:
            return None
        return sum(each.cached_tokens for each in series.rounds) / sum(each.prompt_tokens for each in series.rounds)

    def _quantiles(self, name: str, percent: float, turn: int | None) -> list[float]:
        series = self.series[name]
        if series.failure is not None:
            return []
        return [float(np.percentile(_times(each, turn), percent)) for each in series.rounds]


def record(trial: Trial) -> dict[str, Any]:
    """A trial as JSON: every time that was taken, then what the table shows of them."""
    return {
        "arrival": trial.arrival.name,
        "servers": {name: asdict(series) | _figures(trial, name) for name, series in trial.series.items()},
    }


def table(trials: Sequence[Trial], num_turns: int) -> str:
    """A block for each way of arriving, a line for each server.

    `cached`: share of the prompts' tokens that were not computed anew. `ratio`: their median over ours.
    """
    width = max(map(len, trials[0].series)) + 2
    turns = "".join(f"{f'turn {turn + 1}':>12}" for turn in range(num_turns))
    lines: list[str] = []
    for trial in trials:
        lines.append(f"{trial.arrival.name}: time to first token, ms")
        lines.append(f"{'':<{width}}{turns}{'all turns':>12}{'p90':>12}{'cached':>9}{'ratio':>9}")
        lines += [f"{name:<{width}}{_cells(trial, name, num_turns)}" for name in trial.series]
        lines.append("")
    return "\n".join(lines + _failures(trials))


def _times(each: Round, turn: int | None) -> list[float]:
    return list(chain.from_iterable(each.ttft_ms)) if turn is None else list(each.ttft_ms[turn])


def _figures(trial: Trial, name: str) -> dict[str, Any]:
    rounds = trial.series[name].rounds
    turns = range(len(rounds[0].ttft_ms)) if rounds else ()
    return {
        "ttft_p50_ms": trial.quantile_ms(name, 50),
        "ttft_p90_ms": trial.quantile_ms(name, 90),
        "ttft_p50_ms_by_turn": [trial.quantile_ms(name, 50, turn) for turn in turns],
        "cached_share": trial.cached_share(name),
        "ratio": None if name == OURS else trial.ratio(name),
        "ratio_by_turn": None if name == OURS else [trial.ratio(name, turn) for turn in turns],
    }


def _cells(trial: Trial, name: str, num_turns: int) -> str:
    medians = [trial.quantile_ms(name, 50, turn) for turn in range(num_turns)]
    times = [*medians, trial.quantile_ms(name, 50), trial.quantile_ms(name, 90)]
    ratio = None if name == OURS else trial.ratio(name)
    shares = _cell(trial.cached_share(name), 9, 2) + _cell(ratio, 9, 2)
    return "".join(_cell(time, 12, 1) for time in times) + shares


def _cell(value: float | None, width: int, decimals: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{decimals}f}"


def _failures(trials: Sequence[Trial]) -> list[str]:
    return [
        f"FAILED {name}, {trial.arrival.name}: {series.failure}"
        for trial in trials
        for name, series in trial.series.items()
        if series.failure is not None
    ]
