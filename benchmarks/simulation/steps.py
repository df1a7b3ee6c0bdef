"""A step of the simulated engine: the real plan, and answers and a duration that are made up."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from harness import launch_nothing, num_copied_in

from chairlift.cache.ledger import SlotLedger
from chairlift.plan import RowResult, StepPlan
from chairlift.scheduler import Scheduler, TokenEvent, begin_step
from simulation.costs import CostModel, StepShape
from simulation.requests import SimulatedRequest

_UNFINISHED = RowResult()


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step that has begun, and what comes of it when its time has passed."""

    plan: StepPlan
    requests: list[SimulatedRequest]  # by row, as are the results
    results: list[RowResult]
    seconds: float
    num_copied: int  # tokens, between slots

    @classmethod
    def begin(
        cls,
        scheduler: Scheduler,
        slots: SlotLedger,
        known: Mapping[str, SimulatedRequest],
        cost: CostModel,
        look: Callable[[StepPlan], None] = lambda _: None,
    ) -> Self:
        """Begins the next step, whose requests are among those known. `look` gets the plan as it was scheduled."""
        plan = begin_step(scheduler, slots, launch_nothing, look)
        requests = [known[row.key.tag] for row in plan.rows]
        results = [
            simulated.say(plan.num_steps) if row.is_sampled else _UNFINISHED
            for row, simulated in zip(plan.rows, requests, strict=True)
        ]
        num_copied = num_copied_in(plan)
        seconds = cost.seconds(shape_of(plan, num_copied)) * plan.num_steps
        return cls(plan, requests, results, seconds, num_copied)

    def end(self, scheduler: Scheduler) -> list[TokenEvent]:
        """Gives the scheduler the results; what they mean to each request."""
        return scheduler.update(self.plan, self.results)


def shape_of(plan: StepPlan, num_copied_tokens: int) -> StepShape:
    """Says what the plan asks of the model."""
    return StepShape(
        num_prompt_tokens=sum(row.num_new_tokens for row in plan.rows[plan.num_decode_rows :]),
        num_decode_rows=plan.num_decode_rows,
        num_context_tokens=sum(row.start for row in plan.rows[: plan.num_decode_rows]),
        num_copied_tokens=num_copied_tokens,
    )
