"""The engine behind an event loop: streams, readers that leave or dawdle, aborts."""

import asyncio
from contextlib import aclosing
from itertools import pairwise

import pytest

from chairlift import SamplingParams
from chairlift.errors import EngineClosed, InvalidRequest
from tests.engine.async_support import (
    LONG,
    engine_threads,
    hold_back,
    last,
    make_async_llm,
    wait_until,
    wait_until_idle,
)
from tests.engine.support import GREEDY, PROMPTS, make_llm, tokens_of


async def test_a_reader_who_keeps_up_sees_every_step_and_outputs_are_cumulative(tiny: str) -> None:
    outputs = []
    async with make_async_llm(tiny) as engine:
        with hold_back(engine) as gate:
            gate.allow(1)
            async for output in engine.generate("hi", GREEDY, "mine"):
                outputs.append(output)
                gate.allow(1)
    choices = [output.outputs[0] for output in outputs]
    assert [len(choice.token_ids) for choice in choices] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert {(output.request_id, output.prompt) for output in outputs} == {("mine", "hi")}
    for before, after in pairwise(choices):
        assert after.token_ids[: len(before.token_ids)] == before.token_ids
        assert after.text.startswith(before.text)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert choices[-1].finish_reason == "length"


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=4, n=2, max_tokens=12, top_p=0.9, stop=["a", "zz"])])
async def test_concurrent_generations_equal_those_of_the_python_call(tiny: str, params: SamplingParams) -> None:
    with make_llm(tiny) as llm:
        expected = llm.generate(PROMPTS, params)
    async with make_async_llm(tiny, max_steps_per_launch=3) as engine:
        outputs = await asyncio.gather(*(last(engine.generate(prompt, params)) for prompt in PROMPTS))
        await wait_until_idle(engine)
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]


async def test_a_conversation_is_answered_through_the_template(tiny: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with make_llm(tiny) as llm:
        expected = llm.chat(messages, GREEDY)
    async with make_async_llm(tiny) as engine:
        assert tokens_of([await last(engine.chat(messages, GREEDY))]) == tokens_of(expected)


async def test_a_bad_request_is_refused_and_leaves_nothing(tiny: str) -> None:
    async with make_async_llm(tiny) as engine:
        with pytest.raises(InvalidRequest, match="the prompt is empty"):
            await last(engine.generate("", GREEDY))
        with pytest.raises(InvalidRequest, match="at least one message"):
            await last(engine.chat([], GREEDY))
        await wait_until_idle(engine)


async def test_a_slow_reader_finds_the_newest_state_and_no_backlog(tiny: str) -> None:
    async with make_async_llm(tiny) as engine, aclosing(engine.generate("slow", LONG)) as slow:
        first = await anext(slow)
        await last(engine.generate("fast", LONG))  # as long, and begun later: the slow one's tokens are all there
        rest = [output async for output in slow]
    assert not first.finished
    assert [len(output.outputs[0].token_ids) for output in rest] == [200]
    assert rest[0].finished


async def test_leaving_the_iterator_frees_the_slot_before_the_next_step(tiny: str) -> None:
    async with make_async_llm(tiny) as engine:
        with hold_back(engine) as gate:
            gate.allow(1)
            async with aclosing(engine.generate("hi", LONG)) as outputs:
                async for _ in outputs:
                    break
            assert engine.num_unfinished == 0
            gate.allow(1)  # for a step that may have begun before; a further one would wait for ever
            await wait_until_idle(engine)
            gate.open()
            assert (await last(engine.generate("hi", GREEDY))).finished
            assert engine.is_healthy


async def test_an_iterator_that_is_dropped_unclosed_is_left_all_the_same(tiny: str) -> None:
    async with make_async_llm(tiny) as engine:
        async for _ in engine.generate("hi", LONG):
            break
        await wait_until_idle(engine)


async def test_cancelling_the_reader_frees_the_slot(tiny: str) -> None:
    async with make_async_llm(tiny) as engine:
        task = asyncio.create_task(last(engine.generate("hi", LONG)))
        await wait_until(lambda: engine._core.cache.slots_remaining == 1, "it runs")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_until_idle(engine)


async def test_cancelling_before_the_first_token_frees_the_slot_or_the_place_in_the_queue(tiny: str) -> None:
    async with make_async_llm(tiny) as engine:
        with hold_back(engine) as gate:
            tasks = [asyncio.create_task(last(engine.generate("hi", LONG))) for _ in range(4)]  # two of them wait
            await wait_until(lambda: engine.num_unfinished == 4, "all have come in")
            await gate.entered()
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(result) for result in results] == [asyncio.CancelledError] * 4
            gate.allow(1)  # for the step that waits at the gate; all aborts lie in the inbox by now
            await wait_until_idle(engine)
            gate.open()
            assert (await last(engine.generate("hi", GREEDY))).finished


async def test_an_aborted_generation_ends_with_what_there_is(tiny: str) -> None:
    async with make_async_llm(tiny) as engine:
        with hold_back(engine) as gate:
            gate.allow(1)
            async with aclosing(engine.generate("hi", LONG, "mine")) as outputs:
                first = await anext(outputs)
                await engine.abort("someone else's")
                await engine.abort("mine")
                gate.open()
                end = (await last(outputs)).outputs[0]
            await wait_until_idle(engine)
    assert (end.finish_reason, end.stop_reason) == ("abort", None)
    assert len(first.outputs[0].token_ids) <= len(end.token_ids) <= 2


async def test_aborting_all_ends_running_and_waiting_ones(tiny: str) -> None:
    async with make_async_llm(tiny) as engine:
        with hold_back(engine):
            tasks = [asyncio.create_task(last(engine.generate("hi", LONG))) for _ in range(4)]
            await wait_until(lambda: engine.num_unfinished == 4, "all have come in")
            await engine.abort_all()
        outputs = await asyncio.gather(*tasks)
        assert [output.outputs[0].finish_reason for output in outputs] == ["abort"] * 4
        await wait_until_idle(engine)


async def test_a_stop_string_ends_the_generation_and_its_computing(tiny: str) -> None:
    params = LONG.model_copy(update={"stop": ["bb"], "logit_bias": {ord("b"): 100.0}})
    async with make_async_llm(tiny) as engine:
        with hold_back(engine) as gate:
            gate.allow(2)
            output = (await last(engine.generate("hi", params))).outputs[0]
            gate.allow(1)  # for a step that may have begun before the text was looked at
            assert (output.text, output.finish_reason, output.stop_reason) == ("", "stop", "bb")
            assert output.token_ids == [ord("b")] * 2
            await wait_until_idle(engine)


async def test_a_second_request_of_the_same_id_is_refused_and_the_first_goes_on(tiny: str) -> None:
    with make_llm(tiny) as llm:
        expected = llm.generate("hi", LONG)
    async with make_async_llm(tiny) as engine, aclosing(engine.generate("hi", LONG, "mine")) as outputs:
        await anext(outputs)
        with pytest.raises(ValueError, match="'mine' is already running"):
            await last(engine.generate("ho", GREEDY, "mine"))
        assert tokens_of([await last(outputs)]) == tokens_of(expected)


async def test_an_id_whose_generation_was_left_can_be_used_again_at_once(tiny: str) -> None:
    with make_llm(tiny) as llm:
        expected = llm.generate("second", GREEDY)
    async with make_async_llm(tiny) as engine:
        with hold_back(engine) as gate:
            first = asyncio.create_task(last(engine.generate("first", LONG, "mine")))
            await gate.entered()
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            second = asyncio.create_task(last(engine.generate("second", GREEDY, "mine")))
            await wait_until(lambda: engine.num_unfinished == 1, "the second has come in")
            gate.open()
            output = await second
    assert output.outputs == expected[0].outputs


async def test_after_closing_no_thread_is_left_and_everything_is_refused(tiny: str) -> None:
    async with make_async_llm(tiny) as idle:
        assert engine_threads() == set()  # before it has run
    engine = make_async_llm(tiny)
    await last(engine.generate("hi", GREEDY))
    await engine.close()
    await engine.close()
    assert engine_threads() == set()
    assert not engine.is_healthy
    assert not idle.is_healthy
    with pytest.raises(EngineClosed):
        await last(engine.generate("hi", GREEDY))
    with pytest.raises(EngineClosed):
        await last(engine.chat([{"role": "user", "content": "hi"}], GREEDY))
