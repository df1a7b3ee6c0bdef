"""The simulated clock, and what happens by it: requests come, clients leave."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import inf

from simulation.workload import Conversation, Workload


class Clock:
    """The time of the simulation, in seconds; the scheduler reads it by calling it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(order=True, slots=True)
class _Entry:
    time: float
    serial: int  # of two at the same time the one that was planned first happens first
    act: Callable[[], None] = field(compare=False)


class Agenda:
    """What will happen: conversations of the workload as they are due, and what was planned meanwhile."""

    def __init__(
        self, workload: Workload, clock: Clock, begin: Callable[[Conversation], None], *, is_on_demand: bool
    ) -> None:
        """`is_on_demand`: conversations begin when `begin_next` says so, never by themselves."""
        self._workload = workload
        self._is_on_demand = is_on_demand
        self._clock = clock
        self._begin = begin
        self._next = next(workload, None)
        self._entries: list[_Entry] = []
        self._serials = count()

    @property
    def next_time(self) -> float:
        """When something happens next; infinity if nothing does any more."""
        return min(self._next_arrival, self._entries[0].time if self._entries else inf)

    def plan(self, time: float, act: Callable[[], None]) -> None:
        """`act` will be called at that time, which is not in the past."""
        heapq.heappush(self._entries, _Entry(time, next(self._serials), act))

    def pass_time(self, until: float) -> None:
        """Lets everything happen that is due by then, each at its time."""
        while self.next_time <= until:
            self._clock.now = max(self._clock.now, self.next_time)
            if self._next_arrival <= self.next_time:
                self.begin_next()
            else:
                heapq.heappop(self._entries).act()
        self._clock.now = until

    def begin_next(self) -> bool:
        """The workload's next conversation begins now, due or not. False if there is none."""
        conversation = self._next
        if conversation is None:
            return False
        self._next = next(self._workload, None)
        self._begin(conversation)
        return True

    @property
    def _next_arrival(self) -> float:
        return inf if self._next is None or self._is_on_demand else self._next.arrival
