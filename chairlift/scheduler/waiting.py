"""The waiting queue: its capacity, which request a new one displaces, and deadlines.

If the queue is full, a new request displaces the one that would be served last, if that one would be served after it.
No tenant fills more than its share of the queue.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from weakref import ref

from chairlift.errors import QueueFull, QueueTimeout
from chairlift.params import FinishReason
from chairlift.scheduler.events import TokenEvent
from chairlift.scheduler.fair_queue import FairQueue, LazyHeap
from chairlift.scheduler.request import Group, Request, RequestState

_NUM_STARTS = 64
_MIN_WAIT_S, _MAX_WAIT_S = 1.0, 600.0


@dataclass(frozen=True, slots=True)
class Policy:
    """How requests share the engine; each field is the engine setting of the same name."""

    enable_prefix_caching: bool = True
    preempt_after: int | None = None  # tokens generated before a request may be preempted; None: it never is
    preempt_levels: int = 1  # of priority by which a request must be above the one that it preempts
    queue_timeout: float | None = None  # seconds to wait for a slot


DEFAULT_POLICY = Policy()


class WaitingQueue(FairQueue):
    """Requests without a slot. Keeps the deadlines of running requests, too."""

    def __init__(self, max_size: int, policy: Policy, clock: Callable[[], float]) -> None:
        super().__init__()
        self._max_size = max_size
        self._policy = policy
        self._clock = clock
        self._deadlines = LazyHeap[_Deadline](lambda deadline: deadline.time if deadline.subject is not None else None)
        self._starts: deque[float] = deque(maxlen=_NUM_STARTS)  # when the queue began to fill; when slots were given
        self.num_preemptions = 0

    def can_take(self, requests: Sequence[Request], num_places: int) -> bool:
        """Whether these would displace no request, if `num_places` requests can start to run at once."""
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
            self._queue(state, now)
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
        self._queue(request, request.queue_time, is_first=True)

    def start_next(self) -> RequestState:
        """Takes out the next request, which gets a slot now."""
        now = self._clock()
        request = self.pop(now)
        request.start(now)
        self._starts.append(now)
        return request

    def choose_victim(self, running: Iterable[RequestState]) -> RequestState | None:
        """The running request to preempt for the next waiting one; None if the policy allows none.

        Candidates have generated `preempt_after` tokens since they got a slot, and are at least `preempt_levels` below
        the next request's priority. Of these, it is the first with the lowest priority.
        None also while a request that was preempted has launches in flight.
        """
        preempt_after = self._policy.preempt_after
        if preempt_after is None:
            return None
        victim, lowest = None, self.peek().options.priority + self._policy.preempt_levels - 1
        for request in running:
            if request.is_yielding:
                return None
            if (
                request.options.priority > lowest
                and len(request.token_ids) - request.num_tokens_placed >= preempt_after
            ):
                victim, lowest = request, request.options.priority
        return victim

    @staticmethod
    def choose_last(running: Sequence[RequestState]) -> RequestState | None:
        """The request to preempt if memory is short: the last one of the lowest priority, but never the first of all.

        None if there is no other, or while a request that was preempted has launches in flight.
        """
        others = running[1:]
        if not others or any(request.is_yielding for request in running):
            return None
        return max(reversed(others), key=lambda request: request.options.priority)

    def take_overdue(self) -> RequestState | None:
        """Takes out a request whose deadline has passed, which must be ended at once. None if there is none."""
        deadline = self._deadlines.first()
        if deadline is None or deadline.time > self._clock() or (request := deadline.subject) is None:
            return None
        self.remove(request.request_id)
        return request

    def time_out(self, request: RequestState) -> TokenEvent:
        """The end of an overdue request that never had a slot."""
        now = self._clock()
        message = f"no slot was free within {now - request.queue_time:.1f} s; try again later"
        return _turn_away(request, QueueTimeout(message, self._wait_for(len(self), now)))

    def check(self) -> None:
        """Asserts that every request waits in exactly one place, and has no slot."""
        super().check()
        assert all(request.slot is None and request.num_computed == 0 for request in self)
        assert all(request.finish_reason is None for request in self), "a request that is over waits"

    def _queue(self, request: RequestState, now: float, *, is_first: bool = False) -> None:
        if not len(self):
            self._starts.clear()
            self._starts.append(now)
        self.push(request, is_first=is_first)

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
            num_missing = self.num_of(tenant) + num_new - most - num_places
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
        for group in self.later_than(requests, now):
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
    """When a request must have its first slot, or must have ended. Its weak reference keeps no request in memory."""

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
