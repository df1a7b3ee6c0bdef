"""Prompts that begin like earlier ones, in a real engine: the same answers, and less to compute."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.cache import ContinuousBatchingKVCacheManager
from chairlift.engine.core import EngineCore
from chairlift.engine.execution.runner import Launch
from chairlift.engine.parts import Parts
from chairlift.errors import EngineClosed
from chairlift.params import RequestOptions, RequestOutput
from chairlift.plan import StepPlan
from chairlift.prompt_work import scores_in
from chairlift.scheduler import TokenEvent
from chairlift.scheduler.next_step import NextStep
from tests.engine.async_support import LONG, last, make_async_llm
from tests.engine.support import GREEDY, assert_idle, core_of, make_llm, state_of, tokens_of
from tests.engine.test_overlap import CASES
from tests.engine.test_poison import POISON, assert_failed, choices_of, greedy, poisoned
from tests.support.checkpoints import random_prompts
from tests.support.engines import ahead, hooked

(SYSTEM,) = random_prompts(5, [60], 250)
TAILS = random_prompts(6, [1, 9, 30, 4, 17, 2], 250)
PROMPTS = [SYSTEM + tail for tail in TAILS]
SHORT = [5, 6, 7, 8]
SCORED = greedy(logprobs=2, max_tokens=6)
LOW, HIGH = RequestOptions(priority=1), RequestOptions(priority=0)


def cached(outputs: list[RequestOutput]) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


@contextmanager
def counted(llm: LLM) -> Iterator[list[int]]:
    """Yields how many tokens each launch computes meanwhile."""
    counts: list[int] = []

    def count(launch: Callable[[StepPlan], Launch], plan: StepPlan) -> Launch:
        counts.append(sum(row.num_new_tokens for row in plan.rows) + (plan.num_steps - 1) * len(plan.rows))
        return launch(plan)

    with hooked(llm, count):
        yield counts


@pytest.fixture(scope="module")
def forgetful(native: str) -> Iterator[LLM]:
    """An engine that reuses nothing."""
    with make_llm(native, batch_invariant=True, enable_prefix_caching=False) as llm:
        yield llm


@pytest.mark.parametrize(("budget", "steps", "num_ahead"), [(16, 1, 0), (256, 4, 0), (16, 4, 1), (256, 1, 1)])
def test_answers_are_those_of_an_engine_that_reuses_nothing(
    native: str, forgetful: LLM, budget: int, steps: int, num_ahead: int
) -> None:
    prompts = [*PROMPTS, *PROMPTS[:2], SYSTEM, SYSTEM[:30]]
    # Bit for bit, where the batch in which a token was computed leaves no trace.
    settings = {"max_num_batched_tokens": budget, "max_steps_per_launch": steps, "batch_invariant": True}
    with make_llm(native, ahead(num_ahead), **settings) as llm:
        for case in ("greedy", "random", "penalised", "several choices", "scored"):
            params = SCORED.model_copy(update=CASES[case])
            expected = forgetful.generate(prompts, params)
            assert (cached(expected), core_of(forgetful).cache.warm) == ([0] * len(prompts), {})
            llm.reset_prefix_cache()
            first, second = llm.generate(prompts, params), llm.generate(prompts, params)
            assert_idle(llm)
            assert choices_of(first) == choices_of(second) == choices_of(expected), case
            assert [each.prompt_logprobs for each in second] == [each.prompt_logprobs for each in expected]
            assert (sum(cached(second)) > 0) == (case != "scored")


def test_native_attention_reads_what_rows_have_in_common_in_one_place() -> None:
    (long,) = random_prompts(9, [300], 250)
    prompts = [[*long, *tail] for tail in TAILS[:3]]
    with make_llm("bundled", attention_backend="cpu", enable_prefix_caching=False) as llm:
        expected = llm.generate(PROMPTS + prompts, SCORED)
    with make_llm("bundled", attention_backend="cpu", max_steps_per_launch=1) as llm:
        for _ in range(2):  # with the same bits
            assert choices_of(llm.generate(PROMPTS + prompts, SCORED)) == choices_of(expected)
        llm.reset_prefix_cache()
        core = core_of(llm)
        requests = [llm.inputs.prepare(str(prompt[-1]), prompt, SCORED).requests[0] for prompt in prompts]
        core.add(*requests)
        _steps(core, 2)
        states = [state_of(core, request) for request in requests]
        first, *others = [state.slot for state in states]
        blocks = core.cache.blocks[0]
        for slot in others:
            assert None not in (first, slot)
            assert torch.equal(blocks[slot, :, :, :300], blocks[first, :, :, :300])
            blocks[slot, :, :, :256] = 1e30  # whole chunks of it are read in the first one's slot
        _steps(core, 100)
    assert [state.token_ids[-6:] for state in states] == tokens_of(expected[-3:])


def test_only_what_is_new_is_computed_of_prompts_choices_and_conversations(tiny: str) -> None:
    prompt = PROMPTS[1]
    with make_llm(tiny, max_steps_per_launch=1) as llm, counted(llm) as computed:
        first, second = (llm.generate([prompt], greedy(max_tokens=1)) for _ in range(2))
        assert (computed, cached([*first, *second])) == ([69, 1], [0, 68])
        assert tokens_of(first) == tokens_of(second)
        (answer,) = tokens_of(llm.generate([prompt], GREEDY))
        computed.clear()
        assert cached(llm.generate([[*prompt, *answer, 7, 8]], GREEDY)) == [69 + 11]
        assert computed[0] == 3  # the answer's last token, and what is new
        computed.clear()
        (output,) = llm.generate([prompt[::-1]], SamplingParams(n=3, max_tokens=1, seed=1))
    assert computed == [69, 2]
    assert (output.num_cached_tokens, len(output.outputs)) == (0, 3)


def test_another_salt_shares_nothing_and_a_reset_forgets_what_was_computed(tiny: str) -> None:
    mine, yours = RequestOptions(cache_salt="mine"), RequestOptions(cache_salt="yours")
    with make_llm(tiny) as llm:
        expected = tokens_of(llm.generate([SYSTEM], GREEDY, options=mine))
        assert cached(llm.generate([SYSTEM], GREEDY, options=yours)) == [0]
        assert cached(llm.generate([SYSTEM], GREEDY)) == [0]
        assert cached(llm.generate([SYSTEM], GREEDY, options=mine)) == [59]
        llm.reset_prefix_cache()
        assert (core_of(llm).cache.warm, core_of(llm).read_stats().num_warm) == ({}, 0)
        again = llm.generate([SYSTEM], GREEDY, options=mine)
        assert (cached(again), tokens_of(again)) == ([0], expected)
        assert cached(llm.generate([SYSTEM], GREEDY, options=mine)) == [59]
    with pytest.raises(EngineClosed):
        llm.reset_prefix_cache()


@pytest.mark.parametrize("num_ahead", [0, 1])
async def test_a_reset_while_launches_are_in_flight_costs_nobody_a_token(
    native: str, forgetful: LLM, num_ahead: int
) -> None:
    long = greedy(max_tokens=150)
    (expected,) = tokens_of(forgetful.generate([SYSTEM], long))
    async with make_async_llm(native, ahead(num_ahead), batch_invariant=True) as engine:
        outputs = engine.generate(list(SYSTEM), long)
        await anext(outputs)
        await engine.reset_prefix_cache()
        beside = await last(engine.generate(list(SYSTEM), GREEDY))
        assert (cached([beside]), tokens_of([beside])) == ([0], [expected[:12]])
        assert tokens_of([await last(outputs)]) == [expected]
        assert cached([await last(engine.generate(list(SYSTEM), GREEDY))]) == [59]  # of what came after it
        core_of(engine).check()
    with pytest.raises(EngineClosed):
        await engine.reset_prefix_cache()


def test_what_may_be_no_numbers_is_not_reused(tiny: str) -> None:
    with make_llm(tiny, attention_backend="torch") as llm:
        expected = tokens_of(llm.generate([SYSTEM], GREEDY))
        with poisoned(llm):
            llm.generate([SYSTEM], GREEDY)
            for output in llm.generate([[*SYSTEM, POISON], [*SYSTEM, POISON, 3]], GREEDY):
                assert_failed(output)
        assert tokens_of(llm.generate([[*SYSTEM]], GREEDY)) == expected
        assert cached(llm.generate([SYSTEM, [*SYSTEM, POISON, 3, 4]], GREEDY)) == [59, 59]


@pytest.mark.parametrize(
    ("owner", "name"), [(ContinuousBatchingKVCacheManager, "_copy_blocks"), (NextStep, "add_prompt")]
)
def test_what_was_never_copied_for_an_interrupt_is_not_taken_for_what_it_should_have_been(
    tiny: str, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    prompt = SYSTEM + list(range(100, 110))
    with make_llm(tiny, enable_prefix_caching=False) as llm:
        expected = tokens_of(llm.generate([PROMPTS[1], prompt], GREEDY))
    with make_llm(tiny) as llm:
        for earlier in (PROMPTS[1], SYSTEM + list(range(100)), [4] * 40):  # the next copies from slot 1 into slot 0
            llm.generate([earlier], GREEDY)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([prompt], GREEDY)
        assert tokens_of(llm.generate([PROMPTS[1]], GREEDY) + llm.generate([prompt], GREEDY)) == expected
        assert_idle(llm)


def test_a_call_from_python_ends_in_time_and_keeps_what_there_is(tiny: str) -> None:
    now = iter(range(1000))  # each look of the scheduler at its clock takes 0.4 s
    with make_llm(tiny, Parts(clock=lambda: 0.4 * next(now)), max_batch_size=1) as llm:
        options = [RequestOptions(timeout=3.0), RequestOptions(timeout=1.0)]
        (ran,), (waited,) = (each.outputs for each in llm.generate([SHORT, SHORT], LONG, options=options))
    assert (ran.finish_reason, ran.stop_reason) == ("abort", "timeout")
    assert len(ran.token_ids) > 0
    assert waited.finish_reason == "abort"
    assert "no slot was free within" in (waited.error or "")


def test_a_preempted_request_says_what_it_would_have_said(native: str, forgetful: LLM) -> None:
    params = greedy(max_tokens=10, prompt_logprobs=1)
    expected = tokens_of(forgetful.generate(PROMPTS[:2], params))
    with make_llm(native, max_batch_size=1, preempt_after=2, max_steps_per_launch=1, batch_invariant=True) as llm:
        core = core_of(llm)
        states, events = [], []
        for prompt, options, num_steps in ((PROMPTS[0], LOW, 4), (PROMPTS[1], HIGH, 100)):
            (request,) = llm.inputs.prepare(str(prompt), prompt, params, options=options).requests
            core.add(request)
            states.append(state_of(core, request))
            events += _steps(core, num_steps)
    assert states[0].num_preemptions == 1
    assert [state.token_ids[state.num_prompt_tokens :] for state in states] == expected
    for state in states:
        own = [event for event in events if event.request_id == state.request_id]
        assert sum(len(scores_in(event.prompt_result)) for event in own) == state.num_prompt_tokens - 1


def _steps(core: EngineCore, limit: int) -> list[TokenEvent]:
    events = []
    for _ in range(limit):
        if core.has_work:
            events += core.step()
            core.check()
    return events
