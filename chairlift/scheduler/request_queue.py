"""The scheduling policy as the waiting queue sees it: which of the waiting requests is served next."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from chairlift.scheduler.request import Request, RequestState


class RequestQueue(Protocol):
    """Keeps waiting requests in the order in which they get slots.

    `WaitingQueue` knows the rest: capacity, deadlines, and where a request is. It adds no request twice and removes
    only what is there. Times are monotonic seconds.
    """

    def __iter__(self) -> Iterator[RequestState]:
        """Iterates over all requests, roughly in the order of service."""

    def push(self, request: RequestState, *, is_first: bool = False) -> None:
        """Adds a request. `is_first`: it was preempted, and comes before those that it would share a turn with."""

    def peek(self) -> RequestState:
        """Returns the next request. There must be one."""

    def pop(self, now: float) -> RequestState:
        """Removes the request that `peek` returns, which gets a slot now, and returns it."""

    def remove(self, request: RequestState) -> None:
        """Removes a request that gets no slot."""

    def charge(self, request: RequestState) -> None:
        """Counts what a request, which is not in the queue, has generated until it ended."""

    def later_than(self, newcomers: Sequence[Request], now: float) -> Iterator[list[RequestState]]:
        """Iterates over groups that would be served after `newcomers` if these were added now, the last one first.

        Leaves out groups in which a request has had a slot. The iterator is invalid once the queue has changed.
        """

    def check(self) -> None:
        """Asserts that the queue agrees with itself."""
