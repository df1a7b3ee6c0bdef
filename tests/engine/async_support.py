"""Holds what the tests of `AsyncLLM` share: an engine that steps when the test says so, and waiting without fixed
sleeps.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from chairlift import AsyncLLM, SamplingParams
from chairlift.engine.parts import Parts
from chairlift.engine.thread import LocalEngine, Subscription
from chairlift.params import RequestOutput
from tests.engine.support import ENGINE
from tests.support.engines import HOOKED, core_of, make_core
from tests.support.engines import thread_of as thread_of

DEADLINE_S = 60.0
NUM_SLOTS = 2
LONG = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)


class Clock:
    """Seconds that pass by themselves, or while it is stopped when a test says so."""

    def __init__(self) -> None:
        self._now: float | None = None

    def __call__(self) -> float:
        return time.perf_counter() if self._now is None else self._now

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self._now = time.perf_counter()
        try:
            yield
        finally:
            self._now = None

    def advance(self, seconds: float) -> None:
        """Lets time pass while it is stopped."""
        assert self._now is not None, "it runs by itself"
        self._now += seconds


class Gate:
    """Stands in the place of a function, on whatever thread; its calls wait until they are let through."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._permits = threading.Semaphore(0)
        self._entered = threading.Semaphore(0)
        self._is_open = False

    def __call__(self, *args: Any, **named: Any) -> Any:
        self._entered.release()
        if not self._is_open:
            self._permits.acquire()
        return self._function(*args, **named)

    def allow(self, num_calls: int = 1) -> None:
        self._permits.release(num_calls)

    def open(self) -> None:
        """Nobody waits here any more."""
        self._is_open = True
        self._permits.release()

    def fail(self, error: BaseException) -> None:
        """The call that waits, and all after it, raise this."""

        def raise_it(*_: Any, **__: Any) -> Any:
            raise error

        self._function = raise_it
        self.open()

    async def entered(self) -> None:
        """Returns when a call has come (one more than at the last call of this) and waits."""
        assert await asyncio.to_thread(self._entered.acquire, timeout=DEADLINE_S), "nobody came to the gate"


def make_async_llm(model: str, parts: Parts = HOOKED, **config: Any) -> AsyncLLM:
    """An engine with two slots, one step a launch, and a clock that can be stopped."""
    sizes = {"max_batch_size": NUM_SLOTS, "max_steps_per_launch": 1}
    return AsyncLLM.of(LocalEngine(make_core(model, replace(parts, clock=Clock()), **{**sizes, **ENGINE, **config})))


@contextmanager
def held(owner: object, name: str) -> Iterator[Gate]:
    """Calls of that method wait at a gate, which is open at the end."""
    gate = Gate(getattr(owner, name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, gate)
        try:
            yield gate
        finally:
            gate.open()


def subscription_of(engine: AsyncLLM) -> Subscription:
    """The subscription of a running engine."""
    subscription = thread_of(engine).subscription
    assert subscription is not None
    return subscription


def hold_back(engine: AsyncLLM) -> AbstractContextManager[Gate]:
    """The engine steps only when the gate allows it; at the end the gate is open."""
    return held(core_of(engine), "step")


@contextmanager
def clock_of(engine: AsyncLLM) -> Iterator[Clock]:
    """The engine's clock, which stands still unless it is moved."""
    clock = core_of(engine).clock
    assert isinstance(clock, Clock)
    with clock.stopped():
        yield clock


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    """The last output of a generation."""
    return [output async for output in outputs][-1]


async def wait_until_idle(engine: AsyncLLM) -> None:
    cache = core_of(engine).cache
    await wait_until(lambda: engine.num_unfinished == 0 and cache.slots_remaining == NUM_SLOTS, "all slots are free")


async def wait_until(is_true: Callable[[], bool], what: str) -> None:
    """Gives the event loop and the engine thread time until it is so."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline, f"not so in time: {what}"
        await asyncio.sleep(0.001)


def engine_threads() -> set[threading.Thread]:
    """Threads of engines and their grammars; the log's belongs to the process."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("chairlift")]
    return {thread for thread in ours if thread.name != "chairlift-log"}
