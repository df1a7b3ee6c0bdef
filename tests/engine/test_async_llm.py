"""The engine behind an event loop: streams, readers that leave or dawdle, aborts, what goes wrong, and all at once."""

import asyncio
import gc
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import aclosing
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from chairlift import LLM, AsyncLLM, SamplingParams
from chairlift.engine.sampling.compiled_grammar import CompiledGrammar
from chairlift.engine.text.inputs import TextOptions
from chairlift.engine.thread import Add
from chairlift.errors import (
    EngineClosed,
    EngineDead,
    InvalidGrammar,
    InvalidRequest,
    QueueFull,
    QueueTimeout,
    RequestFailed,
)
from chairlift.params import RequestOptions, RequestOutput, StructuredOutputs
from chairlift.scheduler import Request, RequestState
from tests.engine.async_support import (
    DEADLINE_S,
    LONG,
    Gate,
    engine_threads,
    held,
    hold_back,
    last,
    make_async_llm,
    subscription_of,
    thread_of,
    wait_until,
    wait_until_idle,
)
from tests.engine.support import GREEDY, PROMPTS, tokens_of
from tests.scheduler.fake_engine import assert_nothing_is_left
from tests.support.checkpoints import random_prompts
from tests.support.engines import ahead, core_of

HI = [{"role": "user", "content": "hi"}]


def begin(output: Coroutine[Any, Any, RequestOutput]) -> asyncio.Task[RequestOutput]:
    return asyncio.create_task(output)


async def wait_for_slots(engine: AsyncLLM, num_free: int) -> None:
    await wait_until(lambda: core_of(engine).cache.slots_remaining == num_free, f"{num_free} slots are free")


async def begin_four(engine: AsyncLLM, num_before: int = 0) -> list[asyncio.Task[RequestOutput]]:
    """Begins requests of which at least two wait."""
    tasks = [begin(last(engine.generate("hi", LONG))) for _ in range(4)]
    await wait_until(lambda: engine.num_unfinished == num_before + 4, "all have come in")
    return tasks


async def ends_of(tasks: list[asyncio.Task[RequestOutput]]) -> list[Any]:
    """The type of exception or the reason with which each ended."""
    results = await asyncio.gather(*tasks, return_exceptions=True)
    return [type(each) if isinstance(each, BaseException) else each.outputs[0].finish_reason for each in results]


QUERY = ("a snail", ["a snail", "the north wind"])


async def test_a_reader_who_keeps_up_sees_every_step_and_outputs_are_cumulative(engine: AsyncLLM, gate: Gate) -> None:
    outputs = []
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
    assert [output.finished for output in outputs] == [False] * 11 + [True]
    assert choices[-1].finish_reason == "length"


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=4, n=2, max_tokens=12, top_p=0.9, stop=["a", "zz"])])
async def test_concurrent_generations_equal_those_of_a_python_call(llm: LLM, tiny: str, params: SamplingParams) -> None:
    expected = llm.generate(PROMPTS, params)
    async with make_async_llm(tiny, max_steps_per_launch=3) as engine:
        outputs = await asyncio.gather(*(last(engine.generate(prompt, params)) for prompt in PROMPTS))
        chat = await last(engine.chat(HI, params))
        await wait_until_idle(engine)
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]
    assert chat.outputs == llm.chat(HI, params)[0].outputs


async def test_vectors_and_scores_equal_those_of_a_python_call(llm: LLM, engine: AsyncLLM) -> None:
    texts = ["a snail", "the north wind", "a house"]
    found = await asyncio.gather(engine.embed(texts, dimensions=8), engine.embed("a snail"), engine.score(*QUERY))
    for own, expected in zip(
        [*found[0], *found[1]], [*llm.embed(texts, dimensions=8), *llm.embed("a snail")], strict=True
    ):
        assert own.embedding == pytest.approx(expected.embedding, abs=1e-5)
    assert [each.score for each in found[2]] == pytest.approx([each.score for each in llm.score(*QUERY)], abs=1e-5)
    with pytest.raises(InvalidRequest, match="dimensions: 1000 is not between 1 and"):
        await engine.embed("a snail", dimensions=1000)


async def test_a_slow_reader_finds_the_newest_state_and_no_backlog(engine: AsyncLLM) -> None:
    async with aclosing(engine.generate("slow", LONG)) as slow:
        first = await anext(slow)
        await last(engine.generate("fast", LONG))  # as long, and begun later: the slow one's tokens are all there
        rest = [output async for output in slow]
    assert not first.finished
    assert [len(output.outputs[0].token_ids) for output in rest] == [80]
    assert rest[0].finished


async def test_an_iterator_that_is_dropped_unclosed_is_left_all_the_same(engine: AsyncLLM) -> None:
    async for _ in engine.generate("hi", LONG):
        break
    await wait_until_idle(engine)


async def test_cancelling_before_a_token_frees_the_slot_or_the_place_in_the_queue(engine: AsyncLLM, gate: Gate) -> None:
    tasks = await begin_four(engine)
    await gate.entered()
    for task in tasks:
        task.cancel()
    assert await ends_of(tasks) == [asyncio.CancelledError] * 4
    gate.allow(1)  # for the step that waits at the gate; all aborts lie in the inbox by now
    await wait_until_idle(engine)
    gate.open()
    assert (await last(engine.generate("hi", GREEDY))).finished


async def test_an_id_whose_generation_was_left_can_be_used_at_once(llm: LLM, engine: AsyncLLM, gate: Gate) -> None:
    first = begin(last(engine.generate("first", LONG, "mine")))
    await gate.entered()
    first.cancel()
    assert await ends_of([first]) == [asyncio.CancelledError]
    second = begin(last(engine.generate("second", GREEDY, "mine")))
    await wait_until(lambda: engine.num_unfinished == 1, "the second has come in")
    gate.open()
    assert (await second).outputs == llm.generate("second", GREEDY)[0].outputs


async def test_aborted_generations_run_or_wait_and_end_with_what_there_is(engine: AsyncLLM, gate: Gate) -> None:
    gate.allow(1)
    async with aclosing(engine.generate("hi", LONG, "mine")) as outputs:
        first = await anext(outputs)
        others = await begin_four(engine, num_before=1)
        await engine.abort("someone else's")
        await engine.abort("mine")
        gate.allow(2)
        end = (await last(outputs)).outputs[0]
    await engine.abort_all()
    gate.open()
    assert (end.finish_reason, end.stop_reason) == ("abort", None)
    assert len(first.outputs[0].token_ids) <= len(end.token_ids) <= 2
    assert await ends_of(others) == ["abort"] * 4
    await wait_until_idle(engine)


async def test_a_stop_string_ends_the_generation_and_its_computing(engine: AsyncLLM, gate: Gate) -> None:
    gate.allow(2)
    params = LONG.model_copy(update={"stop": ["bb"], "logit_bias": {ord("b"): 100.0}})
    output = (await last(engine.generate("hi", params))).outputs[0]
    gate.allow(1)  # for a step that may have begun before the text was looked at
    assert (output.text, output.finish_reason, output.stop_reason) == ("", "stop", "bb")
    assert output.token_ids == [ord("b")] * 2
    await wait_until_idle(engine)


async def test_what_is_refused_ends_alone_and_leaves_nothing(llm: LLM, engine: AsyncLLM) -> None:
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        await last(engine.generate("", GREEDY))
    with pytest.raises(InvalidRequest, match="at least one message"):
        await last(engine.chat([], GREEDY))
    async with aclosing(engine.generate("hi", LONG, "mine")) as outputs:
        await anext(outputs)
        with pytest.raises(ValueError, match="'mine' is already running"):
            await last(engine.generate("ho", GREEDY, "mine"))
        assert tokens_of([await last(outputs)]) == tokens_of(llm.generate("hi", LONG))
    generation = await engine.prepare("hi", LONG)
    engine.usable_engine().send(Add(generation.requests))
    with pytest.raises(ValueError, match="is already here"):
        await last(engine.run(generation))
    assert engine.is_healthy
    with pytest.raises(ValueError, match="is already running"):
        await engine.run_all([generation, generation]).__aenter__()
    generation = await engine.prepare("hi", GREEDY)
    first, second = [await last(engine.run(generation)) for _ in range(2)]
    assert first.outputs == second.outputs  # what has ended may be run again
    assert (engine._mailboxes, engine._outputs._routes) == ({}, {})


async def test_who_loses_its_place_in_the_queue_ends_with_all_of_its_choices_and_the_others_go_on(tiny: str) -> None:
    two = GREEDY.model_copy(update={"n": 2})
    async with make_async_llm(tiny, max_batch_size=1, max_queue_size=2) as engine:
        with hold_back(engine) as gate:
            running = begin(last(engine.generate("hi", GREEDY)))
            await gate.entered()
            patient = [await engine.prepare("hi", two, options=RequestOptions(priority=1)) for _ in range(2)]
            urgent = await engine.prepare("hi", GREEDY)
            gate.allow(1)
            await wait_for_slots(engine, 0)
            tasks = [begin(last(engine.run(patient[0])))]
            await asyncio.sleep(0)  # it is sent
            tasks += [begin(last(engine.run(each))) for each in (urgent, patient[1])]
            await asyncio.sleep(0)
            gate.open()
            assert await ends_of([running, *tasks]) == ["length", QueueFull, "length", QueueFull]
            displacement = tasks[0].exception()
            assert isinstance(displacement, QueueFull)
            assert "a request of higher precedence displaced this one" in str(displacement)
            assert displacement.retry_after == 1.0
        await wait_for_slots(engine, 1)
        assert (engine._mailboxes, engine._outputs._routes) == ({}, {})


class FailingWatcher:
    """Cannot read what it is given. See `TextWatcher`."""

    def push(self, text: str) -> bool:
        raise RuntimeError(f"no luck with {len(text)} characters")


async def test_a_text_that_cannot_be_made_ends_its_generation_and_no_other(engine: AsyncLLM) -> None:
    staying = begin(last(engine.generate("hi", LONG)))
    await wait_for_slots(engine, 1)
    generation = await engine.prepare("hi", LONG, text_options=TextOptions(new_watcher=FailingWatcher))
    with pytest.raises(RequestFailed, match="RuntimeError: no luck"):
        await asyncio.wait_for(last(engine.run(generation)), DEADLINE_S)
    assert len((await staying).outputs[0].token_ids) == 80
    assert engine.is_healthy
    await wait_until_idle(engine)


async def test_a_grammar_that_fails_after_its_client_has_left_is_nobodys_unseen_exception(engine: AsyncLLM) -> None:
    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    shared = [Future[CompiledGrammar]()]
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
    assert engine_threads() == set()


async def test_an_engine_that_died_on_either_side_disturbs_no_other_and_leaves_no_thread(llm: LLM, tiny: str) -> None:
    async with make_async_llm(tiny) as healthy, make_async_llm(tiny) as stuck, make_async_llm(tiny) as silent:
        with held(core_of(stuck), "step") as step, held(silent._outputs, "process") as process:
            step.fail(RuntimeError("no luck"))
            process.fail(RuntimeError("no luck"))
            tasks = [begin(last(engine.generate("hi", GREEDY))) for engine in (stuck, silent)]
            assert await asyncio.wait_for(ends_of(tasks), DEADLINE_S) == [EngineDead] * 2
        outputs = await asyncio.gather(*(last(healthy.generate(prompt, GREEDY)) for prompt in PROMPTS[:3]))
        assert healthy.is_healthy
    assert tokens_of(outputs) == tokens_of(llm.generate(PROMPTS[:3], GREEDY))
    assert engine_threads() == set()
    for engine in (stuck, silent):
        assert (engine.died.is_set(), engine.is_healthy, type(engine.death)) == (True, False, RuntimeError)
        with pytest.raises(EngineDead, match="no luck"):
            await last(engine.generate("hi", GREEDY))


async def test_closing_ends_all_generations_and_what_comes_later_and_leaves_no_thread(tiny: str) -> None:
    async with make_async_llm(tiny) as idle:
        assert engine_threads() == set()  # before it has run
    engine = make_async_llm(tiny)
    with hold_back(engine) as gate:
        gate.allow(1)
        async with aclosing(engine.generate("hi", LONG)) as outputs:
            await anext(outputs)
            others = await begin_four(engine, num_before=1)
            gate.open()
            await engine.close()
            await engine.close()
            with pytest.raises(EngineClosed):
                await anext(outputs)
    later = [begin(last(engine.generate("hi", GREEDY))), begin(last(engine.chat(HI, GREEDY)))]
    assert await ends_of(others + later) == [EngineClosed] * 6
    assert (engine.num_unfinished, engine.died.is_set()) == (0, False)
    assert (engine.is_healthy, idle.is_healthy) == (False, False)
    assert engine_threads() == set()


NUM_REQUESTS = 150
BEGINNINGS = random_prompts(4, [150, 40, 5], 250)


def random_params(drawn: Random) -> SamplingParams:
    choices: dict[str, list[Any]] = {
        "n": [1, 1, 1, 3],
        "ignore_eos": [True, False],
        "repetition_penalty": [1.0, 1.0, 1.5],
        "stop": [[], ["a", "e"]],
        "logprobs": [None, None, 2],
        "prompt_logprobs": [None, None, None, 1],
        "structured_outputs": [None, None, StructuredOutputs(regex="[a-f]{3,9}")],
    }
    fields = {name: drawn.choice(values) for name, values in choices.items()}
    return SamplingParams(temperature=1.0, seed=drawn.randrange(100), max_tokens=drawn.randrange(20), **fields)


def random_options(drawn: Random) -> RequestOptions:
    salt, share, timeout = drawn.choice(["", "x"]), drawn.choice([1.0, 0.5]), drawn.choice([None, None, 0.05])
    priority, tenant = drawn.randrange(3), drawn.choice("abc")
    return RequestOptions(priority=priority, tenant=tenant, cache_salt=salt, queue_share=share, timeout=timeout)


async def visit(engine: AsyncLLM, drawn: Random, seen: set[str]) -> str:
    """One client, and how it ends: it is served, is refused, or leaves. Notes its sequences."""
    prompt = [*drawn.choice(BEGINNINGS), *(drawn.randrange(250) for _ in range(drawn.randrange(20)))]
    generation = await engine.prepare(prompt, random_params(drawn), options=random_options(drawn))
    seen.update(request.request_id for request in generation.requests)
    patience = drawn.choice([1, 2, 1000])  # looks at the output
    latest: RequestOutput | None = None
    try:
        async for output in engine.run(generation):
            latest = output
            patience -= 1
            if drawn.random() < 0.02:
                await engine.abort(generation.request_id)
            if not patience:
                return "left"
    except (QueueFull, QueueTimeout) as error:
        return type(error).__name__
    assert latest is not None
    assert latest.finished
    return "served"


def ids_in_memory() -> set[str]:
    """All sequences in the process. A worker thread may keep its last one until it is scheduled again."""
    gc.collect()
    return {each.request_id for each in gc.get_objects() if type(each) in (Request, RequestState)}


@pytest.mark.parametrize("num_ahead", [0, 1])
async def test_after_churn_every_table_is_empty(tiny: str, num_ahead: int) -> None:
    drawn = Random(num_ahead)
    sizes = {"max_batch_size": 4, "max_queue_size": 6, "max_steps_per_launch": 3, "max_num_batched_tokens": 48}
    engine = make_async_llm(tiny, ahead(num_ahead), **sizes, preempt_after=2, queue_timeout=0.3)
    async with engine:
        tasks: list[asyncio.Task[str]] = []
        seen: set[str] = set()
        for number in range(NUM_REQUESTS):
            tasks.append(asyncio.create_task(visit(engine, drawn, seen)))
            if number % 10 == 0:
                await asyncio.sleep(0.02)
            if drawn.random() < 0.1:
                drawn.choice(tasks).cancel()
            if drawn.random() < 0.1:
                await engine.reset_prefix_cache()
        fates = await asyncio.gather(*tasks, return_exceptions=True)
        assert [fate for fate in fates if isinstance(fate, Exception)] == []
        assert {"served", "left", "QueueFull"} <= set(fates)
        core, thread = core_of(engine), thread_of(engine)
        await wait_until(lambda: thread.progress is None and not core.has_work, "nothing is left to do")
        assert engine.is_healthy
        assert (engine._mailboxes, engine._answers, engine._outputs._routes) == ({}, set(), {})
        await wait_until(lambda: subscription_of(engine)._untaken.num_parts == 0, "all is taken")
        core.check()
        assert list(core._launches) == []
        assert_nothing_is_left(core.scheduler)
        del tasks, fates
        assert len(seen) > NUM_REQUESTS
        await wait_until(lambda: seen.isdisjoint(ids_in_memory()), "no sequence is in memory")
