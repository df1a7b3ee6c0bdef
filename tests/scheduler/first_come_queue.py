"""The smallest scheduling policy: all that it takes to serve requests in another order."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from chairlift.scheduler import Request, RequestState


class FirstComeQueue:
    """A `RequestQueue` that serves first who came first, whatever its priority and tenant."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, RequestState] = OrderedDict()

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._requests.values())

    def push(self, request: RequestState, *, is_first: bool = False) -> None:
        self._requests[request.request_id] = request
        if is_first:
            self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> RequestState:
        return next(iter(self))

    def pop(self, now: float) -> RequestState:  # noqa: ARG002 - the order does not depend on time
        return self._requests.popitem(last=False)[1]

    def remove(self, request: RequestState) -> None:
        del self._requests[request.request_id]

    def charge(self, request: RequestState) -> None:
        """Does nothing: the order does not depend on what was generated."""

    def later_than(self, newcomers: Sequence[Request], now: float) -> Iterator[list[RequestState]]:  # noqa: ARG002
        return iter(())

    def check(self) -> None:
        assert all(name == request.request_id for name, request in self._requests.items())
