"""Reads figures at a limited pace, however many ask for them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Paced(Generic[_T]):
    """Reads figures at most once in an interval, for all who ask. Used from one event loop.

    All get figures that are read after they asked: those who come too early wait for the next interval, together.
    """

    def __init__(self, read: Callable[[], Awaitable[_T]], interval_s: float) -> None:
        self._read = read
        self._interval_s = interval_s
        self._next: asyncio.Task[_T] | None = None  # not begun
        self._due = 0.0  # when the next ones may be read, in the loop's time

    async def __call__(self) -> _T:
        if self._next is None:
            self._next = asyncio.create_task(self._read_next(), name="chairlift-figures")
            self._next.add_done_callback(
                lambda figures: figures.cancelled() or figures.exception()
            )  # all may have left
        return await asyncio.shield(self._next)

    async def _read_next(self) -> _T:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._due - loop.time())
        self._due = loop.time() + self._interval_s
        self._next = None  # whoever asks from here on gets later ones
        return await self._read()
