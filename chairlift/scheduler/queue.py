"""Who waits, and whose turn it is next: priorities with ageing, and among equals deficit round robin over tenants.

- A lower `priority` comes first. Waiting makes up for it: a priority's urgency is `ageing * priority + since`, where
  `since` is the later of its oldest request's arrival and its latest admission. So each gets a slot in `ageing` seconds
  per level, whatever comes above it, and a long backlog below holds up nobody. Until one of its requests is served the
  urgency is constant: nothing has to be recomputed as time goes by.
- Within a priority tenants take turns, counted in tokens: deficit round robin (Shreedhar and Varghese, 1995). In each
  round a tenant is credited with `QUANTUM` tokens; it may start a request when its credit covers the prompt, and what
  is generated for it is charged later. Rounds are computed rather than walked: a tenant's turn is the number of the
  round in which its credit suffices. With one tenant alone, requests are served in the order of arrival.

Every operation costs at most the logarithm of the numbers of tenants and priorities, however many requests wait, except
for `later_than`, which looks at all tenants of a priority.
"""

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain, count, groupby, zip_longest
from typing import NamedTuple

from chairlift.scheduler.request import Request, RequestState

QUANTUM = 128
"""Tokens of credit per tenant and round: a short prompt, or a piece of a long one."""

_MANY = 64  # dead entries of a heap, before they are thrown away


class WaitingQueue:
    """Requests that wait for a slot. Each carries its own `options.priority`, `options.tenant` and `queue_time`."""

    def __init__(self, ageing: float) -> None:
        """`ageing`: seconds without a slot that are worth one level of priority."""
        self._ageing = ageing
        self._requests: dict[str, RequestState] = {}
        self._num_by_tenant: Counter[str] = Counter()
        self._rings: dict[int, _Ring] = {}  # by priority; none is empty
        self._heap: list[tuple[float, int]] = []  # one entry per ring: urgency, as it was, and priority
        self._entered: set[int] = set()  # priorities in the heap, also those with which no request waits any more

    def __len__(self) -> int:
        return len(self._requests)

    def find(self, request_id: str) -> RequestState | None:
        """None if nobody of that name waits."""
        return self._requests.get(request_id)

    def __iter__(self) -> Iterator[RequestState]:
        """Roughly in the order in which they get slots; exactly, with one tenant and nobody coming."""
        rings = [(self._urgency(priority), ring) for priority, ring in self._rings.items()]
        return chain.from_iterable(ring for _, ring in sorted(rings, key=lambda each: each[0]))

    def num_of(self, tenant: str) -> int:
        """Requests of a tenant, whatever their priority."""
        return self._num_by_tenant.get(tenant, 0)

    def later_than(self, newcomers: Sequence[Request], now: float) -> Iterator[list[RequestState]]:
        """Groups of requests that would be served after these if they came now, the last one first.

        Groups of which a request has had a slot are left out. If newcomers differ, the lowest of their priorities
        counts, with the prompts of all. Not to be used any more once the queue has changed.
        """
        newcomer = max(newcomers, key=lambda each: each.options.priority)
        own = newcomer.options.priority
        priorities = [-each for each in self._rings if each >= own]
        heapq.heapify(priorities)
        while priorities:
            priority = -heapq.heappop(priorities)
            ring = self._rings[priority]
            if priority == own:
                num_tokens = sum(len(each.prompt_token_ids) for each in newcomers)
                yield from ring.later_than(ring.turn_behind(newcomer.options.tenant, num_tokens))
                continue
            # After each admission all others wait anew, so that only the next one's wait makes up for levels.
            aged = ring.peek() if self._urgency(priority) <= self._ageing * own + now else None
            yield from (group for group in ring.later_than(_FIRST) if aged not in group)

    def add(self, request: RequestState) -> None:
        """Behind the others of its tenant."""
        self._ring_of(request).add(request)
        self._note(request)

    def put_back(self, request: RequestState) -> None:
        """Before the others of its tenant: it ran and must go on."""
        self._ring_of(request).put_back(request)
        self._note(request)

    def remove(self, request_id: str) -> None:
        """Takes it out, wherever it is, if it waits."""
        request = self._requests.get(request_id)
        if request is not None:
            self._rings[request.options.priority].remove(request)
            self._forget(request)

    def peek(self) -> RequestState:
        """Whose turn it is. There must be somebody."""
        return self._next_ring().peek()

    def pop(self, now: float) -> RequestState:
        """Takes out whose turn it is."""
        request = self._next_ring().pop(now)
        self._forget(request)
        return request

    def charge(self, request: RequestState, num_tokens: int) -> None:
        """Charges its tenant for the tokens of a request that is over, if the tenant has others in the queue."""
        ring = self._rings.get(request.options.priority)
        if ring is not None:
            ring.charge(request.options.tenant, num_tokens)

    def check(self) -> None:
        """Asserts that every request waits in exactly one place."""
        listed = [request.request_id for ring in self._rings.values() for request in ring]
        assert sorted(listed) == sorted(self._requests), "a request waits twice, or nowhere"
        tenants = Counter(request.options.tenant for request in self._requests.values())
        assert dict(tenants) == dict(self._num_by_tenant), "a tenant's requests are miscounted"
        assert all(self._rings.values()), "a priority with which nobody waits"
        assert sorted(priority for _, priority in self._heap) == sorted(self._entered), "a priority is entered twice"
        assert self._rings.keys() <= self._entered, "a priority is not in the heap"
        assert len(self._heap) <= 2 * len(self._rings) + _MANY, "priorities of those who left are kept"
        for ring in self._rings.values():
            ring.check()

    def _ring_of(self, request: RequestState) -> "_Ring":
        priority = request.options.priority
        if priority not in self._rings:
            self._rings[priority] = _Ring()
            if priority not in self._entered:
                self._entered.add(priority)
                heapq.heappush(self._heap, (self._ageing * priority + request.queue_time, priority))
        return self._rings[priority]

    def _note(self, request: RequestState) -> None:
        self._requests[request.request_id] = request
        self._num_by_tenant[request.options.tenant] += 1

    def _forget(self, request: RequestState) -> None:
        """It is in no ring any more."""
        priority, tenant = request.options.priority, request.options.tenant
        del self._requests[request.request_id]
        self._num_by_tenant[tenant] -= 1
        if not self._num_by_tenant[tenant]:
            del self._num_by_tenant[tenant]
        if not self._rings[priority]:
            del self._rings[priority]
            if len(self._heap) > 2 * len(self._rings) + _MANY:
                self._heap = [(self._urgency(each), each) for each in self._rings]
                heapq.heapify(self._heap)
                self._entered = set(self._rings)

    def _next_ring(self) -> "_Ring":
        """The most urgent one. Rings only become less urgent, so that an entry that is out of date comes up early."""
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


class _Turn(NamedTuple):
    """When a request is served within its priority: the earlier, the smaller."""

    round: int
    place: float


_FIRST = _Turn(-1, 0.0)
"""Before all others."""


class _Line:
    """One tenant's requests of one priority, and its credit in tokens as of a round."""

    def __init__(self, place: int, round_number: int) -> None:
        self.requests: OrderedDict[str, RequestState] = OrderedDict()
        self.place = place  # in the ring: who came first is first in every round
        self.credit = 0
        self.cost = 0  # of all requests together
        self.round = round_number
        self.entry: int | None = None  # the turn that the ring's heap knows

    @property
    def head(self) -> RequestState:
        return next(iter(self.requests.values()))

    @property
    def turn(self) -> int:
        """The round in which the credit covers the first request."""
        return self.round_for(_cost(self.head))

    @property
    def last_turn(self) -> _Turn:
        """When the last request is served."""
        return _Turn(self.round_for(self.cost), self.place)

    def round_for(self, cost: int) -> int:
        """The round in which the credit covers so many tokens."""
        return self.round + max(0, -((self.credit - cost) // QUANTUM))

    def from_last(self) -> Iterator[tuple[list[RequestState], _Turn]]:
        """Groups that have not had a slot, the last one first; with the turn of the request before each."""
        cost = self.cost
        for group, members in groupby(reversed(self.requests.values()), key=lambda each: each.group):
            if group.has_started:
                return  # and so have all before it, of the same tenant
            listed = list(members)
            cost -= sum(map(_cost, listed))
            yield listed, _Turn(self.round_for(cost), self.place)

    def pay(self, num_tokens: int, round_number: int) -> None:
        self.credit += (round_number - self.round) * QUANTUM - num_tokens
        self.round = round_number


class _Ring:
    """The tenants that wait with one priority."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._by_age: OrderedDict[str, RequestState] = OrderedDict()
        self._places = count()
        self._round = 0
        self._last_served = -math.inf
        self._heap: list[tuple[int, int, str]] = []  # turn, place, tenant; of a line's entries only its `entry` counts
        self._last_turn: _Turn | None = None  # of all; None: to be looked for

    def __len__(self) -> int:
        return len(self._by_age)

    def __iter__(self) -> Iterator[RequestState]:
        lines = [line.requests.values() for line in self._lines.values()]
        return (request for row in zip_longest(*lines) for request in row if request is not None)

    @property
    def oldest(self) -> RequestState:
        return next(iter(self._by_age.values()))

    @property
    def waiting_since(self) -> float:
        """Somebody has waited since then, and nobody was served."""
        return max(self.oldest.queue_time, self._last_served)

    def turn_behind(self, tenant: str, cost: int) -> _Turn:
        """The turn of the last of some requests that would come now."""
        line = self._lines.get(tenant)
        if line is None:
            return _Turn(_Line(0, self._round).round_for(cost), math.inf)
        return _Turn(line.round_for(line.cost + cost), line.place)

    def later_than(self, turn: _Turn) -> Iterator[list[RequestState]]:
        """See `WaitingQueue.later_than`."""
        if self._last_turn is None:
            self._last_turn = max(line.last_turn for line in self._lines.values())
        if self._last_turn <= turn:  # found at once, so that a flood of refused requests costs little
            return
        lasts = ((line.last_turn, line) for line in self._lines.values())
        heap = [(-last.round, -last.place, line.from_last()) for last, line in lasts if last > turn]
        heapq.heapify(heap)
        while heap:
            *_, groups = heapq.heappop(heap)
            for group, before in groups:
                yield group
                if before > turn:
                    heapq.heappush(heap, (-before.round, -before.place, groups))
                break

    def add(self, request: RequestState) -> None:
        self._append(request)
        self._enter(request.options.tenant)

    def put_back(self, request: RequestState) -> None:
        self._append(request)
        self._lines[request.options.tenant].requests.move_to_end(request.request_id, last=False)
        self._enter(request.options.tenant)

    def remove(self, request: RequestState) -> None:
        tenant = request.options.tenant
        line = self._lines[tenant]
        del line.requests[request.request_id]
        del self._by_age[request.request_id]
        line.cost -= _cost(request)
        self._last_turn = None
        if line.requests:
            self._enter(tenant)
        else:
            del self._lines[tenant]  # with its credit and debts
            self._forget_old_entries()

    def peek(self) -> RequestState:
        return self._lines[self._next_tenant()].head

    def pop(self, now: float) -> RequestState:
        line = self._lines[self._next_tenant()]
        request = line.head
        self._round = max(self._round, line.turn)  # one that pays nothing may have had its turn long ago
        self._last_served = now
        line.pay(_cost(request), self._round)
        self.remove(request)
        return request

    def charge(self, tenant: str, num_tokens: int) -> None:
        line = self._lines.get(tenant)
        if line is not None:
            line.pay(num_tokens, self._round)
            self._last_turn = None

    def check(self) -> None:
        assert sum(len(line.requests) for line in self._lines.values()) == len(self._by_age), "a line and the ages"
        assert all(line.requests for line in self._lines.values()), "a line without requests"
        assert all(line.cost == sum(map(_cost, line.requests.values())) for line in self._lines.values()), "a cost"
        entries = {(line.entry, line.place, tenant) for tenant, line in self._lines.items()}
        assert entries <= set(self._heap), "a tenant has no turn"
        assert len(self._heap) <= 2 * len(self._lines) + _MANY, "tenants who left are kept"

    def _append(self, request: RequestState) -> None:
        tenant = request.options.tenant
        if tenant not in self._lines:
            self._lines[tenant] = _Line(next(self._places), self._round)
        line = self._lines[tenant]
        line.requests[request.request_id] = request
        line.cost += _cost(request)
        self._by_age[request.request_id] = request
        self._last_turn = None

    def _enter(self, tenant: str) -> None:
        """Enters a turn that the heap does not know, or knows as a later one."""
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


def _cost(request: RequestState) -> int:
    """Tokens to pay for the start of a request; one that comes back has paid."""
    return 0 if request.num_preemptions else request.num_prompt_tokens
