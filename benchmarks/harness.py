"""The engine's step without a model: schedule, advance, update."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TypeVar

from simulation.workload import text

from chairlift.cache.ledger import SlotLedger
from chairlift.engine.journal import Journal
from chairlift.params import DEFAULT_OPTIONS, RequestOptions, SamplingParams
from chairlift.plan import RowResult, SlotCopy, StepPlan
from chairlift.scheduler import Request, Scheduler, begin_step

US_PER_S = 1e6

_PARAMS = SamplingParams(max_tokens=None, ignore_eos=True)
_RESULT, _NO_RESULT = RowResult([1]), RowResult()
_numbers = itertools.count()

Argument = TypeVar("Argument")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds that the verbs of one step took.

    `journal`: what the statistics took beside them; not a part of the total.
    """

    schedule: float
    advance: float
    update: float
    journal: float = 0.0

    @property
    def total(self) -> float:
        """The whole step."""
        return self.schedule + self.advance + self.update


def make_request(
    num_prompt_tokens: int, max_tokens: int, options: RequestOptions = DEFAULT_OPTIONS, opening: Sequence[int] = ()
) -> Request:
    """A request that runs to its length; behind the opening, its tokens are its own."""
    number = next(_numbers)
    prompt = [*opening, *text(number, num_prompt_tokens - len(opening))]
    return Request(str(number), prompt, _PARAMS, max_tokens, seed=number, options=options)


def launch_nothing(_: StepPlan) -> None:
    """Stands for a launch: copies and scrubs cost nothing here."""


def num_copied_in(plan: StepPlan) -> int:
    """Tokens that have to be copied between slots before the step computes."""
    return sum(job.num_tokens for job in plan.jobs if isinstance(job, SlotCopy))


def timed_step(scheduler: Scheduler, slots: SlotLedger, journal: Journal | None = None) -> StepTimes:
    """Schedules, advances and updates, with token 1 for every row that is sampled.

    With a journal, the launch and its events are noted there as well.
    """
    times: list[float] = []
    start = perf_counter()
    plan = begin_step(scheduler, slots, launch_nothing, lambda _: times.append(perf_counter()))
    advanced = perf_counter()
    results = [_RESULT if row.is_sampled else _NO_RESULT for row in plan.rows]
    ready = perf_counter()
    events = scheduler.update(plan, results)
    updated = perf_counter()
    if journal is not None:
        journal.note_launch(plan, start)
        journal.note_events(events)
    noted = perf_counter() - updated
    (planned,) = times
    return StepTimes(planned - start, advanced - planned, updated - ready, noted)


def medians(times: Sequence[StepTimes]) -> dict[str, float]:
    """Median microseconds of each verb, and of all."""
    figures = {verb: median(getattr(each, verb) for each in times) for verb in ("schedule", "advance", "update")}
    figures["total"] = median(each.total for each in times)
    return {name: round(US_PER_S * seconds, 2) for name, seconds in figures.items()}


def time_calls(call: Callable[[Argument], object], arguments: Iterable[Argument]) -> float:
    """Median microseconds of a call, each with the next argument."""
    times = []
    for argument in arguments:
        begin = perf_counter()
        call(argument)
        times.append(perf_counter() - begin)
    return round(US_PER_S * median(times), 2)
