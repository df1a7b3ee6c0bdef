"""The engine's thread beside an event loop: steps that hang, a loop that falls behind, what crosses between them.

A step that does not come back and a thread that is gone end everything; nothing else counts as death. What waits for a
loop stays bounded, and nothing is lost of it. Threads share nothing that changes; processes send each other copies.
"""

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import fields
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from chairlift import LLM, AsyncLLM, SamplingParams
from chairlift.engine.core import EngineCore
from chairlift.engine.sampling.compiled_grammar import CompiledGrammar
from chairlift.engine.sampling.masks import MaskThreads
from chairlift.engine.sampling.token_rules import TokenRules
from chairlift.engine.thread import MAX_STEPS_AHEAD, Abort, Add, Leave, Stop
from chairlift.errors import EngineDead, EngineHung
from chairlift.params import RequestOutput, StructuredOutputs
from chairlift.scheduler import Request, RequestState, TokenEvent
from tests.engine.async_support import (
    DEADLINE_S,
    LONG,
    engine_threads,
    hold_back,
    last,
    make_async_llm,
    subscription_of,
    thread_of,
    wait_until,
    wait_until_idle,
)
from tests.engine.support import GREEDY, make_llm, tokens_of
from tests.engine.test_poison import greedy
from tests.support.engines import core_of

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
            subscription_of(engine)._wake = vanish  # also the attempt to tell of it fails
            gate.open()
            with pytest.raises(EngineDead, match="the engine's thread is gone"):
                await asyncio.wait_for(waiting, DEADLINE_S)
        assert not engine.is_healthy


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
async def test_an_event_loop_that_was_blocked_does_not_blame_the_engine(llm: LLM, tiny: str, is_busy: bool) -> None:
    async with watched(tiny) as engine:
        slow = asyncio.create_task(last(engine.generate("hi", LONG))) if is_busy else None  # or idle for long
        await asyncio.sleep(0.01)
        time.sleep(2 * LIMIT_S)
        for _ in range(10):
            assert engine.is_healthy
            await asyncio.sleep(0.02)
        if slow is not None:
            assert tokens_of([await slow]) == tokens_of(llm.generate("hi", LONG))
        assert engine.is_healthy


async def test_the_limit_does_not_run_before_the_thread_does(tiny: str) -> None:
    async with make_async_llm(tiny, step_timeout=LIMIT_S) as engine:
        await asyncio.sleep(1.5 * LIMIT_S)
        assert engine.is_healthy
        assert (await last(engine.generate("hi", GREEDY))).finished
        assert engine.death is None


def block_until(is_true: Callable[[], bool], what: str) -> None:
    """Keeps the event loop from anything else until it is so."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline, f"not so in time: {what}"
        time.sleep(0.001)


def block_until_behind(engine: AsyncLLM) -> None:
    thread, subscription = thread_of(engine), subscription_of(engine)
    block_until(
        lambda: thread.progress is None and subscription._untaken.num_parts >= MAX_STEPS_AHEAD, "the engine waits"
    )


async def begin(engine: AsyncLLM, params: SamplingParams = LONG) -> asyncio.Task[RequestOutput]:
    """A generation that has taken a step."""
    task = asyncio.create_task(last(engine.generate("hi", params)))
    await wait_until(lambda: engine.read_stats().step_seconds.count > 0, "it runs")
    return task


async def test_a_blocked_loop_finds_few_updates_of_many_sequences_and_then_all_their_tokens(tiny: str) -> None:
    many = SamplingParams(temperature=1.0, seed=5, max_tokens=25, ignore_eos=True, n=128)
    with make_llm(tiny, max_batch_size=128) as llm:
        expected = tokens_of(llm.generate("hi", many))
    async with make_async_llm(tiny, max_batch_size=128) as engine:
        task = await begin(engine, many)
        num_before = engine.read_stats().step_seconds.count
        block_until_behind(engine)
        assert engine.read_stats().step_seconds.count - num_before <= MAX_STEPS_AHEAD + 1
        assert subscription_of(engine)._untaken.num_parts == 8
        assert engine.is_healthy
        assert tokens_of([await task]) == expected
        await wait_until(lambda: subscription_of(engine)._untaken.num_parts == 0, "all is taken")


async def test_an_engine_that_waits_for_its_loop_obeys_all_the_same(engine: AsyncLLM) -> None:
    task = await begin(engine)
    block_until_behind(engine)
    ((request_id, mailbox),) = engine._mailboxes.items()
    subscription_of(engine).send(Abort(mailbox.states[request_id].unfinished_ids))
    block_until(lambda: core_of(engine).cache.slots_remaining == 2, "the slot is free though the loop took nothing")
    assert (await task).outputs[0].finish_reason == "abort"
    await wait_until_idle(engine)
    assert (await last(engine.generate("hi", GREEDY))).finished
    task = asyncio.create_task(last(engine.generate("hi", LONG)))
    await wait_until(lambda: core_of(engine).cache.slots_remaining == 1, "it runs")
    block_until_behind(engine)
    subscription_of(engine).send(Stop())
    block_until(lambda: not thread_of(engine).is_alive, "it has stopped")
    task.cancel()


async def test_the_loop_is_woken_once_for_all_it_has_not_taken_and_to_wait_for_it_is_not_to_hang(tiny: str) -> None:
    async with make_async_llm(tiny, step_timeout=0.3) as engine:
        await last(engine.generate("hi", GREEDY))
        subscription, num_wakes = subscription_of(engine), 0
        await wait_until(lambda: not subscription._is_told, "the loop waits to be woken")
        wake = subscription._wake

        def count() -> None:
            nonlocal num_wakes
            num_wakes += 1

        subscription._wake = count
        task = asyncio.create_task(last(engine.generate("hi", LONG)))
        await wait_until(lambda: subscription._untaken.num_parts == MAX_STEPS_AHEAD, "the engine waits")
        await asyncio.sleep(1.2)  # four times what a step may take
        assert (engine.is_healthy, subscription._untaken.num_parts, num_wakes) == (True, MAX_STEPS_AHEAD, 1)
        subscription._wake = wake
        wake()
        assert len((await task).outputs[0].token_ids) == 80


async def test_the_rows_of_a_reader_behind_rest_while_others_go_on_and_end_when_it_leaves(engine: AsyncLLM) -> None:
    engine.usable_engine()
    slow = thread_of(engine).subscribe(lambda: None)
    first, second = [await engine.prepare("hi", LONG) for _ in range(2)]
    slow.send(Add(first.requests))
    assert len((await last(engine.generate("hi", LONG))).outputs[0].token_ids) == 80
    await wait_until(lambda: thread_of(engine).progress is None, "only the slow reader's row is left")
    assert slow._untaken.num_parts == MAX_STEPS_AHEAD
    events = list[TokenEvent]()
    while not events or events[-1].finish_reason is None:
        events += slow.take().events
        await asyncio.sleep(0)
    assert sum(len(event.new_token_ids) for event in events) == 80
    slow.send(Add(second.requests))
    await wait_until(lambda: core_of(engine).cache.slots_remaining == 1, "it runs")
    slow.send(Leave())
    await wait_until_idle(engine)
    assert (await last(engine.generate("hi", GREEDY))).finished


async def test_who_wants_no_steps_is_told_of_the_end_and_can_see_the_progress(engine: AsyncLLM) -> None:
    generation = await engine.prepare("hi", LONG)
    async with engine.run_all([generation], wants_steps=False) as mailbox:
        await wait_until(lambda: mailbox.progress[0].choices[0].num_tokens > 0, "it has begun")
        ((_, delta),) = [each async for each in mailbox]
    assert (len(delta.choices[0].token_ids), delta.finished) == (80, True)
    assert mailbox.progress[0].choices[0].num_tokens == 80


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


CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType, torch.dtype, torch.device)
IMMUTABLE = (str, bytes, int, float, complex, bool, type(None), range, Enum, *CODE)
# Made once for many requests: their texts and tables stay as they are, and what they remember the loop never reads.
COMPILED = (CompiledGrammar, MaskThreads, TokenRules)


def reachable(roots: Iterable[object], walls: set[int]) -> dict[int, object]:
    """By id, all that can be reached from some objects without going through code, or one of the `walls`."""
    seen: dict[int, object] = {}
    to_do = list(roots)
    while to_do:
        each: Any = to_do.pop()
        if id(each) in seen or id(each) in walls or isinstance(each, (*IMMUTABLE, *COMPILED)):
            continue
        if isinstance(each, BaseModel) and each.model_config.get("frozen"):
            continue
        seen[id(each)] = each
        if is_frozen(each):  # what holds its fields is not to be found among them
            to_do += [getattr(each, field.name, None) for field in fields(each)]
        else:
            to_do += gc.get_referents(each)
            to_do += [closure.cell_contents for closure in getattr(each, "__closure__", None) or ()]
    return seen


def is_frozen(each: object) -> bool:
    parameters = getattr(type(each), "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


async def test_nothing_that_changes_is_reached_from_both_threads(tiny: str) -> None:
    cases: list[dict[str, Any]] = [
        *({}, {"n": 2, "logprobs": 2}, {"bad_words": ["ab"], "min_tokens": 3}),
        {"structured_outputs": StructuredOutputs(regex="[a-z]{30}")},
    ]
    async with make_async_llm(tiny, max_batch_size=5) as engine:
        outputs = [engine.generate("hello", greedy(max_tokens=150, **each)) for each in cases]
        for each in outputs:
            await anext(each)
        shared = await engine._call(lambda core: shared_by(engine, core))
        for each in outputs:
            await each.aclose()
    assert [repr(each)[:200] for each in shared] == []


def shared_by(engine: AsyncLLM, core: EngineCore) -> list[object]:
    """Returns what can change and is reached from the loop's side as well as from the engine's, between two steps."""
    thread = engine._engine
    ours = reachable([engine._outputs, engine._mailboxes], {id(core), id(thread)})
    theirs = reachable([core.scheduler, core._journal, core._launches, core.executor.runner], {id(core), id(thread)})
    assert any(isinstance(each, Request) for each in ours.values())
    assert any(isinstance(each, RequestState) for each in theirs.values())
    shared = [each for name, each in theirs.items() if name in ours and not is_frozen(each)]
    return [each for each in shared if not isinstance(each, (tuple, frozenset))]
