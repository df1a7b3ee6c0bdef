"""The mailbox between the text side and a reader: what generations have gained, merged while the reader is slow."""

import asyncio
from collections.abc import AsyncIterator

from chairlift.engine.text.deltas import RequestDelta
from chairlift.engine.text.outputs import GenerationState

Numbered = tuple[int, RequestDelta]
"""The index of a generation among those that run together, and what it has gained."""


class Mailbox:
    """Deltas of generations that run together. A slow reader gets one delta for several steps, not a backlog.

    Iterating yields each generation's deltas until all have ended, and raises the error that ends them. It can be
    iterated over once.
    """

    def __init__(self, states: list[GenerationState], wants_steps: bool) -> None:
        """`wants_steps`: the reader gets deltas of every step; otherwise one of each generation, when it has ended."""
        self.states = {state.generation.request_id: state for state in states}
        self._indices = {request_id: index for index, request_id in enumerate(self.states)}
        self._wants_steps = wants_steps
        self._changed: dict[str, None] = {}  # in order, each once
        self._error: Exception | None = None
        self._has_news = asyncio.Event()

    @property
    def progress(self) -> list[RequestDelta]:
        """Tells how far each generation has come, as deltas without news."""
        return [state.progress() for state in self.states.values()]

    @property
    def unfinished_ids(self) -> list[str]:
        """Ids of the sequences that the engine may still be working on."""
        return [request_id for state in self.states.values() for request_id in state.unfinished_ids]

    def notify(self, request_id: str) -> None:
        """Tells the reader that a generation has gained something."""
        if self._wants_steps or self.states[request_id].is_finished:
            self._changed[request_id] = None
            self._has_news.set()

    def fail(self, error: Exception) -> None:
        """Ends the run with an error."""
        self._error = error
        self._has_news.set()

    async def __aiter__(self) -> AsyncIterator[Numbered]:
        unfinished = set(self.states)
        while unfinished:
            await self._has_news.wait()
            self._has_news.clear()
            if self._error is not None:
                raise self._error
            # Surplus events may still come for a generation whose text has ended.
            changed, self._changed = [each for each in self._changed if each in unfinished], {}
            for request_id, delta in [(request_id, self.states[request_id].take()) for request_id in changed]:
                if delta.finished:
                    unfinished.discard(request_id)
                yield self._indices[request_id], delta
