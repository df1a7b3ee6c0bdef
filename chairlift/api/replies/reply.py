"""The interface of replies: a protocol turns deltas into a whole one, or the events of a streamed one."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NoReturn

from chairlift.api.http.event_stream import KEEP_ALIVE
from chairlift.api.wire.body import WholeReply
from chairlift.api.wire.errors import ErrorDetail
from chairlift.engine.text.deltas import RequestDelta


class Reply(ABC):
    """One reply: its identity, its form, and how much of it has been sent. Events are in the wire format."""

    id: str  # by which the client knows it
    keep_alive = KEEP_ALIVE  # the event that keeps a silent stream alive
    num_repeated = 0  # bytes of the request that the reply repeats, and a streamed one repeatedly

    @abstractmethod
    def whole(self, outputs: list[RequestDelta]) -> WholeReply:
        """Makes the reply to a request that does not stream; `outputs`: of each prompt, all that it has gained."""

    @abstractmethod
    def opening(self, prompts: Sequence[list[int]]) -> list[str]:
        """Events that come before any text; `prompts`: their tokens."""

    @abstractmethod
    def news(self, index: int, delta: RequestDelta) -> list[str]:
        """Makes the events for what prompt number `index` has gained."""

    @abstractmethod
    def closing(self) -> list[str]:
        """The last events of a complete reply."""

    @abstractmethod
    def failure(self, status: int, detail: ErrorDetail) -> list[str]:
        """The last events of a stream that cannot go on; `status`: what the reply would have had."""


class UnstreamedReply(Reply):
    """A reply that is always sent whole, since all of it is known at once."""

    def opening(self, *_: Any) -> list[str]:
        """See `Reply`."""
        return _never_streamed()

    def news(self, *_: Any) -> list[str]:
        """See `Reply`."""
        return _never_streamed()

    def closing(self) -> list[str]:
        """See `Reply`."""
        return _never_streamed()

    def failure(self, *_: Any) -> list[str]:
        """See `Reply`."""
        return _never_streamed()


def _never_streamed() -> NoReturn:
    raise AssertionError("its job is not streamed")
