"""Who waits, and whose turn it is next: priorities with ageing, and among equals deficit round robin over tenants.

- A lower `priority` comes first. Waiting makes up for it: a priority is as urgent as `ageing * priority + since`, where
  `since` is the time since which its oldest request has waited and nobody of it got a slot. So each gets a slot in
  `ageing` seconds per level, whatever comes above it, and a long backlog below holds up nobody. Until one of it is
  served that is a constant: nothing has to be recomputed as time goes by.
- Within a priority tenants take turns, counted in tokens: deficit round robin (Shreedhar and Varghese, 1995). In each
  round a tenant is credited with `QUANTUM` tokens; it may start a request when its credit covers the prompt, and what
  is generated for it is charged later. Rounds are reckoned rather than walked: a tenant's turn is the number of the
  round in which its credit will do. Of one tenant alone, the order is that of arrival.

Every operation costs at most the logarithm of the numbers of tenants and priorities, however many requests wait.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, count, zip_longest

from chairlift.scheduler.request import Request

QUANTUM = 128
"""Tokens that a tenant is credited with per round: a short prompt, or a piece of a long one."""

_MANY = 64  # entries of priorities or tenants that left, before it is worth while to throw them away


class WaitingQueue:
    """Requests that wait for a slot. Each carries its own `options.priority`, `options.tenant` and `queue_time`."""

    def __init__(self, ageing: float) -> None:
        """`ageing`: seconds without a slot that are worth one level of priority."""
        self._ageing = ageing
        self._requests: dict[str, Request] = {}
        self._rings: dict[int, _Ring] = {}  # by priority; none is empty
        self._heap: list[tuple[float, int]] = []  # one entry per ring: urgency, as it was, and priority
        self._entered: set[int] = set()  # priorities in the heap, also such with which nobody waits any more

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[Request]:
        """Roughly in the order in which they get slots; exactly, with one tenant and nobody coming."""
        rings = [(self._urgency(priority), ring) for priority, ring in self._rings.items()]
        return chain.from_iterable(ring for _, ring in sorted(rings, key=lambda each: each[0]))

    @property
    def oldest(self) -> Iterator[Request]:
        """Of each priority who has waited longest."""
        return (ring.oldest for ring in self._rings.values())

    def add(self, request: Request) -> None:
        """Behind the others of its tenant."""
        self._ring_of(request).add(request)
        self._requests[request.request_id] = request

    def put_back(self, request: Request) -> None:
        """A request that ran and must go on: before the others of its tenant."""
        self._ring_of(request).put_back(request)
        self._requests[request.request_id] = request

    def remove(self, request_id: str) -> Request | None:
        """Takes it out, wherever it is. None if it does not wait."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._rings[request.options.priority].remove(request)
            self._forget_if_empty(request.options.priority)
        return request

    def peek(self) -> Request:
        """Whose turn it is. There must be somebody."""
        return self._next_ring().peek()

    def pop(self, now: float) -> Request:
        """Takes out whose turn it is."""
        request = self._next_ring().pop(now)
        del self._requests[request.request_id]
        self._forget_if_empty(request.options.priority)
        return request

    def charge(self, request: Request, num_tokens: int) -> None:
        """Tokens that were generated for a request that is over; only matters while its tenant waits for more."""
        ring = self._rings.get(request.options.priority)
        if ring is not None:
            ring.charge(request.options.tenant, num_tokens)

    def check(self) -> None:
        """Asserts that everybody waits in exactly one place."""
        listed = [request.request_id for ring in self._rings.values() for request in ring]
        assert sorted(listed) == sorted(self._requests), "a request waits twice, or nowhere"
        assert all(self._rings.values()), "a priority with which nobody waits"
        assert sorted(priority for _, priority in self._heap) == sorted(self._entered), "a priority is entered twice"
        assert self._rings.keys() <= self._entered, "a priority is not in the heap"
        assert len(self._heap) <= 2 * len(self._rings) + _MANY, "priorities of those who left are kept"
        for ring in self._rings.values():
            ring.check()

    def _ring_of(self, request: Request) -> "_Ring":
        priority = request.options.priority
        if priority not in self._rings:
            self._rings[priority] = _Ring()
            if priority not in self._entered:
                self._entered.add(priority)
                heapq.heappush(self._heap, (self._ageing * priority + request.queue_time, priority))
        return self._rings[priority]

    def _forget_if_empty(self, priority: int) -> None:
        if not self._rings[priority]:
            del self._rings[priority]
            if len(self._heap) > 2 * len(self._rings) + _MANY:
                self._heap = [(self._urgency(each), each) for each in self._rings]
                heapq.heapify(self._heap)
                self._entered = set(self._rings)

    def _next_ring(self) -> "_Ring":
        """The most urgent one. A ring only becomes less urgent, so that an entry that is out of date comes up early."""
        while True:
            urgency, priority = self._heap[0]
            if priority not in self._rings:
                heapq.heappop(self._heap)
                self._entered.remove(priority)
            elif urgency < self._urgency(priority):
                heapq.heapreplace(self._heap, (self._urgency(priority), priority))
            else:
                return self._rings[priority]

    def _urgency(self, priority: int) -> float:
        return self._ageing * priority + self._rings[priority].waiting_since


class _Line:
    """One tenant's requests of one priority, and its credit in tokens as of a round."""

    def __init__(self, place: int, round_number: int) -> None:
        self.requests: OrderedDict[str, Request] = OrderedDict()
        self.place = place  # in the ring: who came first is first in every round
        self.credit = 0
        self.round = round_number
        self.entry: int | None = None  # the turn that the ring's heap knows

    @property
    def head(self) -> Request:
        return next(iter(self.requests.values()))

    @property
    def turn(self) -> int:
        """The round in which the credit covers the first request."""
        return self.round + max(0, -((self.credit - _cost(self.head)) // QUANTUM))

    def pay(self, num_tokens: int, round_number: int) -> None:
        self.credit += (round_number - self.round) * QUANTUM - num_tokens
        self.round = round_number


class _Ring:
    """The tenants that wait with one priority."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._by_age: OrderedDict[str, Request] = OrderedDict()
        self._places = count()
        self._round = 0
        self._last_served = -math.inf
        self._heap: list[tuple[int, int, str]] = []  # turn, place, tenant; of a line's entries only its `entry` counts

    def __len__(self) -> int:
        return len(self._by_age)

    def __iter__(self) -> Iterator[Request]:
        lines = [line.requests.values() for line in self._lines.values()]
        return (request for row in zip_longest(*lines) for request in row if request is not None)

    @property
    def oldest(self) -> Request:
        return next(iter(self._by_age.values()))

    @property
    def waiting_since(self) -> float:
        """Somebody has waited since then, and nobody was served."""
        return max(self.oldest.queue_time, self._last_served)

    def add(self, request: Request) -> None:
        self._append(request)
        self._enter(request.options.tenant)

    def put_back(self, request: Request) -> None:
        self._append(request)
        self._lines[request.options.tenant].requests.move_to_end(request.request_id, last=False)
        self._enter(request.options.tenant)

    def remove(self, request: Request) -> None:
        tenant = request.options.tenant
        line = self._lines[tenant]
        del line.requests[request.request_id]
        del self._by_age[request.request_id]
        if line.requests:
            self._enter(tenant)
        else:
            del self._lines[tenant]  # credit and debts are forgotten: who is not in line has no claim on the past
            self._forget_old_entries()

    def peek(self) -> Request:
        return self._lines[self._next_tenant()].head

    def pop(self, now: float) -> Request:
        line = self._lines[self._next_tenant()]
        request = line.head
        self._round = max(self._round, line.turn)  # who pays nothing may have had a turn long ago
        self._last_served = now
        line.pay(_cost(request), self._round)
        self.remove(request)
        return request

    def charge(self, tenant: str, num_tokens: int) -> None:
        line = self._lines.get(tenant)
        if line is not None:
            line.pay(num_tokens, self._round)

    def check(self) -> None:
        assert sum(len(line.requests) for line in self._lines.values()) == len(self._by_age), "a line and the ages"
        assert all(line.requests for line in self._lines.values()), "a line without requests"
        entries = {(line.entry, line.place, tenant) for tenant, line in self._lines.items()}
        assert entries <= set(self._heap), "a tenant has no turn"
        assert len(self._heap) <= 2 * len(self._lines) + _MANY, "tenants who left are kept"

    def _append(self, request: Request) -> None:
        tenant = request.options.tenant
        if tenant not in self._lines:
            self._lines[tenant] = _Line(next(self._places), self._round)
        self._lines[tenant].requests[request.request_id] = request
        self._by_age[request.request_id] = request

    def _enter(self, tenant: str) -> None:
        """Tells the heap of a turn that it does not know, or knows as a later one."""
        line = self._lines[tenant]
        if line.entry is None or line.turn < line.entry:
            self._forget_old_entries()
            line.entry = line.turn
            heapq.heappush(self._heap, (line.turn, line.place, tenant))

    def _forget_old_entries(self) -> None:
        if len(self._heap) >= 2 * len(self._lines) + _MANY:
            current = [(line.entry, line.place, tenant) for tenant, line in self._lines.items()]
            self._heap = [(turn, place, tenant) for turn, place, tenant in current if turn is not None]
            heapq.heapify(self._heap)

    def _next_tenant(self) -> str:
        while True:
            turn, place, tenant = self._heap[0]
            line = self._lines.get(tenant)
            if line is None or line.place != place or line.entry != turn:
                heapq.heappop(self._heap)  # it left, or has an earlier entry
            elif turn < line.turn:
                line.entry = line.turn  # it was charged, or has a longer request before the others now
                heapq.heapreplace(self._heap, (line.turn, place, tenant))
            else:
                return tenant


def _cost(request: Request) -> int:
    """Tokens to pay for the start of a request; one that comes back has paid."""
    return 0 if request.num_preemptions else request.num_prompt_tokens
