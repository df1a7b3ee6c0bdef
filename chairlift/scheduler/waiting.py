"""The waiting queue: its capacity, whom a new request displaces, and deadlines. The order is a `RequestQueue`.

If the queue is full, a new request displaces the one that would be served last, if that one would be served after it.
No tenant fills more than its share of the queue.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from weakref import ref

from chairlift.errors import QueueFull, QueueTimeout
from chairlift.params import FinishReason
from chairlift.scheduler.events import TokenEvent
from chairlift.scheduler.lazy_heap import LazyHeap
from chairlift.scheduler.request import Group, Request, RequestState
from chairlift.scheduler.request_queue import RequestQueue

_NUM_STARTS = 64
_MIN_WAIT_S, _MAX_WAIT_S = 1.0, 600.0


@dataclass(frozen=True, slots=True)
class Policy:
    """Says how requests share the engine; each field is the engine setting of the same name."""

    enable_prefix_caching: bool = True
    preempt_after: int | None = None  # tokens generated before a request may be preempted; None: it never is
    preempt_levels: int = 1  # of priority by which a request must be above the one that it preempts
    queue_timeout: float | None = None  # seconds to wait for a slot


DEFAULT_POLICY = Policy()


class WaitingQueue:
    """Requests without a slot. Keeps the deadlines of running requests, too."""

    def __init__(self, queue: RequestQueue, max_size: int, policy: Policy, clock: Callable[[], float]) -> None:
        """`queue`: empty; keeps the requests in their order. `max_size`: requests that may wait."""
        self._queue = queue
        self._requests: dict[str, RequestState] = {}  # those in the queue, by id
        self._num_by_tenant: Counter[str] = Counter()
        self._max_size = max_size
        self._policy = policy
        self._clock = clock
        self._deadlines = LazyHeap[_Deadline](lambda deadline: deadline.time if deadline.subject is not None else None)
        self._starts: deque[float] = deque(maxlen=_NUM_STARTS)  # when the queue began to fill; when slots were given
        self.num_preemptions = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestState]:
        """Iterates roughly in the order of service."""
        return iter(self._queue)

    def find(self, request_id: str) -> RequestState | None:
        """Returns the waiting request with that id; None if there is none."""
        return self._requests.get(request_id)

    def peek(self) -> RequestState:
        """Returns the next request. There must be one."""
        return self._queue.peek()

    def has_room_for(self, requests: Sequence[Request], num_places: int) -> bool:
        """Returns true if these would displace no request, where `num_places` requests can start to run at once."""
        return len(requests) <= self._num_free(num_places) and self._share_error(requests, num_places) is None

    def add(self, requests: Sequence[Request], num_places: int) -> list[TokenEvent]:
        """Queues all of these and returns the ends of those that they displace; or queues none (`QueueFull`)."""
        now = self._clock()
        if (error := self._share_error(requests, num_places)) is not None:
            raise error
        events = [self._displace(request, now) for request in self._find_displaced(requests, num_places, now)]
        group = Group()
        for request in requests:
            state = RequestState(request, now, group)
            self._push(state, now)
            if state.options.timeout is not None:
                self._add_deadline(now + state.options.timeout, state)
            if self._policy.queue_timeout is not None:
                self._add_deadline(now + self._policy.queue_timeout, state, is_for_waiting=True)
        return events

    def put_back(self, request: RequestState) -> None:
        """Queues a preempted request, ahead of the others of its tenant."""
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.queue_time = self._clock()
        self._push(request, request.queue_time, is_first=True)

    def start_next(self) -> RequestState:
        """Removes the next request, which gets a slot now, and returns it."""
        now = self._clock()
        request = self._queue.pop(now)
        self._forget(request)
        request.start(now)
        self._starts.append(now)
        return request

    def remove(self, request_id: str) -> None:
        """Removes a request that gets no slot, if it waits."""
        request = self._requests.get(request_id)
        if request is not None:
            self._queue.remove(request)
            self._forget(request)

    def charge(self, request: RequestState) -> None:
        """Tells the queue's order what a request has generated until it ended."""
        self._queue.charge(request)

    def pop_overdue(self) -> RequestState | None:
        """Returns a request whose deadline has passed, and which must be ended at once. It waits no longer.

        None if there is none.
        """
        deadline = self._deadlines.first()
        if deadline is None or deadline.time > self._clock() or (request := deadline.subject) is None:
            return None
        self.remove(request.request_id)
        return request

    def time_out(self, request: RequestState) -> TokenEvent:
        """Ends an overdue request that never had a slot."""
        now = self._clock()
        message = f"no slot was free within {now - request.queue_time:.1f} s; try again later"
        return _turn_away(request, QueueTimeout(message, self._wait_for(len(self), now)))

    def check(self) -> None:
        """Asserts that every request waits in exactly one place, and has no slot."""
        self._queue.check()
        waiting = [request.request_id for request in self]
        assert sorted(waiting) == sorted(self._requests), "a request waits twice, or nowhere"
        tenants = Counter(request.options.tenant for request in self)
        assert tenants == self._num_by_tenant, "a tenant's requests are miscounted"
        assert all(request.slot is None and request.num_computed == 0 for request in self)
        assert all(request.finish_reason is None for request in self), "a request that is over waits"

    def _push(self, request: RequestState, now: float, *, is_first: bool = False) -> None:
        if not self._requests:
            self._starts.clear()
            self._starts.append(now)
        self._queue.push(request, is_first=is_first)
        self._requests[request.request_id] = request
        self._num_by_tenant[request.options.tenant] += 1

    def _forget(self, request: RequestState) -> None:
        """Drops a request that has left the queue."""
        del self._requests[request.request_id]
        tenant = request.options.tenant
        self._num_by_tenant[tenant] -= 1
        if not self._num_by_tenant[tenant]:
            del self._num_by_tenant[tenant]

    def _add_deadline(self, time: float, request: RequestState, *, is_for_waiting: bool = False) -> None:
        self._deadlines.push(time, _Deadline(time, ref(request), is_for_waiting))

    def _num_free(self, num_places: int) -> int:
        return self._max_size + num_places - len(self)

    def _share_error(self, requests: Sequence[Request], num_places: int) -> QueueFull | None:
        """`QueueFull` if these would give a tenant more than its share of the queue, else None."""
        limited = [request.options for request in requests if request.options.queue_share < 1.0]
        for tenant, num_new in Counter(options.tenant for options in limited).items():
            share = min(options.queue_share for options in limited if options.tenant == tenant)
            most = max(1, int(share * self._max_size))
            num_missing = self._num_by_tenant.get(tenant, 0) + num_new - most - num_places
            if most < self._max_size and num_missing > 0:
                message = f"your share of the waiting queue is full ({most} of {self._max_size} requests)"
                return QueueFull(f"{message}; try again later", self._wait_for(num_missing, self._clock()))
        return None

    def _find_displaced(self, requests: Sequence[Request], num_places: int, now: float) -> list[RequestState]:
        """The requests that these would displace; `QueueFull` if too few would be served later than these."""
        num_missing = len(requests) - self._num_free(num_places)
        if num_missing <= 0:
            return []
        displaced: list[RequestState] = []
        for group in self._queue.later_than(requests, now):
            displaced += group
            if len(displaced) >= min(num_missing, len(requests)):  # preempted requests may exceed the capacity
                return displaced
        raise QueueFull(f"{self._full}; try again later", self._wait_for(num_missing, now))

    def _displace(self, request: RequestState, now: float) -> TokenEvent:
        self.remove(request.request_id)
        message = f"{self._full}, and a request of higher precedence displaced this one; try again later"
        return _turn_away(request, QueueFull(message, self._wait_for(len(self), now)))

    @property
    def _full(self) -> str:
        return f"the waiting queue is full ({self._max_size} requests)"

    def _wait_for(self, num_places: int, now: float) -> float:
        """Expected seconds until `num_places` requests get slots, by the rate since the queue was empty, or lately.

        The longer no request gets a slot, the slower the queue counts.
        """
        seconds_each = (now - self._starts[0]) / max(1, len(self._starts) - 1) if len(self) else 0.0
        return min(max(num_places * seconds_each, _MIN_WAIT_S), _MAX_WAIT_S)


def _turn_away(request: RequestState, error: QueueFull | QueueTimeout) -> TokenEvent:
    """The end of a request that never had a slot and is no longer in the queue."""
    request.finish_reason = FinishReason.ABORT
    name, reason = request.request_id, request.stop_reason
    return TokenEvent(name, [], FinishReason.ABORT, reason, error=str(error), rejection=error)


@dataclass(frozen=True, slots=True)
class _Deadline:
    """Says when a request must have its first slot, or must have ended. Its weak reference keeps none in memory."""

    time: float
    request: ref[RequestState]
    is_for_waiting: bool

    @property
    def subject(self) -> RequestState | None:
        """The request; None if it has ended, or got its slot in time."""
        request = self.request()
        if request is None or request.finish_reason is not None:
            return None
        return None if self.is_for_waiting and request.admission_time is not None else request
