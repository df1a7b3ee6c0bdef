"""Figures that are taken at a limited pace, however many ask for them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Paced(Generic[_T]):
    """Takes figures at most once in an interval, for all who ask. Used from one event loop.

    All get figures that are taken after they asked: those who come too early wait for the next interval, together.
    """

    def __init__(self, take: Callable[[], Awaitable[_T]], interval_s: float) -> None:
        self._take = take
        self._interval_s = interval_s
        self._next: asyncio.Task[_T] | None = None  # not begun
        self._due = 0.0  # when the next ones may be taken, in the loop's time

    async def __call__(self) -> _T:
        if self._next is None:
            self._next = asyncio.create_task(self._take_next(), name="chairlift-figures")
            self._next.add_done_callback(lambda taken: taken.cancelled() or taken.exception())  # all may have left
        return await asyncio.shield(self._next)

    async def _take_next(self) -> _T:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._due - loop.time())
        self._due = loop.time() + self._interval_s
        self._next = None  # whoever asks from here on gets later ones
        return await self._take()
