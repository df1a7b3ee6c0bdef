"""Prompts that begin like earlier ones, in a real engine: the same answers, and less to compute."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from chairlift import LLM
from chairlift.engine import core as core_module
from chairlift.engine.core import EngineCore, Pacing
from chairlift.engine.execution.runner import ModelRunner
from chairlift.errors import EngineClosed, QueueTimeout
from chairlift.params import RequestOptions, RequestOutput, SamplingParams
from chairlift.scheduler import Scheduler, StepPlan, TokenEvent
from tests.engine.async_support import LONG, clock_of, hold_back, last, make_async_llm, wait_until
from tests.engine.support import GREEDY, assert_idle, core_of, make_llm, state_of, tokens_of
from tests.engine.test_poison import POISON, assert_failed, poisoned
from tests.support.checkpoints import random_prompts

(SYSTEM,) = random_prompts(5, [60], 250)
TAILS = random_prompts(6, [1, 9, 30, 4, 17, 2], 250)
PROMPTS = [SYSTEM + tail for tail in TAILS]
SHORT = [5, 6, 7, 8]
SCORED = GREEDY.model_copy(update={"logprobs": 2, "max_tokens": 6})


def cached(outputs: list[RequestOutput]) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each launch computes."""
    counts: list[int] = []
    launch = ModelRunner.launch

    def counting(runner: Any, plan: StepPlan) -> Any:
        counts.append(sum(row.num_new_tokens for row in plan.rows) + (plan.num_steps - 1) * len(plan.rows))
        return launch(runner, plan)

    monkeypatch.setattr(ModelRunner, "launch", counting)
    return counts


@pytest.fixture(scope="module")
def forgetful(native: str) -> Iterator[LLM]:
    """An engine that reuses nothing."""
    with make_llm(native, batch_invariant=True, enable_prefix_caching=False) as llm:
        yield llm


CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "random": {"temperature": 1.0, "seed": 5},
    "penalised": {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "several choices": {"n": 3, "temperature": 1.0, "seed": 8},
    "prompt scored": {"prompt_logprobs": 1},
}


@pytest.mark.parametrize(("budget", "steps", "num_ahead"), [(16, 1, 0), (256, 4, 0), (16, 4, 1), (256, 1, 1)])
@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_an_engine_that_reuses_nothing(
    native: str, forgetful: LLM, monkeypatch: pytest.MonkeyPatch, case: str, budget: int, steps: int, num_ahead: int
) -> None:
    params = SCORED.model_copy(update=CASES[case])
    prompts = [*PROMPTS, *PROMPTS[:2], SYSTEM, SYSTEM[:30]]
    # Bit for bit, where the batch in which a token was computed leaves no trace.
    config = {"max_num_batched_tokens": budget, "max_steps_per_launch": steps, "batch_invariant": True}
    expected = forgetful.generate(prompts, params)
    assert cached(expected) == [0] * len(prompts)
    monkeypatch.setattr(core_module.Pacing, "of", lambda _: Pacing(num_launches_ahead=num_ahead))
    with make_llm(native, **config) as llm:
        first, second = llm.generate(prompts, params), llm.generate(prompts, params)
        assert_idle(llm)
    assert [output.outputs for output in first] == [output.outputs for output in expected]
    assert [output.outputs for output in second] == [output.outputs for output in expected]
    assert [output.prompt_logprobs for output in second] == [output.prompt_logprobs for output in expected]
    assert (sum(cached(second)) > 0) == (case != "prompt scored")


def test_the_native_backend_gives_the_same_bits_too() -> None:
    answers = []
    for is_on in (False, True):
        with make_llm("bundled", attention_backend="cpu", enable_prefix_caching=is_on) as llm:
            outputs = [*llm.generate(PROMPTS, SCORED), *llm.generate(PROMPTS, SCORED)]
            answers.append([output.outputs for output in outputs])
    assert answers[0] == answers[1]


def test_native_attention_reads_what_rows_have_in_common_in_one_place() -> None:
    (long,) = random_prompts(9, [300], 250)
    prompts = [[*long, *tail] for tail in TAILS[:3]]
    with make_llm("bundled", attention_backend="cpu", enable_prefix_caching=False) as llm:
        expected = [output.outputs for output in llm.generate(prompts, SCORED)]
    with make_llm("bundled", attention_backend="cpu", max_steps_per_launch=1) as llm:
        core = core_of(llm)
        generations = [llm.inputs.prepare(str(index), prompt, SCORED) for index, prompt in enumerate(prompts)]
        core.add(*[request for generation in generations for request in generation.requests])
        _steps(core, 2)
        states = [state_of(core, generation.requests[0]) for generation in generations]
        slots = [state.slot for state in states]
        assert None not in slots
        blocks = core.cache.blocks[0]
        for slot in slots[1:]:
            assert torch.equal(blocks[slot, :, :, :300], blocks[slots[0], :, :, :300])
            blocks[slot, :, :, :256] = 1e30  # whole chunks of it are read in the first one's slot
        _steps(core, 100)
        outputs = [state.token_ids[-6:] for state in states]
    assert outputs == [choices[0].token_ids for choices in expected]


def test_a_prompt_that_was_served_before_computes_one_token(tiny: str, computed: list[int]) -> None:
    one = GREEDY.model_copy(update={"max_tokens": 1})
    with make_llm(tiny) as llm:
        (first,) = llm.generate([PROMPTS[1]], one)
        (second,) = llm.generate([PROMPTS[1]], one)
    assert computed == [69, 1]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 68)
    assert tokens_of([first]) == tokens_of([second])


def test_choices_of_one_prompt_compute_it_once(tiny: str, computed: list[int]) -> None:
    with make_llm(tiny, max_steps_per_launch=1) as llm:
        (output,) = llm.generate([PROMPTS[1]], SamplingParams(n=3, max_tokens=1, seed=1))
    assert computed == [69, 2]
    assert output.num_cached_tokens == 0
    assert len(output.outputs) == 3


def test_a_conversation_goes_on_where_it_was(tiny: str, computed: list[int]) -> None:
    with make_llm(tiny, max_steps_per_launch=1) as llm:
        (first,) = llm.generate([PROMPTS[1]], GREEDY)
        computed.clear()
        (second,) = llm.generate([[*PROMPTS[1], *first.outputs[0].token_ids, 7, 8]], GREEDY)
    assert computed[0] == 3  # the answer's last token, and what is new
    assert second.num_cached_tokens == 69 + 11


def test_another_salt_shares_nothing(tiny: str) -> None:
    mine, yours = RequestOptions(cache_salt="mine"), RequestOptions(cache_salt="yours")
    with make_llm(tiny) as llm:
        llm.generate([SYSTEM], GREEDY, options=mine)
        assert cached(llm.generate([SYSTEM], GREEDY, options=yours)) == [0]
        assert cached(llm.generate([SYSTEM], GREEDY)) == [0]
        assert cached(llm.generate([SYSTEM], GREEDY, options=mine)) == [59]


def test_reuse_can_be_turned_off(tiny: str) -> None:
    with make_llm(tiny, enable_prefix_caching=False) as llm:
        assert cached([*llm.generate([SYSTEM], GREEDY), *llm.generate([SYSTEM, SYSTEM], GREEDY)]) == [0, 0, 0]
        assert core_of(llm).cache.warm == {}


def test_a_reset_forgets_what_was_computed_and_reuse_begins_anew(tiny: str) -> None:
    with make_llm(tiny) as llm:
        expected = tokens_of(llm.generate([SYSTEM], GREEDY))
        llm.reset_prefix_cache()
        assert core_of(llm).cache.warm == {}
        assert core_of(llm).read_stats().num_warm == 0
        again = llm.generate([SYSTEM], GREEDY)
        assert (cached(again), tokens_of(again)) == ([0], expected)
        assert cached(llm.generate([SYSTEM], GREEDY)) == [59]
    with pytest.raises(EngineClosed):
        llm.reset_prefix_cache()


@pytest.mark.parametrize("num_ahead", [0, 1])
async def test_a_reset_while_launches_are_in_flight_costs_nobody_a_token(
    native: str, forgetful: LLM, monkeypatch: pytest.MonkeyPatch, num_ahead: int
) -> None:
    long = GREEDY.model_copy(update={"max_tokens": 150})
    (expected,) = forgetful.generate([SYSTEM], long)
    monkeypatch.setattr(core_module.Pacing, "of", lambda _: Pacing(num_launches_ahead=num_ahead))
    async with make_async_llm(native, batch_invariant=True) as engine:
        outputs = engine.generate(list(SYSTEM), long)
        await anext(outputs)
        await engine.reset_prefix_cache()
        beside = await last(engine.generate(list(SYSTEM), GREEDY))
        assert beside.num_cached_tokens == 0
        assert tokens_of([beside]) == [tokens_of([expected])[0][:12]]
        running = await last(outputs)
        assert tokens_of([running]) == tokens_of([expected])
        assert (await last(engine.generate(list(SYSTEM), GREEDY))).num_cached_tokens == 59  # of what came after it
        engine._core.check()
    with pytest.raises(EngineClosed):
        await engine.reset_prefix_cache()


def test_what_may_be_no_numbers_is_not_reused(tiny: str) -> None:
    with make_llm(tiny) as llm:
        expected = tokens_of(llm.generate([SYSTEM], GREEDY))
        with poisoned(llm):
            llm.generate([SYSTEM], GREEDY)
            bad = llm.generate([[*SYSTEM, POISON], [*SYSTEM, POISON, 3]], GREEDY)
        for output in bad:
            assert_failed(output)
        assert tokens_of(llm.generate([[*SYSTEM]], GREEDY)) == expected
        assert cached(llm.generate([SYSTEM, [*SYSTEM, POISON, 3, 4]], GREEDY)) == [59, 59]


def test_an_interrupted_copy_is_not_taken_for_what_it_should_have_been(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with make_llm(tiny) as llm:
        expected = tokens_of(llm.generate([PROMPTS[1]], GREEDY))
        llm.generate([SYSTEM + list(range(100))], GREEDY)
        with monkeypatch.context() as patch:
            patch.setattr(core_of(llm).cache, "_copy_blocks", interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([SYSTEM + list(range(100, 110))], GREEDY)
        assert tokens_of(llm.generate([PROMPTS[1]], GREEDY)) == expected
        assert tokens_of(llm.generate([SYSTEM + list(range(100, 110))], GREEDY)) == _alone(tiny)
        assert_idle(llm)


def test_an_interrupt_while_a_step_is_planned_leaves_no_slot_with_what_was_never_copied(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    prompt = SYSTEM + list(range(100, 110))
    with make_llm(tiny) as llm:
        for earlier in ([3] * 40, SYSTEM + list(range(100)), [4] * 40):  # the next copies from slot 1 into slot 0
            llm.generate([earlier], GREEDY)
        with monkeypatch.context() as patch:
            patch.setattr("chairlift.scheduler.scheduler.NextStep.add_prompt", interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([prompt], GREEDY)
        assert tokens_of(llm.generate([prompt], GREEDY)) == _alone(tiny)
        assert_idle(llm)


def _alone(model: str) -> list[list[int]]:
    with make_llm(model, enable_prefix_caching=False) as llm:
        return tokens_of(llm.generate([SYSTEM + list(range(100, 110))], GREEDY))


# Deadlines


async def test_who_waits_too_long_is_told_so_and_the_others_go_on(tiny: str) -> None:
    async with make_async_llm(tiny, max_batch_size=1, queue_timeout=5.0) as engine:
        with hold_back(engine) as gate, clock_of(engine) as clock:
            running, waiting = (asyncio.create_task(last(engine.generate(SHORT, LONG))) for _ in range(2))
            await wait_until(lambda: engine.num_unfinished == 2, "both have come in")
            gate.allow(2)
            scheduler, cache = engine._core._scheduler, engine._core.cache
            await wait_until(lambda: (cache.slots_remaining, scheduler.num_waiting) == (0, 1), "one runs")
            clock.now += 6.0
            gate.open()
            with pytest.raises(QueueTimeout, match=r"no slot was free within 6\.0 s; try again later") as caught:
                await waiting
            assert caught.value.retry_after >= 1.0
            assert len((await running).outputs[0].token_ids) == 200


async def test_a_request_that_runs_out_of_time_keeps_what_it_has(tiny: str) -> None:
    async with make_async_llm(tiny) as engine:
        with hold_back(engine) as gate, clock_of(engine) as clock:
            options = RequestOptions(timeout=5.0)
            reader = asyncio.create_task(last(engine.generate(SHORT, LONG, options=options)))
            await gate.entered()
            gate.allow(2)
            await gate.entered()
            await gate.entered()
            clock.now += 6.0
            gate.open()
            output = await reader
    (choice,) = output.outputs
    assert (choice.finish_reason, choice.stop_reason, choice.error) == ("abort", "timeout", None)
    assert len(choice.token_ids) == 2


def test_a_call_from_python_ends_in_time_and_keeps_what_there_is(tiny: str, clock: Callable[[float], None]) -> None:
    clock(0.4)
    with make_llm(tiny, max_batch_size=1) as llm:
        options = [RequestOptions(timeout=3.0), RequestOptions(timeout=1.0)]
        ran, waited = llm.generate([SHORT, SHORT], LONG, options=options)
    assert (ran.outputs[0].finish_reason, ran.outputs[0].stop_reason) == ("abort", "timeout")
    assert len(ran.outputs[0].token_ids) > 0
    assert waited.outputs[0].finish_reason == "abort"
    assert "no slot was free within" in (waited.outputs[0].error or "")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Once called, each look of a scheduler at its clock takes so many seconds."""

    def tick(seconds: float) -> None:
        now = 0.0

        def look() -> float:
            nonlocal now
            now += seconds
            return now

        def make(*given: Any, **named: Any) -> Scheduler:
            return Scheduler(*given, **{**named, "clock": look})

        monkeypatch.setattr(core_module, "Scheduler", make)

    return tick


def test_a_preempted_request_says_what_it_would_have_said(native: str, forgetful: LLM) -> None:
    low, high = RequestOptions(priority=1), RequestOptions(priority=0)
    params = GREEDY.model_copy(update={"max_tokens": 10, "prompt_logprobs": 1})
    expected = tokens_of(forgetful.generate([PROMPTS[0], PROMPTS[1]], params))
    with make_llm(native, max_batch_size=1, preempt_after=2, max_steps_per_launch=1, batch_invariant=True) as llm:
        core = core_of(llm)
        generations = [
            llm.inputs.prepare(name, prompt, params, options=options)
            for name, prompt, options in (("low", PROMPTS[0], low), ("high", PROMPTS[1], high))
        ]
        core.add(*generations[0].requests)
        states = [state_of(core, generations[0].requests[0])]
        events = _steps(core, 4)
        core.add(*generations[1].requests)
        states.append(state_of(core, generations[1].requests[0]))
        events += _steps(core, 100)
    assert states[0].num_preemptions == 1
    assert [state.token_ids[state.num_prompt_tokens :] for state in states] == expected
    for generation in generations:
        own = [event for event in events if event.request_id == generation.requests[0].request_id]
        assert sum(len(event.prompt_logprobs) for event in own) == len(generation.prompt_token_ids) - 1


def _steps(core: EngineCore, limit: int) -> list[TokenEvent]:
    events = []
    for _ in range(limit):
        if core.has_work:
            events += core.step()
            core.check()
    return events
