"""An event loop that falls behind holds the engine up: what waits for it stays bounded, and nothing is lost of it."""

import asyncio
import time
from collections.abc import Callable

from chairlift import AsyncLLM, SamplingParams
from chairlift.engine.thread import MAX_STEPS_AHEAD, Abort, Add, Leave, Stop
from chairlift.params import RequestOutput
from chairlift.scheduler import TokenEvent
from tests.engine.async_support import (
    DEADLINE_S,
    LONG,
    engine_threads,
    last,
    make_async_llm,
    port_of,
    thread_of,
    wait_until,
    wait_until_idle,
)
from tests.engine.support import GREEDY, make_llm, tokens_of


def block_until(is_true: Callable[[], bool], what: str) -> None:
    """Keeps the event loop from anything else until it is so."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline, f"not so in time: {what}"
        time.sleep(0.001)


def block_until_behind(engine: AsyncLLM) -> None:
    thread, port = thread_of(engine), port_of(engine)
    block_until(lambda: thread.progress is None and port._untaken.num_parts >= MAX_STEPS_AHEAD, "the engine waits")


async def begin(engine: AsyncLLM, params: SamplingParams = LONG) -> asyncio.Task[RequestOutput]:
    """A generation that has taken a step."""
    task = asyncio.create_task(last(engine.generate("hi", params)))
    await wait_until(lambda: engine.read_stats().step_seconds.count > 0, "it runs")
    return task


async def test_a_blocked_loop_finds_few_updates_of_many_sequences_and_then_all_their_tokens(tiny: str) -> None:
    many = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True, n=128)
    with make_llm(tiny, max_batch_size=128) as llm:
        expected = tokens_of(llm.generate("hi", many))
    async with make_async_llm(tiny, max_batch_size=128) as engine:
        task = await begin(engine, many)
        num_before = engine.read_stats().step_seconds.count
        block_until_behind(engine)
        assert engine.read_stats().step_seconds.count - num_before <= MAX_STEPS_AHEAD + 1
        assert port_of(engine)._untaken.num_parts == 8
        assert engine.is_healthy
        assert tokens_of([await task]) == expected
        await wait_until(lambda: port_of(engine)._untaken.num_parts == 0, "all is taken")


async def test_an_engine_that_waits_for_its_loop_obeys_all_the_same(engine: AsyncLLM) -> None:
    task = await begin(engine)
    block_until_behind(engine)
    ((request_id, mailbox),) = engine._mailboxes.items()
    port_of(engine).send(Abort(mailbox.states[request_id].unfinished_ids))
    block_until(lambda: engine._core.cache.slots_remaining == 2, "the slot is free though the loop took nothing")
    assert (await task).outputs[0].finish_reason == "abort"
    await wait_until_idle(engine)
    assert (await last(engine.generate("hi", GREEDY))).finished
    task = asyncio.create_task(last(engine.generate("hi", LONG)))
    await wait_until(lambda: engine._core.cache.slots_remaining == 1, "it runs")
    block_until_behind(engine)
    port_of(engine).send(Stop())
    block_until(lambda: not thread_of(engine).is_alive, "it has stopped")
    task.cancel()


async def test_the_loop_is_woken_once_for_all_it_has_not_taken_and_to_wait_for_it_is_not_to_hang(tiny: str) -> None:
    async with make_async_llm(tiny, step_timeout=0.3) as engine:
        await last(engine.generate("hi", GREEDY))
        port, num_wakes = port_of(engine), 0
        await wait_until(lambda: not port._is_told, "the loop waits to be woken")
        wake = port._wake

        def count() -> None:
            nonlocal num_wakes
            num_wakes += 1

        port._wake = count
        task = asyncio.create_task(last(engine.generate("hi", LONG)))
        await wait_until(lambda: port._untaken.num_parts == MAX_STEPS_AHEAD, "the engine waits")
        await asyncio.sleep(1.2)  # four times what a step may take
        assert (engine.is_healthy, port._untaken.num_parts, num_wakes) == (True, MAX_STEPS_AHEAD, 1)
        port._wake = wake
        wake()
        assert len((await task).outputs[0].token_ids) == 200


async def test_the_rows_of_a_reader_behind_rest_while_others_go_on_and_end_when_it_leaves(engine: AsyncLLM) -> None:
    engine.usable_engine()
    slow = thread_of(engine).connect(lambda: None)
    first, second = [await engine.prepare("hi", LONG) for _ in range(2)]
    slow.send(Add(first.requests))
    assert len((await last(engine.generate("hi", LONG))).outputs[0].token_ids) == 200
    await wait_until(lambda: thread_of(engine).progress is None, "only the slow reader's row is left")
    assert slow._untaken.num_parts == MAX_STEPS_AHEAD
    events = list[TokenEvent]()
    while not events or events[-1].finish_reason is None:
        events += slow.take().events
        await asyncio.sleep(0)
    assert sum(len(event.new_token_ids) for event in events) == 200
    slow.send(Add(second.requests))
    await wait_until(lambda: engine._core.cache.slots_remaining == 1, "it runs")
    slow.send(Leave())
    await wait_until_idle(engine)
    assert (await last(engine.generate("hi", GREEDY))).finished


async def test_who_wants_no_steps_is_told_of_the_beginning_and_the_end(engine: AsyncLLM) -> None:
    generation = await engine.prepare("hi", LONG)
    outputs = [
        (output, len(output.outputs[0].token_ids), output.finished)
        async for _, output in engine.run_all([generation], wants_steps=False)
    ]
    (beginning, num_at_first, is_over), end = outputs
    assert (num_at_first < 200, is_over) == (True, False)
    assert end == (beginning, 200, True)
    assert end[0] is beginning  # which has grown


def test_an_engine_whose_loop_was_closed_rests_and_can_be_closed_from_another(tiny: str) -> None:
    async def leave_it_running() -> tuple[AsyncLLM, asyncio.Task[RequestOutput]]:
        engine = make_async_llm(tiny)
        task = await begin(engine)
        block_until_behind(engine)
        return engine, task

    engine, task = asyncio.run(leave_it_running())
    block_until(lambda: thread_of(engine).progress is None, "nobody is left to compute for")
    assert task.cancelled()
    asyncio.run(engine.close())
    assert engine_threads() == set()
