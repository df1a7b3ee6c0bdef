"""How well the load test itself keeps up: how late its event loop runs what is due, and how busy its thread is.

A client that falls behind takes tokens for late that had come in time. So its own lag is measured while it measures.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter, thread_time
from types import TracebackType
from typing import Self

TICK_S = 0.01


@dataclass(frozen=True, slots=True)
class OwnLoad:
    """`lags` are seconds by which a timer fired too late, a sample every TICK_S; `busy_share` is of one core."""

    lags: tuple[float, ...]
    busy_share: float


class OwnLoadWatch:
    """An async context that watches the event loop that it is entered on."""

    def __init__(self) -> None:
        self._lags: list[float] = []

    async def __aenter__(self) -> Self:
        self._started_at, self._cpu_at_start = perf_counter(), thread_time()
        self._sampling = asyncio.create_task(self._sample())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sampling.cancel()
        with suppress(asyncio.CancelledError):
            await self._sampling

    def read(self) -> OwnLoad:
        """What was seen until now."""
        elapsed = perf_counter() - self._started_at
        return OwnLoad(tuple(self._lags), (thread_time() - self._cpu_at_start) / elapsed)

    async def _sample(self) -> None:
        while True:
            due_at = perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            self._lags.append(max(0.0, perf_counter() - due_at))
