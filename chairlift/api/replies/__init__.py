"""How the endpoints dress the same outputs: whole replies, and the events of streamed ones."""

from collections.abc import Sequence
from typing import Protocol

from pydantic import BaseModel

from chairlift.api.wire.base import ErrorDetail
from chairlift.params import RequestOutput


class Reply(Protocol):
    """One reply: its identity, its dress, and how much of it has gone out. Events are ready to be sent."""

    @property
    def id(self) -> str:
        """What the client knows this reply by."""
        ...

    @property
    def keep_alive(self) -> str:
        """What tells the client of a silent stream that it goes on."""
        ...

    def whole(self, outputs: list[RequestOutput]) -> BaseModel:
        """The reply to a request that does not stream."""
        ...

    def opening(self, prompts: Sequence[list[int]]) -> list[str]:
        """Events that come before any text; `prompts`: their tokens."""
        ...

    def news(self, index: int, output: RequestOutput) -> list[str]:
        """What prompt number `index` has more than when this was last called for it."""
        ...

    def closing(self) -> list[str]:
        """Events after everything else."""
        ...

    def failure(self, status: int, detail: ErrorDetail) -> list[str]:
        """The last events of a stream that cannot go on; `status`: what the reply would have had."""
        ...
