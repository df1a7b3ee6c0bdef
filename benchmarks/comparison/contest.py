"""Engines taking turns, one workload after another, round by round, and what comes of it: figures, JSON, a table."""

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from machine import format_table
from peers.engines import OURS, RIVALS, Engine
from peers.worker import Worker, WorkerDied, WorkerError
from peers.workers.protocol import Settings

from comparison.ceiling import ModelShape, Rates, Workload, most_tokens_per_second

Statistic = Callable[[list[float]], float]
"""Reduces several measurements to the one that counts: their median, their maximum."""


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
        """Returns how many times as fast as this one we are: the median of the rounds' ratios. None if either
        failed.
        """
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
        """Returns what we reach of the ceiling at the median rates."""
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


def table(trials: Sequence[Trial], standings: Mapping[str, Standing], shape: ModelShape) -> str:
    """Medians of tokens per second, and below them how many times as fast as each engine Chairlift is.

    Then start-up and memory, and what failed.
    """
    rows = [["workload", "", *standings, "ceiling", "share", "best peer"]]
    for trial in trials:
        medians = [_cell(trial.median(name), 1) for name in standings]
        ratios = [_cell(None if name == OURS else trial.ratio(name), 2, "") for name in standings]
        ends = [_cell(trial.ceiling(shape), 1, ""), _cell(trial.share(shape), 2, "")]
        rows.append([trial.workload.name, trial.workload.unit, *medians, *ends])
        rows.append(["", "ratio", *ratios, "", "", _best(trial, standings)])
    starts = [["engine", "first token, s", "after imports, s", "peak memory, GB"]]
    for name, each in standings.items():
        figures = (each.first_token_s, each.after_imports_s, each.peak_bytes / 1e9 or None)
        starts.append([name, *(_cell(figure, 2) for figure in figures)])
    return "\n".join([format_table(rows), "", format_table(starts), *_failures(trials, standings)])


def _best(trial: Trial, standings: Mapping[str, Standing]) -> str:
    best = trial.best_peer(standings)
    ratio = None if best is None else trial.ratio(best)
    return f"{best or ''} {_cell(ratio, 2, '')}".strip()


def _failures(trials: Sequence[Trial], standings: Mapping[str, Standing]) -> list[str]:
    absent = [f"{name}: {standing.failure}" for name, standing in standings.items() if standing.failure]
    failed = [
        f"{name} at {trial.workload.name}, {score.failure}"
        for trial in trials
        for name, score in trial.scores.items()
        if score.failure and not standings[name].failure
    ]
    return [f"FAILED {line}" for line in [*absent, *failed]]


def _cell(value: float | None, decimals: int, missing: str = "failed") -> str:
    return missing if value is None else f"{value:.{decimals}f}"


@dataclass(frozen=True, slots=True)
class Limits:
    """Says how long a worker may take, in seconds."""

    start_up: float
    answer: float


class Entrant:
    """An engine with its worker, which is started again for the next workload if it died at one."""

    def __init__(self, engine: Engine, settings: Settings, log: Path, limits: Limits) -> None:
        self.name = engine.name
        self.standing = Standing(engine.kind, options=dict(engine.options))
        self._engine, self._settings, self._log, self._limits = engine, settings, log, limits
        self._worker: Worker | None = None

    def start(self, prompt: list[int]) -> None:
        """Up to its first token; how long that took is kept of the first start. Raises `WorkerError`."""
        worker = Worker(self._engine.command(), self._engine.environment(self._settings), self._log)
        try:
            with worker.turn():
                settings = asdict(self._settings) | {"options": self._engine.options}
                answer = worker.ask({"settings": settings, "prompt": prompt}, self._limits.start_up)
        except BaseException:
            worker.kill()
            raise
        self._worker = worker
        if not self.standing.marks:
            self.standing.marks = {name: at - worker.started_at for name, at in answer["marks"].items()}
            self.standing.about = answer["about"]

    def ask(self, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
        """Its answer to a batch, starting it first if need be. Raises `WorkerError`."""
        if self._worker is None:
            self.start(prompts[0])
        assert self._worker is not None, "started"
        try:
            with self._worker.turn():
                return self._worker.ask({"prompts": prompts, "output_tokens": num_tokens}, self._limits.answer)
        except WorkerDied:
            self._worker = None
            raise

    def generate(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Seconds for a batch. Raises `WorkerError`, also if any prompt got more or fewer tokens than asked for."""
        answer = self.ask(prompts, num_tokens)
        if answer["counts"] != [num_tokens] * len(prompts):
            raise WorkerError(f"{len(prompts)} prompts were to get {num_tokens} tokens each, got {answer['counts']}")
        return float(answer["seconds"])

    def log_tail(self) -> str:
        return Worker.tail_of(self._log)

    def note_peak(self) -> None:
        if self._worker is not None:
            self.standing.peak_bytes = max(self.standing.peak_bytes, self._worker.peak_bytes())

    def close(self) -> None:
        """Ends its processes."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None


class Contest:
    """As a context manager it ends every process it started, whatever happens. `gauge` measures the machine."""

    def __init__(self, entrants: Sequence[Entrant], gauge: Entrant | None, vocab_size: int) -> None:
        self._entrants, self._gauge, self._vocab_size = list(entrants), gauge, vocab_size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for entrant in [*self._entrants, *([self._gauge] if self._gauge else [])]:
            entrant.close()

    @property
    def standings(self) -> dict[str, Standing]:
        return {entrant.name: entrant.standing for entrant in self._entrants}

    def start(self, prompt: list[int]) -> None:
        """Every engine, one after the other. One that does not start stays out of everything."""
        for entrant in self._entrants:
            try:
                entrant.start(prompt)
            except WorkerError as error:
                entrant.standing.failure = f"did not start: {error}"
                _tell(f"{entrant.name} {entrant.standing.failure}\n{entrant.log_tail()}")
            else:
                _tell(f"{entrant.name}: first token after {entrant.standing.marks['first_token']:.1f} s")

    def run(self, workload: Workload, num_rounds: int) -> Trial:
        """Everyone warms up on the workload, which is not counted; then rounds, the order rotating."""
        trial = Trial(workload, {entrant.name: Score(failure=entrant.standing.failure) for entrant in self._entrants})
        for entrant in self._entrants:
            self._take_turn(trial, entrant, None)
        for number in range(num_rounds):
            self._measure_rates(trial)
            first = number % len(self._entrants)
            for entrant in self._entrants[first:] + self._entrants[:first]:
                self._take_turn(trial, entrant, number)
        self._measure_rates(trial)
        return trial

    def _take_turn(self, trial: Trial, entrant: Entrant, number: int | None) -> None:
        score, workload = trial.scores[entrant.name], trial.workload
        if score.failure is not None:
            return
        turn = "warm-up" if number is None else f"round {number + 1}"
        try:
            seconds = entrant.generate(workload.prompts(turn, self._vocab_size), workload.output_tokens)
        except WorkerError as error:
            score.failure = f"{turn}: {error}"
            _tell(f"{workload.name}, {entrant.name}, {score.failure}\n{entrant.log_tail()}")
            return
        entrant.note_peak()
        rate = workload.num_counted_tokens / seconds
        _tell(f"{workload.name}, {turn}, {entrant.name}: {rate:.1f} {workload.unit}")
        if number is not None:
            score.seconds.append(seconds)

    def _measure_rates(self, trial: Trial) -> None:
        if self._gauge is None:
            return
        bandwidth, flops = self._gauge.ask([[0]], 1)["counts"]
        trial.rates.append(Rates(float(bandwidth), float(flops)))
        _tell(f"{trial.workload.name}, this machine: {bandwidth / 1e9:.1f} GB/s, {flops / 1e9:.0f} GFLOP/s")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
