"""Until when requests may wait, and run: a heap of times."""

import heapq
from dataclasses import dataclass
from itertools import count

from chairlift.scheduler.request import Request

_MANY = 1000  # entries of requests that are over, before it is worth while to throw them away


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time that one request must not pass: in the queue, or altogether."""

    request: Request
    is_for_waiting: bool

    @property
    def is_void(self) -> bool:
        """The request is over, or has its slot in time."""
        request = self.request
        return request.finish_reason is not None or (self.is_for_waiting and request.admission_time is not None)


class Deadlines:
    """Deadlines in order. Adding or taking one costs the logarithm of their number."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Deadline]] = []
        self._serials = count()

    def add(self, time: float, deadline: Deadline, num_alive: int) -> None:
        """`num_alive`: requests that are not over; others' deadlines are forgotten now and then."""
        if len(self._heap) > 4 * num_alive + _MANY:
            self._heap = [entry for entry in self._heap if not entry[2].is_void]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (time, next(self._serials), deadline))

    def pop_passed(self, now: float) -> Deadline | None:
        """The earliest of those that lie in the past and still mean something. None if there is none (any more)."""
        while self._heap and self._heap[0][0] <= now:
            _, _, deadline = heapq.heappop(self._heap)
            if not deadline.is_void:
                return deadline
        return None
