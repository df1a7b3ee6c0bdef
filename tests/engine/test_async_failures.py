"""The engine behind an event loop when something is wrong: each generation ends exactly once, with the right error."""

import asyncio
import gc
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any

import pytest

from chairlift import AsyncLLM, SamplingParams
from chairlift.engine.sampling.compiled_grammar import CompiledGrammar
from chairlift.engine.thread import Add
from chairlift.errors import EngineClosed, EngineDead, InvalidGrammar, QueueFull, RequestFailed
from chairlift.params import RequestOptions, StructuredOutputs
from tests.engine.async_support import (
    DEADLINE_S,
    LONG,
    Gate,
    engine_threads,
    hold_back,
    last,
    make_async_llm,
    wait_until,
    wait_until_idle,
)
from tests.engine.support import GREEDY, PROMPTS, make_llm, tokens_of


async def test_who_comes_when_the_queue_is_full_is_refused_and_the_others_are_served(tiny: str) -> None:
    with make_llm(tiny) as llm:
        expected = llm.generate(PROMPTS[:3], GREEDY)
    async with make_async_llm(tiny, max_queue_size=1) as engine:
        with hold_back(engine) as gate:
            generations = [await engine.prepare(prompt, GREEDY) for prompt in PROMPTS[:5]]
            tasks = [asyncio.create_task(last(engine.run(generation))) for generation in generations[:2]]
            await gate.entered()
            gate.allow(2)  # the second has come in with or after the first: both have their slots now
            await wait_until(lambda: engine._core.cache.slots_remaining == 0, "two run")
            tasks += [asyncio.create_task(last(engine.run(generation))) for generation in generations[2:]]
            await asyncio.sleep(0)  # all three are sent, in their order, while both slots are taken
            gate.open()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await wait_until_idle(engine)
            assert engine._outputs._routes == {}
            again = await last(engine.generate(PROMPTS[3], GREEDY))
    assert [result.outputs for result in results[:3] if not isinstance(result, BaseException)] == [
        output.outputs for output in expected
    ]
    assert [type(result) for result in results[3:]] == [QueueFull, QueueFull]
    assert again.finished


async def test_who_loses_its_place_in_the_queue_ends_with_all_of_its_choices_and_the_others_go_on(tiny: str) -> None:
    two = GREEDY.model_copy(update={"n": 2})
    async with make_async_llm(tiny, max_batch_size=1, max_queue_size=2) as engine:
        with hold_back(engine) as gate:
            running = asyncio.create_task(last(engine.generate("hi", GREEDY)))
            await gate.entered()
            patient = [await engine.prepare("hi", two, options=RequestOptions(priority=1)) for _ in range(2)]
            urgent = await engine.prepare("hi", GREEDY)
            gate.allow(1)
            await wait_until(lambda: engine._core.cache.slots_remaining == 0, "one runs")
            displaced = asyncio.create_task(last(engine.run(patient[0])))
            await asyncio.sleep(0)  # it is sent
            tasks = [asyncio.create_task(last(engine.run(each))) for each in (urgent, patient[1])]
            await asyncio.sleep(0)
            gate.open()
            with pytest.raises(QueueFull, match="a request that is served before this one took its place") as caught:
                await displaced
            assert caught.value.retry_after == 1.0
            served, refused = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(refused, QueueFull)
            assert not isinstance(served, BaseException)
            assert served.finished
            assert (await running).finished
        await wait_until(lambda: engine._core.cache.slots_remaining == 1, "the slot is free")
        assert (engine._mailboxes, engine._outputs._routes) == ({}, {})


async def test_what_the_scheduler_refuses_as_a_mistake_ends_alone(tiny: str) -> None:
    async with make_async_llm(tiny) as engine:
        generation = await engine.prepare("hi", LONG)
        engine.usable_engine().send(Add(generation.requests))
        with pytest.raises(ValueError, match="is already here"):
            await last(engine.run(generation))
        assert engine.is_healthy
        with pytest.raises(ValueError, match="is already running"):
            await anext(engine.run_all([generation, generation]))
        assert (await last(engine.generate("hi", GREEDY))).finished
        assert (engine._mailboxes, engine._outputs._routes) == ({}, {})


async def test_a_generation_can_be_run_again_once_it_has_ended(tiny: str) -> None:
    async with make_async_llm(tiny) as engine:
        generation = await engine.prepare("hi", GREEDY)
        first, second = [await last(engine.run(generation)) for _ in range(2)]
        assert first.outputs == second.outputs


async def assert_dead(engine: AsyncLLM) -> None:
    await asyncio.wait_for(engine.died.wait(), DEADLINE_S)
    assert not engine.is_healthy
    assert isinstance(engine.death, RuntimeError)
    with pytest.raises(EngineDead, match="no luck"):
        await last(engine.generate("hi", GREEDY))


async def test_a_reader_who_was_busy_when_the_engine_died_learns_of_it(tiny: str) -> None:
    async with make_async_llm(tiny) as engine:
        with hold_back(engine) as gate:
            gate.allow(1)
            async with aclosing(engine.generate("hi", LONG)) as outputs:
                await anext(outputs)
                gate.fail(RuntimeError("no luck"))
                await assert_dead(engine)
                with pytest.raises(EngineDead):
                    await anext(outputs)


async def test_a_dead_engine_can_be_closed_and_leaves_no_thread(tiny: str) -> None:
    async with make_async_llm(tiny) as engine:
        with hold_back(engine) as gate:
            gate.fail(RuntimeError("no luck"))
            with pytest.raises(EngineDead):
                await last(engine.generate("hi", GREEDY))
    assert [thread.name for thread in engine_threads()] == []
    await assert_dead(engine)


async def test_closing_ends_running_and_waiting_generations_with_that_error(tiny: str) -> None:
    engine = make_async_llm(tiny)
    with hold_back(engine) as gate:
        gate.allow(1)
        async with aclosing(engine.generate("hi", LONG)) as outputs:
            await anext(outputs)
            others = [asyncio.create_task(last(engine.generate("hi", LONG))) for _ in range(4)]
            await wait_until(lambda: engine.num_unfinished == 5, "all have come in")
            gate.open()
            await engine.close()
            with pytest.raises(EngineClosed):
                await anext(outputs)
            results = await asyncio.gather(*others, return_exceptions=True)
    assert [type(result) for result in results] == [EngineClosed] * 4
    assert engine.num_unfinished == 0
    assert not engine.died.is_set()


async def test_two_engines_in_one_process_do_not_disturb_each_other(tiny: str) -> None:
    with make_llm(tiny) as llm:
        expected = llm.generate(PROMPTS[:3], GREEDY)
    async with make_async_llm(tiny) as healthy, make_async_llm(tiny) as dying:
        with hold_back(dying) as gate:
            gate.fail(RuntimeError("no luck"))
            with pytest.raises(EngineDead):
                await last(dying.generate("hi", GREEDY))
        outputs = await asyncio.gather(*(last(healthy.generate(prompt, GREEDY)) for prompt in PROMPTS[:3]))
        assert healthy.is_healthy
    assert tokens_of(outputs) == tokens_of(expected)


def test_an_event_loop_that_is_closed_during_a_step_does_not_kill_the_engine_thread(tiny: str) -> None:
    engine = make_async_llm(tiny)

    async def leave_in_a_step(gate: Gate) -> None:
        outputs = engine.generate("hi", LONG)
        gate.allow(1)
        await anext(outputs)
        await gate.entered()
        await gate.entered()

    with hold_back(engine) as gate:
        asyncio.run(leave_in_a_step(gate))
    asyncio.run(wait_until_idle(engine))
    assert engine.is_healthy
    asyncio.run(engine.close())
    assert [thread.name for thread in engine_threads()] == []


async def test_a_failure_on_the_text_side_ends_the_waiting_too(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("no luck")

    async with make_async_llm(tiny) as engine:
        monkeypatch.setattr(engine._outputs, "process", fail)
        with pytest.raises(EngineDead, match="no luck"):
            await asyncio.wait_for(last(engine.generate("hi", GREEDY)), DEADLINE_S)
        await assert_dead(engine)


async def test_a_text_that_cannot_be_made_ends_its_generation_and_no_other(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object, __: int, ___: object) -> bool:
        raise RuntimeError("no luck")

    async with make_async_llm(tiny) as engine:
        staying = asyncio.create_task(last(engine.generate("hi", LONG)))
        await wait_until(lambda: engine._core.cache.slots_remaining == 1, "one runs")
        generation = await engine.prepare("hi", LONG)
        real_open = engine._outputs.open
        state = real_open(generation)
        monkeypatch.setattr(engine._outputs, "open", lambda _: state)
        monkeypatch.setattr(state, "take", fail.__get__(state))
        with pytest.raises(RequestFailed, match="RuntimeError: no luck"):
            await asyncio.wait_for(last(engine.run(generation)), DEADLINE_S)
        assert len((await staying).outputs[0].token_ids) == 200
        assert engine.is_healthy
        await wait_until_idle(engine)


async def test_a_grammar_that_fails_after_its_client_has_left_is_nobodys_unseen_exception(tiny: str) -> None:
    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    shared = [Future[CompiledGrammar]()]
    async with make_async_llm(tiny) as engine:
        engine.inputs.grammars.compile = lambda *_: shared[0]  # type: ignore[method-assign]
        broken = SamplingParams(structured_outputs=StructuredOutputs(regex="("))
        preparing = asyncio.create_task(engine.prepare("hi", broken))
        await asyncio.sleep(0)
        preparing.cancel()
        await asyncio.gather(preparing, return_exceptions=True)
        shared.pop().set_exception(InvalidGrammar("unclosed group"))
        await asyncio.sleep(0)
        assert preparing.cancelled()
        del preparing
        gc.collect()
    assert unseen == []
