"""The waiting room: who is let in, in what order they leave it, and who has stayed too long."""

from collections.abc import Callable, Iterator, Sequence

from chairlift.errors import QueueFull
from chairlift.scheduler.deadlines import Deadline, Deadlines
from chairlift.scheduler.pace import Pace
from chairlift.scheduler.policy import Policy
from chairlift.scheduler.queue import WaitingQueue
from chairlift.scheduler.request import Request


class WaitingRoom:
    """Requests that have no slot. Keeps deadlines of those that have one, too."""

    def __init__(self, policy: Policy, max_size: int, clock: Callable[[], float]) -> None:
        self._queue = WaitingQueue(policy.priority_ageing)
        self._queue_timeout = policy.queue_timeout
        self._max_size = max_size
        self._clock = clock
        self._deadlines = Deadlines()
        self._pace = Pace()
        self.num_preemptions = 0  # requests that were put back, each time

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._queue

    def __iter__(self) -> Iterator[Request]:
        """Roughly in the order in which they get slots."""
        return iter(self._queue)

    def num_acceptable(self, num_places: int) -> int:
        """Requests that may come in, if so many can start to run at once."""
        return self._max_size + num_places - len(self._queue)

    def add(self, requests: Sequence[Request], num_places: int, num_running: int) -> None:
        """Lets them in, all or none. `QueueFull` if they are more than `num_acceptable`."""
        now = self._clock()
        num_missing = len(requests) - self.num_acceptable(num_places)
        if num_missing > 0:
            raise QueueFull(self._max_size, self._wait_for(num_missing, now))
        for request in requests:
            request.arrival_time = request.queue_time = now
            self._queue.add(request)
            self._set_deadlines(request, now, len(self._queue) + num_running)

    def put_back(self, request: Request) -> None:
        """A request that had to leave its slot waits again, before the others of its tenant."""
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.queue_time = self._clock()
        self._queue.put_back(request)

    def peek(self) -> Request:
        """Whose turn it is. There must be somebody."""
        return self._queue.peek()

    def pop(self) -> Request:
        """Whose turn it is gets a slot now."""
        now = self._clock()
        request = self._queue.pop(now)
        if request.admission_time is None:
            request.admission_time = now
        self._pace.note(request.queue_time, now)
        return request

    def remove(self, request_id: str) -> Request | None:
        """Takes out somebody who will not get a slot. None if nobody of that name waits."""
        return self._queue.remove(request_id)

    def pop_overdue(self) -> Request | None:
        """Somebody who waits or runs for longer than he may, and waits no more. None if there is nobody (any more)."""
        deadline = self._deadlines.pop_passed(self._clock())
        if deadline is None:
            return None
        self._queue.remove(deadline.request.request_id)
        return deadline.request

    def charge(self, request: Request, num_tokens: int) -> None:
        """Tokens that were generated for a request that is over, for its tenant's next turn."""
        self._queue.charge(request, num_tokens)

    def estimate_wait(self) -> float:
        """Seconds until those that wait now will have got slots, by the rate at which requests lately did."""
        return self._wait_for(len(self._queue), self._clock())

    def check(self) -> None:
        """Asserts that everybody waits in one place, and has no slot."""
        self._queue.check()
        assert all(request.slot is None and request.num_computed == 0 for request in self._queue)

    def _wait_for(self, num_places: int, now: float) -> float:
        since = min((request.queue_time for request in self._queue.oldest), default=now)
        return self._pace.wait_for(num_places, since, now)

    def _set_deadlines(self, request: Request, now: float, num_alive: int) -> None:
        if request.options.timeout is not None:
            self._deadlines.add(now + request.options.timeout, Deadline(request, is_for_waiting=False), num_alive)
        if self._queue_timeout is not None:
            self._deadlines.add(now + self._queue_timeout, Deadline(request, is_for_waiting=True), num_alive)
