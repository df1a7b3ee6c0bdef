"""When requests are sent: so many at a time (closed loop) or when a schedule wants them (open loop).

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
"""Sends one arrival, given its index and intended time, and returns when its last reply has ended."""

Arrivals = Callable[[Send], Awaitable[None]]
"""Sends every arrival of a test and returns when all have ended."""


def random_offsets(count: int, rate: float, burstiness: float, generator: np.random.Generator) -> list[float]:
    """Seconds from the start at which each of `count` arrivals is due; the first is due at once.

    Gaps are gamma-distributed with mean 1/rate and shape `burstiness`: 1 is a Poisson process, less comes in bursts,
    more is more even. As in `vllm bench serve` they are scaled to add up to what the rate says, so that tests with
    different seeds offer the same load.
    """
    gaps = generator.gamma(burstiness, 1 / (rate * burstiness), size=count - 1)
    if count > 1:
        gaps *= (count - 1) / rate / gaps.sum()
    return [0.0, *np.cumsum(gaps).tolist()]


def ramp_offsets(
    count: int, first_rate: float, last_rate: float, burstiness: float, generator: np.random.Generator
) -> list[float]:
    """Offsets as those of `random_offsets`, but the rate grows from arrival to arrival, linearly, as vLLM's ramp-up.

    Their sum is left to chance: no one rate is offered.
    """
    rates = np.linspace(first_rate, last_rate, num=count)[1:]
    gaps = generator.gamma(burstiness, 1 / (rates * burstiness))
    return [0.0, *np.cumsum(gaps).tolist()]


async def sleep_until(moment: float) -> None:
    """Give way at least once, and do not come back early, as an event loop's timers may by their resolution."""
    await asyncio.sleep(max(0.0, moment - perf_counter()))
    while perf_counter() < moment:
        await asyncio.sleep(0)


async def closed_loop(count: int, concurrency: int, send: Send) -> None:
    """Keep `concurrency` arrivals in flight until `count` were sent; each is due when it is sent."""
    indices = iter(range(count))

    async def keep_sending() -> None:
        for index in indices:
            await send(index, perf_counter())

    async with asyncio.TaskGroup() as lanes:
        for _ in range(min(concurrency, count)):
            lanes.create_task(keep_sending())


async def open_loop(offsets: Sequence[float], send: Send) -> None:
    """Send arrival i when `offsets[i]` seconds have passed, however many are still in flight."""
    start = perf_counter()
    async with asyncio.TaskGroup() as in_flight:
        for index, offset in enumerate(offsets):
            intended_at = start + offset
            # Even when late this gives way: those already created have yet to be sent.
            await sleep_until(intended_at)
            in_flight.create_task(send(index, intended_at))
