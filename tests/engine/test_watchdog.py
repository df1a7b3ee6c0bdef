"""A step that does not come back and a thread that is gone end everything; nothing else counts as death."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from chairlift import AsyncLLM
from chairlift.errors import EngineDead, EngineHung
from tests.engine.async_support import DEADLINE_S, LONG, hold_back, last, make_async_llm, port_of, wait_until
from tests.engine.support import GREEDY, make_llm, tokens_of

LIMIT_S = 0.3


@asynccontextmanager
async def watched(tiny: str, step_timeout: float = LIMIT_S) -> AsyncIterator[AsyncLLM]:
    """An engine whose thread has started and served, and which serves at the end if it is alive."""
    async with make_async_llm(tiny, step_timeout=step_timeout) as engine:
        await last(engine.generate("hi", GREEDY))
        yield engine
        if engine.is_healthy:
            assert engine.death is None
            assert (await last(engine.generate("hi", GREEDY))).finished


def engine_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "chairlift-engine"]


async def test_a_step_that_hangs_ends_what_runs_and_waits_and_nothing_new_is_taken(
    tiny: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = "a step took longer than 0.3 s"
    async with watched(tiny) as engine:
        with hold_back(engine) as gate:
            tasks = [asyncio.create_task(last(engine.generate("hi", LONG))) for _ in range(5)]
            start = time.monotonic()
            await gate.entered()
            results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), DEADLINE_S)
            assert time.monotonic() - start > LIMIT_S
            assert [type(result) for result in results] == [EngineDead] * 5
            assert {str(result) for result in results} == {said}
            assert (type(engine.death), engine.is_healthy, engine.died.is_set()) == (EngineHung, False, True)
            with pytest.raises(EngineDead, match=f"the engine died: {said}"):
                await last(engine.generate("hi", GREEDY))
            await asyncio.wait_for(engine.close(), 5.0)  # which does not wait for what hangs, nor 10 s for its thread
    errors = [record.getMessage() for record in caplog.records if record.levelno > logging.WARNING]
    assert errors == [
        f"the engine is dead: {said}",
        "the engine thread did not stop in time; it runs until the process ends",
    ]


async def test_a_hung_step_that_comes_back_later_does_no_harm(tiny: str, caplog: pytest.LogCaptureFixture) -> None:
    async with watched(tiny) as engine:
        with hold_back(engine) as gate:
            gate.allow(1)
            async with aclosing(engine.generate("hi", LONG)) as outputs:
                await anext(outputs)
                await asyncio.wait_for(engine.died.wait(), DEADLINE_S)
                caplog.clear()
                gate.open()
                await wait_until(lambda: not engine_threads(), "the thread sees that it shall stop")
                with pytest.raises(EngineDead, match="a step took longer than"):
                    await anext(outputs)
    assert caplog.records == []
    assert engine.num_unfinished == 0


@pytest.mark.parametrize(
    "error", [RuntimeError("no luck"), SystemExit(1), KeyboardInterrupt(), MemoryError(), GeneratorExit()]
)
async def test_whatever_ends_the_thread_in_a_step_is_told_at_once(tiny: str, error: BaseException) -> None:
    async with watched(tiny, step_timeout=60.0) as engine:
        with hold_back(engine) as gate:
            tasks = [asyncio.create_task(last(engine.generate("hi", LONG))) for _ in range(3)]
            await wait_until(lambda: engine.num_unfinished == 3, "all have come in")
            gate.fail(error)
            results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), DEADLINE_S)
        assert {str(result) for result in results} == {f"a step failed: {type(error).__name__}: {error}"}
        assert [type(result) for result in results] == [EngineDead] * 3
        assert (engine.death, engine.is_healthy, engine.num_unfinished) == (error, False, 0)
        with pytest.raises(EngineDead, match="the engine died: a step failed"):
            await last(engine.generate("hi", GREEDY))
        await wait_until(lambda: not engine_threads(), "the thread has ended")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_thread_that_is_gone_without_a_word_is_missed(tiny: str) -> None:
    def vanish() -> None:
        raise SystemExit

    async with watched(tiny, step_timeout=60.0) as engine:
        with hold_back(engine) as gate:
            waiting = asyncio.create_task(last(engine.generate("hi", LONG)))
            await gate.entered()
            port_of(engine)._wake = vanish  # also the attempt to tell of it fails
            gate.open()
            with pytest.raises(EngineDead, match="the engine's thread is gone"):
                await asyncio.wait_for(waiting, DEADLINE_S)
        assert not engine.is_healthy


async def test_an_idle_engine_is_alive_however_short_the_limit(tiny: str) -> None:
    async with watched(tiny) as engine:
        start = time.monotonic()
        while time.monotonic() - start < 0.8:
            assert engine.is_healthy
            await asyncio.sleep(0.01)


async def test_steps_may_take_half_of_their_limit_each_also_after_a_long_idle_time(tiny: str) -> None:
    limit_s = 1.2
    async with watched(tiny, limit_s) as engine:
        await asyncio.sleep(0.8)  # in which the thread waits for work
        with hold_back(engine) as gate:
            slow = asyncio.create_task(last(engine.generate("hi", GREEDY)))
            for _ in range(3):  # together they take longer
                await gate.entered()
                await asyncio.sleep(limit_s / 2)
                gate.allow(1)
            assert engine.is_healthy
            gate.open()
            assert (await slow).finished
        assert engine.is_healthy


@pytest.mark.parametrize("is_busy", [False, True])
async def test_an_event_loop_that_was_blocked_does_not_blame_the_engine(tiny: str, is_busy: bool) -> None:
    with make_llm(tiny) as llm:
        expected = tokens_of(llm.generate("hi", LONG))
    async with watched(tiny, LIMIT_S) as engine:
        slow = asyncio.create_task(last(engine.generate("hi", LONG))) if is_busy else None
        await asyncio.sleep(0.01)
        time.sleep(2 * LIMIT_S)
        for _ in range(10):
            assert engine.is_healthy
            await asyncio.sleep(0.02)
        if slow is not None:
            assert tokens_of([await slow]) == expected
        assert engine.is_healthy


async def test_the_limit_does_not_run_before_the_thread_does(tiny: str) -> None:
    async with make_async_llm(tiny, step_timeout=LIMIT_S) as engine:
        await asyncio.sleep(1.5 * LIMIT_S)
        assert engine.is_healthy
        assert (await last(engine.generate("hi", GREEDY))).finished
        assert engine.death is None
