"""Who got what: Jain's index of the tenants' shares, window by window.

In a window of time every tenant has a demand: the tokens that its requests still need, and those of requests that come
meanwhile. The fair share of what the machine computed is max-min fair: nobody gets more than the demand, and what one
does not need the others share evenly. What a tenant received over its fair share is 1 for all if the sharing is fair.
Windows in which all demands are met say nothing and do not count.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


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
