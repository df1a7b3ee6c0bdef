"""Begins a step. The engine shares the order of the verbs with all that stands in for it in tests and simulations."""

from collections.abc import Callable

from chairlift.cache.ledger import SlotLedger
from chairlift.plan import StepPlan
from chairlift.scheduler.scheduler import Scheduler


def begin_step(
    scheduler: Scheduler,
    slots: SlotLedger,
    launch: Callable[[StepPlan], None],
    look: Callable[[StepPlan], None] = lambda _: None,
) -> StepPlan:
    """Schedules, advances and launches a step, whose results go to `Scheduler.update`.

    Returns its plan, without rows if nothing can be computed now: then it was not launched. `look` gets the plan as it
    was scheduled. If `launch` raises, the plan's copies and scrubs stay in the books of the slots. They are performed
    again later, before the scrubs of all the plan's slots.
    """
    plan = scheduler.schedule()
    look(plan)
    if plan.rows:
        plan = scheduler.advance(plan)
        launch(plan)
        slots.performed(len(plan.jobs))
    return plan
