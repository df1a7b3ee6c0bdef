"""What is measured while a simulation goes on."""

from dataclasses import dataclass
from math import inf

from chairlift.scheduler import StepPlan
from simulation.costs import CostModel
from simulation.fairness import Shares
from simulation.passenger import Passenger
from simulation.records import Fate, Records


@dataclass(slots=True)
class Use:
    """How the machine was used; times in seconds of the simulation."""

    busy: float = 0.0  # the steps' times added up
    backlogged: float = 0.0  # those of steps at which somebody waited for a slot
    backlogged_slots: float = 0.0  # the sum of time x slots in use over those
    num_copied_tokens: int = 0
    longest_overtaking: float = 0.0  # the most that a request was older than one that got its slot before


class Meter:
    """Told of every request's coming, admission and end, and of every step."""

    def __init__(self, cost: CostModel, window: float) -> None:
        """`window`: seconds over which tenants' shares are compared."""
        self.records = Records()
        self.shares = Shares(window)
        self.use = Use()
        self._cost = cost
        self._tenants: dict[str, int] = {}
        self._newest_admitted = -inf

    @property
    def tenants(self) -> list[str]:
        """By the numbers that the records have for them."""
        return list(self._tenants)

    def note_arrival(self, passenger: Passenger, now: float) -> None:
        """It waits."""
        self._tenants.setdefault(passenger.tenant, len(self._tenants))
        self.shares.arrive(passenger.tenant, passenger.num_owed, now)

    def note_admissions(self, passengers: list[Passenger], now: float) -> None:
        """They got their first slots in the same step."""
        for passenger in passengers:
            num_cached = passenger.request.num_cached_tokens
            passenger.num_owed -= num_cached
            self.shares.admit(passenger.tenant, num_cached, now)
            overtaking = self._newest_admitted - passenger.arrival
            self.use.longest_overtaking = max(self.use.longest_overtaking, overtaking)
        self._newest_admitted = max([self._newest_admitted, *(passenger.arrival for passenger in passengers)])

    def note_step(
        self, plan: StepPlan, passengers: list[Passenger], seconds: float, num_slots_backlogged: int, now: float
    ) -> None:
        """A step begins; `passengers` are its rows', and of the slots so many are in use while somebody waits."""
        use = self.use
        use.busy += seconds
        use.num_copied_tokens += sum(copy.num_tokens for copy in plan.copies)
        if num_slots_backlogged:
            use.backlogged += seconds
            use.backlogged_slots += seconds * num_slots_backlogged
        served = []
        for row, passenger in zip(plan.rows, passengers, strict=True):
            num_tokens = row.num_new_tokens + plan.num_steps - 1
            passenger.num_owed -= num_tokens
            served.append((passenger.tenant, num_tokens))
        self.shares.serve(served, now)

    def note_end(self, passenger: Passenger, fate: Fate, now: float) -> None:
        """It is over."""
        self.shares.leave(passenger.tenant, passenger.num_owed, was_admitted=passenger.is_admitted)
        self.records.append(passenger.ending(fate, self._tenants[passenger.tenant], self._cost, now))
