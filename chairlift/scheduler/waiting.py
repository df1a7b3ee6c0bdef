"""The waiting room: who is let in, who has to leave for that, in what order the others do, and who has stayed too long.

It has a number of places. Where all are taken, a newcomer gets the place of whoever would be served last, if that one
would be served after it; and no tenant has more than its share of the places.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from weakref import ref

from chairlift.errors import QueueFull, QueueTimeout
from chairlift.params import FinishReason
from chairlift.scheduler.plan import TokenEvent
from chairlift.scheduler.queue import WaitingQueue
from chairlift.scheduler.request import Group, Request, RequestState

_MAX_DEAD = 1000  # deadlines of requests that are over, before they are thrown away
_NUM_GAPS = 64
_MIN_WAIT_S, _MAX_WAIT_S = 1.0, 600.0


class WaitingRoom:
    """Requests that have no slot. Keeps deadlines of those that have one, too."""

    def __init__(
        self, priority_ageing: float, queue_timeout: float | None, max_size: int, clock: Callable[[], float]
    ) -> None:
        self._queue = WaitingQueue(priority_ageing)
        self._queue_timeout = queue_timeout
        self._max_size = max_size
        self._clock = clock
        self._deadlines = _Deadlines()
        self._pace = _Pace()
        self._since = 0.0  # since when somebody has been waiting, if somebody is
        self.num_preemptions = 0  # requests that were put back, each time

    def __len__(self) -> int:
        return len(self._queue)

    def find(self, request_id: str) -> RequestState | None:
        """None if nobody of that name waits."""
        return self._queue.find(request_id)

    def __iter__(self) -> Iterator[RequestState]:
        """Roughly in the order in which they get slots."""
        return iter(self._queue)

    def can_take(self, requests: Sequence[Request], num_places: int) -> bool:
        """Whether they may come in without anybody leaving for them, if `num_places` can start to run at once."""
        return len(requests) <= self._num_free(num_places) and self._crowding(requests, num_places) is None

    def add(self, requests: Sequence[Request], num_places: int, num_running: int) -> list[TokenEvent]:
        """Lets them in, all or none. Returns the ends of those who leave for them; `QueueFull` if nobody has to."""
        now = self._clock()
        if (crowding := self._crowding(requests, num_places)) is not None:
            raise crowding
        displaced = self._find_displaced(requests, num_places, now)
        events = [self._displace(request, now) for request in displaced]
        group = Group()
        for request in requests:
            state = RequestState(request, now)
            state.group = group
            self._note_wait(now)
            self._queue.add(state)
            num_alive = len(self._queue) + num_running
            if state.options.timeout is not None:
                self._deadlines.add(now + state.options.timeout, state, num_alive)
            if self._queue_timeout is not None:
                self._deadlines.add(now + self._queue_timeout, state, num_alive, is_for_waiting=True)
        return events

    def put_back(self, request: RequestState) -> None:
        """A request that had to leave its slot waits again, before the others of its tenant."""
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.queue_time = self._clock()
        self._note_wait(request.queue_time)
        self._queue.put_back(request)

    def peek(self) -> RequestState:
        """Whose turn it is. There must be somebody."""
        return self._queue.peek()

    def pop(self) -> RequestState:
        """Whose turn it is gets a slot now."""
        now = self._clock()
        request = self._queue.pop(now)
        request.start(now)
        self._pace.note(request.queue_time, now)
        return request

    def remove(self, request_id: str) -> None:
        """Takes out somebody who will not get a slot, if anybody of that name waits."""
        self._queue.remove(request_id)

    def pop_overdue(self) -> RequestState | None:
        """Somebody who waits or runs for too long, and now waits no more. None if there is nobody (any more)."""
        request = self._deadlines.pop_passed(self._clock())
        if request is not None:
            self._queue.remove(request.request_id)
        return request

    def time_out(self, request: RequestState) -> TokenEvent:
        """The end of an overdue request that never had a slot."""
        message = f"no slot was free within {self._clock() - request.queue_time:.1f} s; try again later"
        return _turn_away(request, QueueTimeout(message, self.estimate_wait()))

    def charge(self, request: RequestState) -> None:
        """Counts what was generated for a request that is over, for its tenant's next turn."""
        self._queue.charge(request, request.num_output_tokens)

    def estimate_wait(self) -> float:
        """Seconds until those that wait now will have got slots, by the rate at which requests lately did."""
        return self._wait_for(len(self._queue), self._clock())

    def check(self) -> None:
        """Asserts that everybody waits in one place, and has no slot."""
        self._queue.check()
        assert all(request.slot is None and request.num_computed == 0 for request in self._queue)
        assert all(request.finish_reason is None for request in self._queue), "a request that is over waits"

    def _num_free(self, num_places: int) -> int:
        return self._max_size + num_places - len(self._queue)

    def _crowding(self, requests: Sequence[Request], num_places: int) -> QueueFull | None:
        """The error if, with them, a tenant would have more than its share of the queue."""
        limited = [request.options for request in requests if request.options.queue_share < 1.0]
        for tenant, num_new in Counter(options.tenant for options in limited).items():
            share = min(options.queue_share for options in limited if options.tenant == tenant)
            most = max(1, int(share * self._max_size))
            num_missing = self._queue.num_of(tenant) + num_new - most - num_places
            if most < self._max_size and num_missing > 0:
                message = f"your share of the waiting queue is full ({most} of {self._max_size} requests)"
                return QueueFull(f"{message}; try again later", self._wait_for(num_missing, self._clock()))
        return None

    def _find_displaced(self, requests: Sequence[Request], num_places: int, now: float) -> list[RequestState]:
        """Who has to leave so that they find places; `QueueFull` if those who would be served later are too few."""
        num_missing = len(requests) - self._num_free(num_places)
        if num_missing <= 0:
            return []
        displaced: list[RequestState] = []
        for group in self._queue.later_than(requests, now):
            displaced += group
            if len(displaced) >= min(num_missing, len(requests)):  # requests put back may fill more than the places
                return displaced
        raise QueueFull(f"{self._full}; try again later", self._wait_for(num_missing, now))

    def _displace(self, request: RequestState, now: float) -> TokenEvent:
        self._queue.remove(request.request_id)
        message = f"{self._full}, and a request that is served before this one took its place; try again later"
        return _turn_away(request, QueueFull(message, self._wait_for(len(self._queue), now)))

    @property
    def _full(self) -> str:
        return f"the waiting queue is full ({self._max_size} requests)"

    def _wait_for(self, num_places: int, now: float) -> float:
        return self._pace.wait_for(num_places, self._since if self._queue else now, now)

    def _note_wait(self, now: float) -> None:
        """Somebody is about to come to the queue."""
        if not self._queue:
            self._since = now


def _turn_away(request: RequestState, error: QueueFull | QueueTimeout) -> TokenEvent:
    """The end of a request that never had a slot and is no longer in the queue."""
    request.finish_reason = FinishReason.ABORT
    name, reason = request.request_id, request.stop_reason
    return TokenEvent(name, [], FinishReason.ABORT, reason, error=str(error), rejection=error)


@dataclass(frozen=True, slots=True)
class _Deadline:
    """When a request must have its first slot, or must have ended. Keeps no ended request in memory."""

    request: ref[RequestState]
    is_for_waiting: bool

    @property
    def subject(self) -> RequestState | None:
        """None if the request is over, or has its slot in time."""
        request = self.request()
        if request is None or request.finish_reason is not None:
            return None
        return None if self.is_for_waiting and request.admission_time is not None else request


class _Deadlines:
    """Deadlines in order. Adding or taking one costs the logarithm of their number."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, _Deadline]] = []
        self._serials = count()

    def add(self, time: float, request: RequestState, num_alive: int, *, is_for_waiting: bool = False) -> None:
        """`num_alive`: requests that are not over; the deadlines of others are thrown away now and then."""
        if len(self._heap) > 4 * num_alive + _MAX_DEAD:
            self._heap = [entry for entry in self._heap if entry[2].subject is not None]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (time, next(self._serials), _Deadline(ref(request), is_for_waiting)))

    def pop_passed(self, now: float) -> RequestState | None:
        """The request with the earliest deadline that has passed and still means something. None if there is none."""
        while self._heap and self._heap[0][0] <= now:
            _, _, deadline = heapq.heappop(self._heap)
            if (request := deadline.subject) is not None:
                return request
        return None


class _Pace:
    """The time from one request that gets a slot to the next, as long as somebody waits for it."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_NUM_GAPS)
        self._last: float | None = None  # when a request got a slot

    def note(self, since: float, now: float) -> None:
        """A request that has waited since then gets a slot. Time that passed before it came does not count."""
        if self._last is not None and since <= self._last:
            self._seconds.append(now - self._last)
        self._last = now

    def wait_for(self, num_places: int, since: float, now: float) -> float:
        """Seconds until about so many requests more will have got slots, between a second and ten minutes.

        `since`: when the wait of those in the queue began. A queue that stands still counts as slower the longer it
        does.
        """
        standing = now - since if self._last is None else now - max(since, self._last)
        seconds_each = (sum(self._seconds) + standing) / (len(self._seconds) + 1)
        return min(max(num_places * seconds_each, _MIN_WAIT_S), _MAX_WAIT_S)
