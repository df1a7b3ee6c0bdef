"""The order in which waiting requests get slots: priorities with ageing, and within a priority tenants in turn.

- A lower `priority` comes first, but waiting offsets it: a level's urgency is `AGEING_S * priority + since`, where
  `since` is when its first request began to wait or, if that was later, when it was last served. So each level gets a
  slot every `AGEING_S` seconds per step of priority, and a long backlog below delays no request above.
- Within a level each tenant has a counter of the tokens that it was served, and the lowest counter is next: virtual
  token counters (Sheng et al., "Fairness in Serving Large Language Models", 2024). A prompt counts when it starts,
  generated tokens when their request ends. A new tenant begins at the counter of the one served last, so that none
  saves up turns. A tenant alone is served in the order of arrival.

Every operation takes at most logarithmic time in the numbers of tenants and levels, however many requests wait, except
for `later_than`, which looks at all tenants of a level.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain, count, groupby, takewhile, zip_longest
from operator import itemgetter
from typing import NamedTuple

from chairlift.scheduler.lazy_heap import LazyHeap
from chairlift.scheduler.request import Request, RequestState

AGEING_S = 30.0
"""Seconds without service that are worth one level of priority."""


class FairQueue:
    """A `RequestQueue` that is fair to tenants, which are named by `options.tenant`."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}  # by priority; none is empty
        self._by_urgency = LazyHeap[_Level](lambda level: level.urgency if level.tenants else None)

    def __iter__(self) -> Iterator[RequestState]:
        """Iterates roughly in the order of service; exactly so with one tenant and no new requests."""
        levels = sorted(self._levels.values(), key=lambda level: level.urgency)
        return chain.from_iterable(levels)

    def push(self, request: RequestState, *, is_first: bool = False) -> None:
        """Queues a request after the others of its tenant, or before them (`is_first`) if it was preempted."""
        priority = request.options.priority
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level(priority, request.queue_time)
            self._by_urgency.push(level.urgency, level)
        level.push(request, is_first)

    def peek(self) -> RequestState:
        """Returns the next request. There must be one."""
        level = self._by_urgency.first()
        assert level is not None, "no request waits"
        return level.next_tenant().head

    def pop(self, now: float) -> RequestState:
        """Removes the next request and returns it; charges its prompt to its tenant."""
        request = self.peek()
        self._levels[request.options.priority].serve(request, now)
        self.remove(request)
        return request

    def remove(self, request: RequestState) -> None:
        """Removes a request, which must be in the queue."""
        priority = request.options.priority
        self._levels[priority].remove(request)
        if not self._levels[priority].tenants:
            del self._levels[priority]

    def charge(self, request: RequestState) -> None:
        """Charges what an ended request generated to its tenant, if that has others of this priority in the queue."""
        level = self._levels.get(request.options.priority)
        if level is not None:
            level.charge(request.options.tenant, request.num_output_tokens)

    def later_than(self, newcomers: Sequence[Request], now: float) -> Iterator[list[RequestState]]:
        """Iterates over groups as `RequestQueue` says.

        If newcomers differ, the lowest of their priorities counts, with the prompts of all.
        """
        newcomer = max(newcomers, key=lambda each: each.options.priority)
        own = newcomer.options.priority
        for priority in sorted((each for each in self._levels if each >= own), reverse=True):
            level = self._levels[priority]
            if priority == own:
                num_before = sum(len(each.prompt_token_ids) for each in newcomers[:-1])
                yield from level.later_than(level.tag_behind(newcomer.options.tenant, num_before))
                continue
            # Serving a level restarts the wait of its other requests, so ageing may save only the next one.
            saved = level.next_tenant().head if level.urgency <= AGEING_S * own + now else None
            yield from (group for group in level.later_than(_FIRST) if saved not in group)

    def check(self) -> None:
        """Asserts that levels and tenants know their requests, what these cost, and which is next."""
        for level in self._levels.values():
            level.check()


class _StartTag(NamedTuple):
    """A request's order within its level: the smaller, the earlier."""

    counter: float
    place: float  # of the tenant, in order of arrival: breaks ties


_FIRST = _StartTag(-math.inf, 0.0)
"""Before all others."""


class _Tenant:
    """One tenant's requests of one priority, in their order."""

    def __init__(self, place: int, counter: int) -> None:
        self.requests: OrderedDict[str, RequestState] = OrderedDict()
        self.place = place
        self.counter = counter  # tokens that it was served, plus the level's counter when it came
        self.cost = 0  # of all its waiting requests

    @property
    def head(self) -> RequestState:
        return next(iter(self.requests.values()))

    @property
    def last_tag(self) -> _StartTag:
        """The tag of the last request."""
        last = next(reversed(self.requests.values()))
        return _StartTag(self.counter + self.cost - _cost(last), self.place)

    def from_last(self) -> Iterator[tuple[_StartTag, list[RequestState]]]:
        """Groups that have not had a slot, the last one first, each with the tag of its last request."""
        num_before = self.counter + self.cost
        for group, members in groupby(reversed(self.requests.values()), key=lambda each: each.group):
            if group.has_started:
                return  # and so have all groups of this tenant before it
            listed = list(members)
            yield _StartTag(num_before - _cost(listed[0]), self.place), listed
            num_before -= sum(map(_cost, listed))


class _Level:
    """The requests of one priority, by tenant."""

    def __init__(self, priority: int, since: float) -> None:
        self._priority = priority
        self._since = since  # requests have waited since then, and none was served
        self.tenants: dict[str, _Tenant] = {}  # each has requests
        self._by_counter = LazyHeap[_Tenant](lambda tenant: tenant.counter if tenant.requests else None)
        self._places = count()
        self._counter = 0  # of the tenant that was served last
        self._last_tag: _StartTag | None = None  # of all requests; None: not known

    def __iter__(self) -> Iterator[RequestState]:
        lines = [tenant.requests.values() for tenant in self.tenants.values()]
        return (request for row in zip_longest(*lines) for request in row if request is not None)

    @property
    def urgency(self) -> float:
        """The level's order: the lower, the earlier."""
        return AGEING_S * self._priority + self._since

    def next_tenant(self) -> _Tenant:
        tenant = self._by_counter.first()
        assert tenant is not None, "a level without requests"
        return tenant

    def push(self, request: RequestState, is_first: bool) -> None:
        tenant = self.tenants.get(request.options.tenant)
        if tenant is None:
            tenant = self.tenants[request.options.tenant] = _Tenant(next(self._places), self._counter)
            self._by_counter.push(tenant.counter, tenant)
        tenant.requests[request.request_id] = request
        if is_first:
            tenant.requests.move_to_end(request.request_id, last=False)
        tenant.cost += _cost(request)
        self._last_tag = None

    def serve(self, request: RequestState, now: float) -> None:
        """Counts a request that gets a slot now; `remove` must follow."""
        tenant = self.tenants[request.options.tenant]
        self._counter = max(self._counter, tenant.counter)
        tenant.counter += _cost(request)
        self._since = now

    def remove(self, request: RequestState) -> None:
        tenant = self.tenants[request.options.tenant]
        del tenant.requests[request.request_id]
        tenant.cost -= _cost(request)
        self._last_tag = None
        if not tenant.requests:
            del self.tenants[request.options.tenant]  # and its counter

    def charge(self, tenant: str, num_tokens: int) -> None:
        if tenant in self.tenants:
            self.tenants[tenant].counter += num_tokens
            self._last_tag = None

    def tag_behind(self, tenant: str, num_tokens: int) -> _StartTag:
        """The tag of a request added now, with `num_tokens` more tokens of its own tenant before it."""
        known = self.tenants.get(tenant)
        if known is None:
            return _StartTag(self._counter + num_tokens, math.inf)
        return _StartTag(known.counter + known.cost + num_tokens, known.place)

    def later_than(self, tag: _StartTag) -> Iterator[list[RequestState]]:
        """See `FairQueue.later_than`."""
        if self._last_tag is None:
            self._last_tag = max(tenant.last_tag for tenant in self.tenants.values())
        if self._last_tag <= tag:  # a quick check, so that a flood of refused requests costs little
            return iter(())
        lines = [tenant.from_last() for tenant in self.tenants.values()]
        merged = heapq.merge(*lines, key=itemgetter(0), reverse=True)
        return (group for _, group in takewhile(lambda each: each[0] > tag, merged))

    def check(self) -> None:
        assert self.tenants, "a level without requests"
        for tenant in self.tenants.values():
            assert tenant.requests, "a tenant without requests"
            assert tenant.cost == sum(map(_cost, tenant.requests.values())), "a tenant's cost"
        by_counter = min(self.tenants.values(), key=lambda tenant: (tenant.counter, tenant.place))
        assert self.next_tenant() is by_counter, "the heap does not know the next tenant"


def _cost(request: RequestState) -> int:
    """Tokens that are charged when a request starts; a preempted one was charged before."""
    return 0 if request.num_preemptions else request.num_prompt_tokens
