"""What must hold at every step, whatever the workload. A breach is a bug of the scheduler and ends the simulation.

Every step: every row has a slot; the budget is kept; decode rows come first, are all there, and take one token each;
only claimed slots, each once, are written to (the ledger refuses anything else); nothing is heard of a request that
has ended; an answer is whole; the scheduler stamps admissions with the time that it is. Every `check_every` steps: its
own `check()`, which goes through all slots and requests. At the end: every request has ended, and every slot can be
claimed.
"""

from harness import stalled, without_slot

from chairlift.cache.ledger import SlotLedger
from chairlift.scheduler import Scheduler, StepPlan


class Breach(AssertionError):
    """Something that must always hold does not."""


class Watch:
    """Looks at every step of one simulation."""

    def __init__(self, scheduler: Scheduler, slots: SlotLedger, budget: int, check_every: int) -> None:
        self._scheduler = scheduler
        self._slots = slots
        self._budget = budget
        self._check_every = check_every
        self.num_steps = 0
        self.num_checks = 0

    def look_at(self, plan: StepPlan) -> None:
        """After `schedule`: the plan keeps to the rules."""
        self.num_steps += 1
        self.demand(bool(plan.rows), "nothing is planned though somebody waits")
        slotless = without_slot(plan)
        self.demand(not slotless, f"rows are planned that have no slot: {slotless}")
        num_planned = sum(row.num_new_tokens for row in plan.rows)
        self.demand(num_planned <= self._budget, f"{num_planned} tokens are planned, the budget is {self._budget}")
        decode = plan.rows[: plan.num_decode_rows]
        self.demand(all(row.num_new_tokens == 1 for row in decode), "a decode row takes more than one token")
        stalling = stalled(self._scheduler, plan)
        self.demand(not stalling, f"decode rows stall: {stalling}")

    def look_after(self) -> None:
        """After `update`: now and then everything is checked."""
        if self.num_steps % self._check_every == 0:
            self._check()

    def look_at_end(self, num_alive: int) -> None:
        """Nothing is left behind."""
        self._check()
        self.demand(num_alive == 0, f"{num_alive} requests never ended")
        claimable = self._slots.slots_remaining
        self.demand(claimable == self._slots.num_slots, f"only {claimable} of {self._slots.num_slots} slots came back")

    def demand(self, is_right: bool, complaint: str) -> None:
        """Raises `Breach` if it is not."""
        if not is_right:
            raise Breach(f"step {self.num_steps}: {complaint}")

    def _check(self) -> None:
        self.num_checks += 1
        try:
            self._scheduler.check()
        except AssertionError as error:
            raise Breach(f"step {self.num_steps}: {error}") from error
