"""One step of scheduler and ledger, verb by verb, with the time that each takes."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from statistics import median
from time import perf_counter
from typing import TypeVar

from chairlift.cache.ledger import SlotLedger
from chairlift.params import DEFAULT_OPTIONS, RequestOptions, SamplingParams
from chairlift.scheduler import Request, RowResult, Scheduler
from simulation.workload import text

US_PER_S = 1e6

_PARAMS = SamplingParams(max_tokens=None, ignore_eos=True)
_RESULT, _NO_RESULT = RowResult([1]), RowResult()
_numbers = itertools.count()

Argument = TypeVar("Argument")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds that the verbs of one step took. `reserve` is the ledger's, and the model's side calls it."""

    schedule: float
    reserve: float
    advance: float
    update: float

    @property
    def total(self) -> float:
        """The whole step."""
        return self.schedule + self.reserve + self.advance + self.update


def make_request(
    num_prompt_tokens: int, max_tokens: int, options: RequestOptions = DEFAULT_OPTIONS, opening: Sequence[int] = ()
) -> Request:
    """A request that runs to its length; behind the opening, its tokens are its own."""
    number = next(_numbers)
    prompt = [*opening, *text(number, num_prompt_tokens - len(opening))]
    return Request(str(number), prompt, _PARAMS, max_tokens, seed=number, options=options)


def timed_step(scheduler: Scheduler, slots: SlotLedger) -> StepTimes:
    """Schedules, reserves, advances and updates, with token 1 for every row that is sampled."""
    begin = perf_counter()
    plan = scheduler.schedule()
    planned = perf_counter()
    seq_ids = [row.request.slot for row in plan.rows if row.request.slot is not None]
    counts = None if plan.is_decode else [row.num_new_tokens for row in plan.rows]
    results = [_RESULT if row.is_sampled else _NO_RESULT for row in plan.rows]
    ready = perf_counter()
    reservation = slots.reserve(seq_ids, counts, plan.num_steps)
    reserved = perf_counter()
    scheduler.advance(plan, reservation)
    advanced = perf_counter()
    scheduler.update(plan, results)
    return StepTimes(planned - begin, reserved - ready, advanced - reserved, perf_counter() - advanced)


def medians(times: Sequence[StepTimes]) -> dict[str, float]:
    """Median microseconds of each verb, of the scheduler's three together, and of all."""
    figures = {verb.name: median(getattr(each, verb.name) for each in times) for verb in fields(StepTimes)}
    figures["scheduler"] = median(each.total - each.reserve for each in times)
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
