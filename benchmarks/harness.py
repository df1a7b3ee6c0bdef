"""The engine's step without a model: schedule, reserve, advance, update.

Only this file knows how a plan becomes a reservation in the cache's books.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TypeVar

from simulation.workload import text

from chairlift.cache.ledger import SlotCopy, SlotLedger
from chairlift.engine.journal import Journal
from chairlift.params import DEFAULT_OPTIONS, RequestOptions, SamplingParams
from chairlift.plan import RowResult, StepPlan
from chairlift.scheduler import Request, Scheduler

US_PER_S = 1e6

_PARAMS = SamplingParams(max_tokens=None, ignore_eos=True)
_RESULT, _NO_RESULT = RowResult([1]), RowResult()
_numbers = itertools.count()

Argument = TypeVar("Argument")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds that the verbs of one step took. `reserve` is the ledger's, and the model's side calls it.

    `journal`: what the statistics took beside them; not a part of the total.
    """

    schedule: float
    reserve: float
    advance: float
    update: float
    journal: float = 0.0

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


def take_copies(slots: SlotLedger) -> int:
    """Tokens that have to be copied between slots before the step computes; forgets what the ledger owes."""
    num_tokens = sum(job.num_tokens for job in slots.owed if isinstance(job, SlotCopy))
    slots.owed.clear()
    return num_tokens


def launch(scheduler: Scheduler, slots: SlotLedger, plan: StepPlan) -> None:
    """What the engine does with a plan before the model runs: it reserves what will be written, and advances."""
    scheduler.advance(plan, slots.reserve(plan.slots, plan.num_new_tokens, plan.num_steps))


def timed_step(scheduler: Scheduler, slots: SlotLedger, journal: Journal | None = None) -> StepTimes:
    """Schedules, reserves, advances and updates, with token 1 for every row that is sampled.

    With a journal, the launch and its events are noted there as well.
    """
    begin = perf_counter()
    plan = scheduler.schedule()
    planned = perf_counter()
    seq_ids = plan.slots
    counts = None if plan.is_decode else plan.num_new_tokens
    results = [_RESULT if row.is_sampled else _NO_RESULT for row in plan.rows]
    ready = perf_counter()
    reservation = slots.reserve(seq_ids, counts, plan.num_steps)
    reserved = perf_counter()
    scheduler.advance(plan, reservation)
    advanced = perf_counter()
    events = scheduler.update(plan, results)
    updated = perf_counter()
    if journal is not None:
        journal.note_launch(plan, begin)
        journal.note_events(events)
    noted = perf_counter() - updated
    return StepTimes(planned - begin, reserved - ready, advanced - reserved, updated - advanced, noted)


def medians(times: Sequence[StepTimes]) -> dict[str, float]:
    """Median microseconds of each verb, of the scheduler's three together, and of all."""
    verbs = ("schedule", "reserve", "advance", "update")
    figures = {verb: median(getattr(each, verb) for each in times) for verb in verbs}
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
