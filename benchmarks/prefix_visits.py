"""Users who share a system prompt: what they send, when they come, and what each server's rounds come to.

Each user holds a conversation; turn k repeats the system prompt, the turns before it and the server's own answers.
Texts are random words of a seed: a round with a seed of its own finds nothing of an earlier round in any cache.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Self

import numpy as np
from machine import format_table
from peers.engines import OURS
from shapes import MESSAGE_TOKENS

from chairlift.loadtest import BenchConfig
from chairlift.loadtest.records import MS_PER_S
from chairlift.loadtest.summary import BenchResult, Distribution

_LENGTH_STEP = 128  # tokens to which a context is rounded up: the size of vLLM's blocks on a CPU
_PROMPT_END_TOKENS = 1  # the mark with which the assistant's turn begins


@dataclass(frozen=True, slots=True)
class Arrival:
    """Says how users arrive: all at once, or (with `rate`) so many a second as a Poisson process."""

    rate: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """ "all", or users per second. Raises `ValueError`."""
        if text == "all":
            return cls()
        try:
            rate = float(text)
        except ValueError:
            rate = 0.0
        if not 0.0 < rate < float("inf"):
            raise ValueError(f"{text!r} is no arrival: write all, or users per second")
        return cls(rate)

    @property
    def name(self) -> str:
        return "all at once" if self.rate is None else f"{self.rate:g} users/s"


@dataclass(frozen=True, slots=True)
class Visits:
    """Holds what the users of a round send. Lengths are in tokens, `think_time` is in seconds."""

    num_users: int
    num_turns: int
    prefix_tokens: int
    question_tokens: int
    output_tokens: int
    think_time: float

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest conversation with its last answer, rounded up."""
        turn_tokens = self.question_tokens + self.output_tokens + 2 * MESSAGE_TOKENS
        most = self.prefix_tokens + MESSAGE_TOKENS + self.num_turns * turn_tokens + _PROMPT_END_TOKENS
        return -(-most // _LENGTH_STEP) * _LENGTH_STEP

    def test(self, url: str, arrival: Arrival, seed: int) -> BenchConfig:
        """A round as a load test of the server at `url`."""
        when: dict[str, Any] = {"request_rate": arrival.rate} if arrival.rate else {"concurrency": self.num_users}
        return BenchConfig(
            url=url,
            endpoint="chat",
            num_requests=self.num_users * self.num_turns,
            turns=self.num_turns,
            prefix_tokens=self.prefix_tokens,
            prompt_tokens=self.question_tokens,
            output_tokens=self.output_tokens,
            think_time=self.think_time,
            warmup=0,
            seed=seed,
            **when,
        )


@dataclass(frozen=True, slots=True)
class Round:
    """Holds what the users of one round saw. `ttft_ms` has the times to first tokens of each turn, in milliseconds.

    `cached_tokens`: of the prompts' tokens, as the server says; some leave it out where it is 0. `lag_p99_ms`: how late
    the client itself was. `failure`: the first of `num_failed`.
    """

    ttft_ms: tuple[tuple[float, ...], ...]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    duration_s: float
    lag_p99_ms: float
    num_failed: int
    failure: str | None

    @classmethod
    def of(cls, result: BenchResult, num_turns: int) -> Self:
        good = result.succeeded
        failures = [str(record.failure) for record in result.records if record.failure is not None]
        lag = Distribution.of_seconds(result.lags)
        turns = [[record.ttft * MS_PER_S for record in good if record.turn == turn] for turn in range(num_turns)]
        return cls(
            ttft_ms=tuple(map(tuple, turns)),
            prompt_tokens=sum(record.prompt_tokens for record in good),
            cached_tokens=sum(record.usage_cached_tokens or 0 for record in good),
            output_tokens=sum(record.output_tokens for record in good),
            duration_s=result.duration_s,
            lag_p99_ms=0.0 if lag is None else lag.p99,
            num_failed=len(failures),
            failure=failures[0] if failures else None,
        )


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
        """A quantile of the time to first token, the median over rounds. `turn` None: of all turns together.

        None for a server that failed.
        """
        quantiles = self._quantiles(name, percent, turn)
        return statistics.median(quantiles) if quantiles else None

    def ratio(self, name: str, turn: int | None = None) -> float | None:
        """Returns how many times as late as ours this server's median comes: the median of the rounds' ratios."""
        ours, theirs = self._quantiles(OURS, 50, turn), self._quantiles(name, 50, turn)
        if not ours or not theirs:
            return None
        return statistics.median(their / our for our, their in zip(ours, theirs, strict=True))

    def cached_share(self, name: str) -> float | None:
        """The share of the prompts' tokens over all rounds. None for a server that failed."""
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
    turns = [f"turn {turn + 1}" for turn in range(num_turns)]
    lines: list[str] = []
    for trial in trials:
        rows = [["", *turns, "all turns", "p90", "cached", "ratio"]]
        rows += [[name, *_cells(trial, name, num_turns)] for name in trial.series]
        lines += [f"{trial.arrival.name}: time to first token, ms", format_table(rows), ""]
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


def _cells(trial: Trial, name: str, num_turns: int) -> list[str]:
    medians = [trial.quantile_ms(name, 50, turn) for turn in range(num_turns)]
    times = [*medians, trial.quantile_ms(name, 50), trial.quantile_ms(name, 90)]
    shares = [trial.cached_share(name), None if name == OURS else trial.ratio(name)]
    figures = [(time, 1) for time in times] + [(share, 2) for share in shares]
    return ["-" if value is None else f"{value:.{decimals}f}" for value, decimals in figures]


def _failures(trials: Sequence[Trial]) -> list[str]:
    return [
        f"FAILED {name}, {trial.arrival.name}: {series.failure}"
        for trial in trials
        for name, series in trial.series.items()
        if series.failure is not None
    ]
