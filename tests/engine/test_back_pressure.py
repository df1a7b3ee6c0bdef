"""An event loop that falls behind holds the engine up: what waits for it stays bounded, and nothing is lost of it."""

import asyncio
import time
from collections.abc import Callable

from chairlift import AsyncLLM, SamplingParams
from chairlift.engine.thread import MAX_UPDATES_AHEAD, Abort, EngineThread, Stop, Update
from chairlift.params import RequestOutput
from tests.engine.async_support import DEADLINE_S, LONG, last, make_async_llm, wait_until, wait_until_idle
from tests.engine.support import GREEDY, make_llm, tokens_of

MANY = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True, n=128)


def thread_of(engine: AsyncLLM) -> EngineThread:
    assert engine._thread is not None
    return engine._thread


def block_until(is_true: Callable[[], bool], what: str) -> None:
    """Keeps the event loop from anything else until it is so."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline, f"not so in time: {what}"
        time.sleep(0.001)


def block_until_behind(engine: AsyncLLM) -> None:
    thread = thread_of(engine)
    block_until(lambda: thread.progress is None and thread._num_untaken >= MAX_UPDATES_AHEAD, "the engine waits")


async def test_a_blocked_loop_finds_few_updates_of_many_sequences_and_then_all_their_tokens(tiny: str) -> None:
    with make_llm(tiny, max_batch_size=128) as llm:
        expected = tokens_of(llm.generate("hi", MANY))
    async with make_async_llm(tiny, max_batch_size=128) as engine:
        task = asyncio.create_task(last(engine.generate("hi", MANY)))
        await wait_until(lambda: engine.read_stats().step_seconds.count > 0, "it runs")
        num_before = engine.read_stats().step_seconds.count
        block_until_behind(engine)
        num_steps = engine.read_stats().step_seconds.count
        assert num_steps - num_before <= MAX_UPDATES_AHEAD + 1
        assert thread_of(engine)._num_untaken == 8
        assert engine.is_healthy
        assert tokens_of([await task]) == expected
        await wait_until(lambda: thread_of(engine)._num_untaken == 0, "all is taken")


async def test_an_engine_that_waits_for_its_loop_obeys_all_the_same(tiny: str) -> None:
    async with make_async_llm(tiny) as engine:
        task = asyncio.create_task(last(engine.generate("hi", LONG)))
        await wait_until(lambda: engine.read_stats().step_seconds.count > 0, "it runs")
        block_until_behind(engine)
        ((request_id, mailbox),) = engine._mailboxes.items()
        thread_of(engine).send(Abort(mailbox.states[request_id].unfinished_ids))
        block_until(lambda: engine._core.cache.slots_remaining == 2, "the slot is free though the loop took nothing")
        assert (await task).outputs[0].finish_reason == "abort"
        await wait_until_idle(engine)
        assert (await last(engine.generate("hi", GREEDY))).finished


async def test_an_engine_that_waits_for_its_loop_can_be_stopped(tiny: str) -> None:
    async with make_async_llm(tiny) as engine:
        task = asyncio.create_task(last(engine.generate("hi", LONG)))
        await wait_until(lambda: engine.read_stats().step_seconds.count > 0, "it runs")
        block_until_behind(engine)
        thread_of(engine).send(Stop())
        assert thread_of(engine).join(DEADLINE_S)
        task.cancel()


async def test_to_wait_for_the_loop_is_not_to_hang(tiny: str) -> None:
    untaken: list[Update] = []
    async with make_async_llm(tiny, step_timeout=0.3) as engine:
        await last(engine.generate("hi", GREEDY))
        thread = thread_of(engine)
        take, thread._deliver = thread._deliver, untaken.append
        task = asyncio.create_task(last(engine.generate("hi", LONG)))
        await wait_until(lambda: len(untaken) == MAX_UPDATES_AHEAD, "the engine waits")
        await asyncio.sleep(1.2)  # four times what a step may take
        assert (engine.is_healthy, len(untaken)) == (True, MAX_UPDATES_AHEAD)
        thread._deliver = take
        for update in untaken:
            take(update)
        assert len((await task).outputs[0].token_ids) == 200


def test_an_engine_whose_loop_was_closed_rests_and_can_be_closed_from_another(tiny: str) -> None:
    async def leave_it_running() -> tuple[AsyncLLM, asyncio.Task[RequestOutput]]:
        engine = make_async_llm(tiny)
        task = asyncio.create_task(last(engine.generate("hi", LONG)))
        await wait_until(lambda: engine.read_stats().step_seconds.count > 0, "it runs")
        block_until_behind(engine)
        return engine, task

    engine, task = asyncio.run(leave_it_running())
    thread = thread_of(engine)
    block_until(lambda: thread.progress is None, "nobody is left to compute for")
    assert task.cancelled()
    asyncio.run(engine.close())
    assert not thread.is_alive
