"""Holds what is measured and watched while a simulation goes on: use of slots, shares of tenants, breaches.

In a window of time every tenant has a demand: the tokens that its requests still need, and those of requests that come
meanwhile. The fair share of what the machine computed is max-min fair: nobody gets more than the demand, and what one
does not need the others share evenly. What a tenant received over its fair share is 1 for all if the sharing is fair.
Windows in which all demands are met say nothing and do not count.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from chairlift.cache.ledger import SlotLedger
from chairlift.plan import StepPlan
from chairlift.scheduler import Scheduler
from simulation.costs import CostModel
from simulation.requests import Fate, Records, SimulatedRequest


def jain(values: Sequence[float]) -> float:
    """Jain's fairness index, (sum x)^2 / (n sum x^2): 1 if all are equal, 1/n if one has everything.

    Of no values, or none but 0, it is 1: nobody is treated worse than another. Jain, Chiu and Hawe, 1984.
    """
    squares = len(values) * sum(value * value for value in values)
    return sum(values) ** 2 / squares if squares else 1.0


def fair_shares(demands: Sequence[float], total: float) -> list[float]:
    """The max-min fair division of `total`: in the order of `demands`, and none above its demand."""
    shares = [0.0] * len(demands)
    left = total
    by_demand = sorted(range(len(demands)), key=demands.__getitem__)
    for position, index in enumerate(by_demand):
        shares[index] = min(demands[index], left / (len(demands) - position))
        left -= shares[index]
    return shares


@dataclass(slots=True)
class _Account:
    """One tenant's books, in tokens, and when it last got a slot."""

    owed: float = 0.0  # that its requests still need
    demand: float = 0.0  # of this window so far
    served: float = 0.0  # in this window
    num_waiting: int = 0
    noticed_at: float = 0.0  # when its backlog began, or one of its requests last got a slot
    longest_gap: float = 0.0


class Shares:
    """Tokens that tenants were served and asked for. Told of every request's coming, first slot, tokens and end."""

    def __init__(self, window: float) -> None:
        """`window`: seconds; about as long as requests wait, so that it shows who is kept waiting."""
        if not window > 0:
            raise ValueError(f"the window must be above 0 seconds, not {window:g}")
        self._window = window
        self._ends_at = window
        self._accounts: dict[str, _Account] = {}
        self._weighted = 0.0  # sum of Jain's index x tokens served over windows
        self._weight = 0.0

    @property
    def jain(self) -> float:
        """Mean of the windows, weighted by the tokens served in each; 1 if nobody ever lacked anything."""
        return self._weighted / self._weight if self._weight else 1.0

    @property
    def longest_gap(self) -> float:
        """Seconds: the longest that a tenant with waiting requests went without one of them getting a slot."""
        return max((account.longest_gap for account in self._accounts.values()), default=0.0)

    def arrive(self, tenant: str, num_tokens: int, now: float) -> None:
        """A request came that needs so many tokens computed."""
        account = self._accounts.setdefault(tenant, _Account())
        account.owed += num_tokens
        account.demand += num_tokens
        if account.num_waiting == 0:
            account.noticed_at = now
        account.num_waiting += 1

    def admit(self, tenant: str, num_cached_tokens: int, now: float) -> None:
        """A request got its first slot, and need not have so many tokens computed."""
        account = self._accounts[tenant]
        account.longest_gap = max(account.longest_gap, now - account.noticed_at)
        account.noticed_at = now
        account.num_waiting -= 1
        self._forgo(account, num_cached_tokens)

    def leave(self, tenant: str, num_left: int, *, was_admitted: bool) -> None:
        """A request ended which would have needed so many tokens more."""
        account = self._accounts[tenant]
        account.num_waiting -= not was_admitted
        self._forgo(account, num_left)

    def serve(self, tokens: Iterable[tuple[str, int]], now: float) -> None:
        """A step began that computes these tokens, of these tenants."""
        while now >= self._ends_at:
            self._close_window()
        for tenant, num_tokens in tokens:
            account = self._accounts[tenant]
            account.served += num_tokens
            account.owed -= num_tokens

    def _forgo(self, account: _Account, num_tokens: int) -> None:
        account.owed -= num_tokens
        account.demand -= num_tokens

    def _close_window(self) -> None:
        accounts = [account for account in self._accounts.values() if account.demand > 0]
        total = sum(account.served for account in accounts)
        if len(accounts) > 1 and 0 < total < sum(account.demand for account in accounts):
            shares = fair_shares([account.demand for account in accounts], total)
            ratios = [account.served / share for account, share in zip(accounts, shares, strict=True)]
            self._weighted += jain(ratios) * total
            self._weight += total
        for account in self._accounts.values():
            account.demand, account.served = account.owed, 0.0
        self._ends_at += self._window


@dataclass(slots=True)
class Use:
    """Says how the machine was used; times in seconds of the simulation."""

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

    def note_arrival(self, simulated: SimulatedRequest, now: float) -> None:
        """It waits."""
        self._tenants.setdefault(simulated.tenant, len(self._tenants))
        self.shares.arrive(simulated.tenant, simulated.num_owed, now)

    def note_admissions(self, requests: list[SimulatedRequest], now: float) -> None:
        """They got their first slots in the same step."""
        for simulated in requests:
            num_cached = simulated.state.num_cached_tokens
            simulated.num_owed -= num_cached
            self.shares.admit(simulated.tenant, num_cached, now)
            overtaking = self._newest_admitted - simulated.arrival
            self.use.longest_overtaking = max(self.use.longest_overtaking, overtaking)
        self._newest_admitted = max([self._newest_admitted, *(simulated.arrival for simulated in requests)])

    def note_step(
        self,
        plan: StepPlan,
        requests: list[SimulatedRequest],
        seconds: float,
        num_slots_backlogged: int,
        num_copied_tokens: int,
        now: float,
    ) -> None:
        """A step begins; `requests` are its rows', and so many slots are in use while somebody waits."""
        use = self.use
        use.busy += seconds
        use.num_copied_tokens += num_copied_tokens
        if num_slots_backlogged:
            use.backlogged += seconds
            use.backlogged_slots += seconds * num_slots_backlogged
        served = []
        for row, simulated in zip(plan.rows, requests, strict=True):
            num_tokens = row.num_new_tokens + plan.num_steps - 1
            simulated.num_owed -= num_tokens
            served.append((simulated.tenant, num_tokens))
        self.shares.serve(served, now)

    def note_end(self, simulated: SimulatedRequest, fate: Fate, now: float) -> None:
        """It is over."""
        self.shares.leave(simulated.tenant, simulated.num_owed, was_admitted=simulated.is_admitted)
        self.records.append(simulated.ending(fate, self._tenants[simulated.tenant], self._cost, now))


class Breach(AssertionError):
    """Something that must always hold does not."""


class Watch:
    """Holds what must hold at every step of one simulation, whatever the workload. A breach is a bug of the scheduler.

    Every step: every row has a slot; the budget is kept; decode rows come first, are all there, and take one token
    each; only claimed slots, each once, are written to (the ledger refuses anything else); nothing is heard of a
    request that has ended; an answer is whole; the scheduler stamps admissions with the time that it is. Every
    `check_every` steps: its own `check()`, which goes through all slots and requests. At the end: every request has
    ended, and every slot can be claimed.
    """

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
        running = {request.slot: request for request in self._scheduler.running}
        strangers = [row.key.tag for row in plan.rows if row.slot not in running]
        self.demand(not strangers, f"rows are planned in slots that are not theirs: {strangers}")
        num_planned = sum(row.num_new_tokens for row in plan.rows)
        self.demand(num_planned <= self._budget, f"{num_planned} tokens are planned, the budget is {self._budget}")
        decode = plan.rows[: plan.num_decode_rows]
        self.demand(all(row.num_new_tokens == 1 for row in decode), "a decode row takes more than one token")
        others = set(running.values()).difference(running[row.slot] for row in plan.rows)
        stalling = sorted(request.request_id for request in others if request.num_uncomputed == 1)
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
