"""A launch that begins before the tokens of the one before it are taken: the same answers, nothing lost, nothing left.

A device that works beside the host is not needed for that: on a CPU a launch is over when it has begun, and its tokens
are taken one launch later all the same.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from chairlift import LLM
from chairlift.engine import core as core_module
from chairlift.engine.core import EngineCore, Pacing
from chairlift.engine.execution.machine import steps_that_fit
from chairlift.engine.execution.runner import Launch
from chairlift.engine.sampling import drawing
from chairlift.engine.sampling.drawing import cutoff_by_bisection
from chairlift.errors import EngineDead
from chairlift.params import RepetitionDetection, RequestOutput, StructuredOutputs
from chairlift.scheduler import StepPlan
from tests.engine.async_support import last, make_async_llm, wait_until_idle
from tests.engine.support import GREEDY, PROMPTS, assert_idle, core_of, make_llm, tokens_of
from tests.engine.test_poison import POISON, SAID, assert_all_finite, poisoned
from tests.engine.test_runner import HostCopies

CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "random": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 1.0, "seed": 5, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    "penalised": {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "biased": {"logit_bias": {3: 4.0, 9: -100.0}, "temperature": 1.0, "seed": 6},
    "scored": {"logprobs": 3, "prompt_logprobs": 2},
    "structured": {"structured_outputs": StructuredOutputs(regex="[a-z]{4}[0-9]+")},
    "without words": {"bad_words": ["the", "a", "et", "x" * 20], "temperature": 1.0, "seed": 9},
    "few allowed": {"allowed_token_ids": [*b"abc ", 258], "min_tokens": 4, "temperature": 1.0, "seed": 10},
    "few allowed and fewer words": {
        "allowed_token_ids": [*b"ab"],
        "bad_words": ["aa", "bbb"],
        "frequency_penalty": 1.0,
    },
    "repeats itself": {
        "allowed_token_ids": [*b"ab"],
        "repetition_detection": RepetitionDetection(max_pattern_size=3, min_count=2),
        "temperature": 1.0,
        "seed": 11,
    },
    "ends by itself": {"stop_token_ids": list(range(0, 259, 5)), "min_tokens": 3, "temperature": 1.0, "seed": 7},
    "only the prompt": {"max_tokens": 0, "prompt_logprobs": 1},
    "several choices": {"n": 3, "temperature": 1.0, "seed": 8},
}


@pytest.fixture(params=[1, 2], ids=["1 ahead", "2 ahead"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Once called, engines are made that keep so many launches ahead."""

    def keep_ahead() -> None:
        pacing = Pacing(num_launches_ahead=request.param)
        monkeypatch.setattr(core_module.Pacing, "of", lambda _: pacing)

    return keep_ahead


@pytest.fixture
def one_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines keep one launch ahead."""
    monkeypatch.setattr(core_module.Pacing, "of", lambda _: Pacing(num_launches_ahead=1))


# Who is in the batch with whom differs, so log-probabilities are only equal if that leaves no trace.
TRACELESS = {"max_num_batched_tokens": 16, "batch_invariant": True}


@pytest.fixture(scope="module")
def waiting(native: str) -> Iterator[LLM]:
    """An engine that keeps no launch ahead."""
    with make_llm(native, **TRACELESS, enable_prefix_caching=False) as llm:
        yield llm


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_an_engine_that_waits(
    native: str, waiting: LLM, ahead: Callable[[], None], case: str, steps: int
) -> None:
    params = GREEDY.model_copy(update=CASES[case])
    expected = answers(waiting.generate(PROMPTS, params))
    ahead()
    with make_llm(native, **TRACELESS, max_steps_per_launch=steps) as llm:
        assert answers(llm.generate(PROMPTS, params)) == expected
        assert_idle(llm)


@pytest.mark.parametrize("steps", [1, 3])
def test_so_are_those_of_requests_of_every_kind_side_by_side(
    native: str, waiting: LLM, ahead: Callable[[], None], steps: int
) -> None:
    params = [GREEDY.model_copy(update=CASES[case]) for case in CASES]
    prompts = (PROMPTS * 2)[: len(params)]
    expected = answers(waiting.generate(prompts, params))
    ahead()
    with make_llm(native, batch_invariant=True, max_steps_per_launch=steps) as llm:
        assert answers(llm.generate(prompts, params)) == expected
        assert_idle(llm)


def answers(outputs: list[RequestOutput]) -> list[Any]:
    return [(output.outputs, output.prompt_logprobs) for output in outputs]


@pytest.mark.usefixtures("one_ahead")
def test_the_next_launch_begins_before_the_tokens_of_the_one_before_are_taken(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    with make_llm(tiny, max_steps_per_launch=1) as llm:
        runner = core_of(llm)._runner
        launch, wait = runner.launch, Launch.wait

        def note_launch(plan: StepPlan) -> Launch:
            order.append("launch")
            return launch(plan)

        def note_wait(self: Launch) -> Any:
            order.append("wait")
            return wait(self)

        monkeypatch.setattr(runner, "launch", note_launch)
        monkeypatch.setattr(Launch, "wait", note_wait)
        llm.generate("hi", GREEDY.model_copy(update={"max_tokens": 4}))
    assert order == ["launch", "launch", "wait", "launch", "wait", "launch", "wait", "wait"]


@pytest.mark.parametrize("case", [case for case in CASES if case != "structured"])
def test_a_launch_brings_nothing_to_the_host(tiny: str, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(drawing, "cutoff_by_sorting", cutoff_by_bisection)  # as on a GPU
    with make_llm(tiny) as llm:
        runner = core_of(llm)._runner
        launch, copies = runner.launch, HostCopies()

        def watch(plan: StepPlan) -> Launch:
            with copies:
                return launch(plan)

        monkeypatch.setattr(runner, "launch", watch)
        llm.generate(PROMPTS, GREEDY.model_copy(update=CASES[case]))
    assert copies.names == []


def test_every_step_leaves_the_books_in_order(tiny: str, ahead: Callable[[], None]) -> None:
    ahead()
    with make_llm(tiny, max_num_batched_tokens=8) as llm:
        core = core_of(llm)
        for index, prompt in enumerate(PROMPTS):
            params = GREEDY.model_copy(update=list(CASES.values())[index])
            core.add(*llm.inputs.prepare(str(index), prompt, params).requests)
        while core.has_work:
            core.step()
            core.check()
        assert core.cache.slots_remaining == 3


@pytest.mark.usefixtures("one_ahead")
def test_a_string_that_ends_the_text_is_found_late_and_ends_it_all_the_same(tiny: str) -> None:
    with make_llm(tiny) as llm:
        (whole,) = llm.generate("hi", GREEDY)
        text = whole.outputs[0].text
        stop = text[len(text) // 2 :][:1]
        (cut,) = llm.generate("hi", GREEDY.model_copy(update={"stop": [stop]}))
        assert cut.outputs[0].text == text[: text.index(stop)]
        assert_idle(llm)


# --- what goes wrong


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_request_that_cannot_be_computed_ends_alone_and_leaves_a_clean_slot(
    tiny: str, ahead: Callable[[], None], value: float, steps: int
) -> None:
    avoiding = GREEDY.model_copy(update={"logit_bias": {POISON: -100.0}})
    saying_it = GREEDY.model_copy(update={"logit_bias": {POISON: 100.0}})
    prompts = [PROMPTS[0], [1, 2, POISON, 3], [104, 105], PROMPTS[1], [POISON] * 30, PROMPTS[2], PROMPTS[3]]
    params = [avoiding, GREEDY, saying_it, avoiding, GREEDY, avoiding, avoiding]
    sound = [0, 3, 5, 6]
    ahead()
    with make_llm(tiny, max_steps_per_launch=steps, max_num_batched_tokens=8) as llm:
        expected = tokens_of(llm.generate([prompts[index] for index in sound], avoiding))
        with poisoned(llm, value):
            outputs = llm.generate(prompts, params)
        assert [outputs[index].outputs[0].error for index in (1, 2, 4)] == [SAID] * 3
        assert outputs[2].outputs[0].token_ids == [POISON]
        assert tokens_of(outputs[index] for index in sound) == expected
        assert_all_finite(llm)
        assert_idle(llm)


def test_a_poisoned_prompt_that_is_aborted_in_flight_leaves_a_clean_slot(tiny: str, ahead: Callable[[], None]) -> None:
    ahead()
    for num_steps in range(1, 8):
        with make_llm(tiny, max_num_batched_tokens=8) as llm:
            core = core_of(llm)
            with poisoned(llm):
                (bad,) = llm.inputs.prepare("bad", [POISON] * 40, GREEDY).requests
                core.add(bad)
                heard = [event for _ in range(num_steps) for event in core.step()]
                core.abort(bad.request_id)
                while core.has_work:
                    heard += core.step()
            assert [event.error for event in heard] in ([], [SAID])
            assert_all_finite(llm)
            assert_idle(llm)


def fail_launch(patch: pytest.MonkeyPatch, core: EngineCore, error: BaseException, after: int) -> None:
    """The launch after that many raises when it has written to the slots."""
    launch, num_left = core._runner.launch, after

    def launch_or_raise(plan: StepPlan) -> Launch:
        nonlocal num_left
        num_left -= 1
        begun = launch(plan)
        if num_left == -1:
            raise error
        return begun

    patch.setattr(core._runner, "launch", launch_or_raise)


def fail_wait(patch: pytest.MonkeyPatch, _: EngineCore, error: BaseException, after: int) -> None:
    """The device says of the launch after that many that it failed."""
    wait, num_left = Launch.wait, after

    def wait_or_raise(self: Launch) -> Any:
        nonlocal num_left
        num_left -= 1
        if num_left == -1:
            raise error
        return wait(self)

    patch.setattr(Launch, "wait", wait_or_raise)


@pytest.fixture(params=[fail_launch, fail_wait])
def fail(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Makes one launch of an engine fail, in one way or the other."""
    way: Callable[..., None] = request.param
    return way


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_launch_that_fails_takes_those_in_flight_with_it(
    tiny: str, monkeypatch: pytest.MonkeyPatch, ahead: Callable[[], None], fail: Callable[..., None], after: int
) -> None:
    ahead()
    with make_llm(tiny, max_steps_per_launch=1) as llm:
        core = core_of(llm)
        fail(monkeypatch, core, RuntimeError("no luck"), after)
        with pytest.raises(EngineDead, match="a step failed: RuntimeError: no luck"):
            llm.generate(PROMPTS, GREEDY)
        core.check()
        assert (core.has_work, core.cache.slots_remaining) == (False, 3)
        assert_all_finite(llm)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_an_interrupt_leaves_nothing_in_flight_and_the_next_call_is_as_if_new(
    tiny: str, monkeypatch: pytest.MonkeyPatch, ahead: Callable[[], None], fail: Callable[..., None], after: int
) -> None:
    ahead()
    avoiding = GREEDY.model_copy(update={"logit_bias": {POISON: -100.0}})
    with make_llm(tiny) as llm:
        expected = tokens_of(llm.generate(PROMPTS, avoiding))
        with poisoned(llm), monkeypatch.context() as patch:
            fail(patch, core_of(llm), KeyboardInterrupt(), after)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([[POISON, 1], *PROMPTS], avoiding)
        assert_all_finite(llm)
        assert tokens_of(llm.generate(PROMPTS, avoiding)) == expected
        assert_idle(llm)


@pytest.mark.usefixtures("one_ahead")
def test_a_call_that_was_interrupted_between_steps_does_not_disturb_the_next(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with make_llm(tiny) as llm:
        expected = tokens_of(llm.generate(PROMPTS, GREEDY))
        with monkeypatch.context() as patch:
            patch.setattr(llm._outputs, "process", interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, GREEDY)
        assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected
        assert_idle(llm)


# --- behind an event loop


@pytest.mark.usefixtures("one_ahead")
async def test_streams_say_what_a_call_says(tiny: str) -> None:
    with make_llm(tiny) as llm:
        expected = tokens_of(llm.generate(PROMPTS, GREEDY))
    async with make_async_llm(tiny) as engine:
        outputs = await asyncio.gather(*(last(engine.generate(prompt, GREEDY)) for prompt in PROMPTS))
        assert tokens_of(outputs) == expected
        await wait_until_idle(engine)


def test_a_device_that_works_beside_the_host_is_kept_one_launch_ahead_of() -> None:
    assert Pacing.of(torch.device("cpu")) == Pacing(num_launches_ahead=0, recorder=None)


@pytest.mark.parametrize(
    ("seconds_each", "num_steps"), [(0.0, 4), (0.0004, 4), (0.0007, 3), (0.001, 2), (0.0019, 1), (0.006, 1), (5.0, 1)]
)
def test_a_launch_has_as_many_steps_as_take_two_milliseconds(seconds_each: float, num_steps: int) -> None:
    assert steps_that_fit(seconds_each, 4) == num_steps
