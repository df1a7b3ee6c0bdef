"""When requests are sent: at a fixed concurrency (closed loop) or at a given rate (open loop).

Times are `time.perf_counter()` seconds. `send(index, intended_at)` must not raise: a failed request is a
result too. In the open loop a late client does not shift the later requests, and each learns the time it was
meant for; counting latency from there is what keeps a stalled server from slowing the very clock that
measures it ("coordinated omission").
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from time import perf_counter
from typing import Any

import numpy as np

Send = Callable[[int, float], Coroutine[Any, Any, None]]
"""Sends one request, given its index and intended time, and returns when its reply has ended."""

Arrivals = Callable[[Send], Awaitable[None]]
"""Sends every request of a test and returns when all have ended."""


def poisson_offsets(count: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which each of `count` requests is due; the first is due at once.

    Gaps are exponential with mean 1/rate, as in `vllm bench serve` with burstiness 1, but their sum is
    left to chance.
    """
    gaps = np.random.default_rng(seed).exponential(1 / rate, size=count - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


async def closed_loop(count: int, concurrency: int, send: Send) -> None:
    """Keep `concurrency` requests in flight until `count` were sent; each is due when it is sent."""
    indices = iter(range(count))

    async def keep_sending() -> None:
        for index in indices:
            await send(index, perf_counter())

    async with asyncio.TaskGroup() as lanes:
        for _ in range(min(concurrency, count)):
            lanes.create_task(keep_sending())


async def open_loop(offsets: Sequence[float], send: Send) -> None:
    """Send request i when `offsets[i]` seconds have passed, however many are still in flight."""
    start = perf_counter()
    async with asyncio.TaskGroup() as in_flight:
        for index, offset in enumerate(offsets):
            intended_at = start + offset
            # Even when late, give way: those already created have yet to be sent.
            await asyncio.sleep(max(0.0, intended_at - perf_counter()))
            in_flight.create_task(send(index, intended_at))
