"""What the tests of `AsyncLLM` share: an engine that steps when the test says so, and waiting without fixed sleeps."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from chairlift import AsyncLLM, SamplingParams
from chairlift.engine.core import EngineCore
from chairlift.params import RequestOutput
from chairlift.scheduler import TokenEvent
from tests.engine.support import ENGINE

DEADLINE_S = 20.0
NUM_SLOTS = 2
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


class StepGate:
    """Lets an engine take a step only when the test says so. Open it for good before closing the engine."""

    def __init__(self, core: EngineCore) -> None:
        self._step = core.step
        self._permits = threading.Semaphore(0)
        self._is_open = False
        self._entered = threading.Semaphore(0)

    def step(self) -> list[TokenEvent]:
        """In the place of `core.step`."""
        self._entered.release()
        if not self._is_open:
            self._permits.acquire()
        return self._step()

    def allow(self, num_steps: int) -> None:
        self._permits.release(num_steps)

    def open(self) -> None:
        """All steps may be taken from now on."""
        self._is_open = True
        self._permits.release()

    def fail(self, error: Exception) -> None:
        """The step that waits, and all after it, raise this."""

        def failing_step() -> list[TokenEvent]:
            raise error

        self._step = failing_step
        self.open()

    async def wait_until_in_step(self) -> None:
        """Returns when a step has begun (one more than at the last call) and waits at the gate."""
        assert await asyncio.to_thread(self._entered.acquire, timeout=DEADLINE_S), "the engine takes no step"


def make_async_llm(model: str, **config: Any) -> AsyncLLM:
    return AsyncLLM(model, **{"max_batch_size": NUM_SLOTS, "max_steps_per_launch": 1, **ENGINE, **config})


@contextmanager
def hold_back(engine: AsyncLLM) -> Iterator[StepGate]:
    """The engine steps only when the gate allows it; at the end the gate is open."""
    gate = StepGate(engine._core)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._core, "step", gate.step)
        try:
            yield gate
        finally:
            gate.open()


@dataclass
class Clock:
    """Seconds that pass when a test says so."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def clock_of(engine: AsyncLLM) -> Iterator[Clock]:
    """The scheduler's clock stands still unless it is moved."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        scheduler = engine._core._scheduler
        for keeper in (scheduler, scheduler.waiting):
            patch.setattr(keeper, "_clock", clock)
        yield clock


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    """The last output of a generation."""
    return [output async for output in outputs][-1]


async def wait_until_idle(engine: AsyncLLM) -> None:
    def is_idle() -> bool:
        return engine.num_unfinished == 0 and engine._core.cache.slots_remaining == NUM_SLOTS

    await wait_until(is_idle, "no generation, and all slots free")


async def wait_until(is_true: Callable[[], bool], what: str) -> None:
    """Gives the event loop and the engine thread time until it is so."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline, f"not so in time: {what}"
        await asyncio.sleep(0.001)


def engine_threads() -> set[threading.Thread]:
    """Threads of engines and their grammars; the log's belongs to the process."""
    named = {thread for thread in threading.enumerate() if thread.name.startswith("chairlift")}
    return {thread for thread in named if thread.name != "chairlift-log"}
