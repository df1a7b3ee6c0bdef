"""The Python call when something is wrong: nothing is left behind, and the right exception comes out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from chairlift.engine.core import EngineCore
from chairlift.errors import EngineClosed, EngineDead, InvalidRequest, QueueFull
from chairlift.models.decoder import Decoder
from chairlift.params import RequestOptions
from chairlift.scheduler import Scheduler, TokenEvent
from tests.engine.support import GREEDY, PROMPTS, assert_idle, core_of, make_llm, tokens_of


def stepping(core: EngineCore, error: BaseException, after: int) -> Callable[[], list[TokenEvent]]:
    """`core.step`, which raises in the place of the step after that many."""
    step, num_left = core.step, after

    def step_or_raise() -> list[TokenEvent]:
        nonlocal num_left
        if num_left == 0:
            raise error
        num_left -= 1
        return step()

    return step_or_raise


def fail_forward(patch: pytest.MonkeyPatch, error: BaseException, after: int) -> None:
    """The model raises in the middle of a step, once, after that many forward passes."""
    forward, num_left = Decoder.forward, after

    def forward_or_raise(self: Decoder, *args: Any) -> torch.Tensor:
        nonlocal num_left
        num_left -= 1
        if num_left == -1:
            raise error
        return forward(self, *args)

    patch.setattr(Decoder, "forward", forward_or_raise)


def test_one_bad_prompt_among_good_ones_is_refused_before_anything_is_computed(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_llm(tiny) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(core_of(llm), "step", stepping(core_of(llm), AssertionError("a step was taken"), after=0))
            with pytest.raises(InvalidRequest, match="the prompt is empty"):
                llm.generate(["good", ""], GREEDY)
            flat: Any = [1, 2, 3]
            with pytest.raises(InvalidRequest, match="a string or a list of token ids"):
                llm.generate(flat, GREEDY)
        assert_idle(llm)


def test_more_prompts_than_the_queue_and_the_slots_hold_are_all_answered(tiny: str) -> None:
    with make_llm(tiny) as llm:
        expected = tokens_of(llm.generate(PROMPTS, GREEDY))
    for size in (0, 1):
        with make_llm(tiny, max_queue_size=size) as llm:
            assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected


def test_more_choices_than_the_queue_and_the_slots_hold_are_refused_and_the_engine_goes_on(tiny: str) -> None:
    with make_llm(tiny, max_queue_size=2) as llm:
        assert len(llm.generate("hi", GREEDY.model_copy(update={"n": 5}))[0].outputs) == 5
        with pytest.raises(InvalidRequest, match="n is 6, and at most 5"):
            llm.generate("hi", GREEDY.model_copy(update={"n": 6}))
        assert_idle(llm)
        with pytest.raises(InvalidRequest):
            llm.generate(["hi"] * 3, [GREEDY, GREEDY, GREEDY.model_copy(update={"n": 6})])
        assert_idle(llm)


def test_prompts_of_a_tenant_that_has_a_share_of_the_queue_wait_for_it_and_displace_nobody(tiny: str) -> None:
    options = [RequestOptions(tenant="a", queue_share=0.5, priority=-index) for index in range(len(PROMPTS))]
    with make_llm(tiny) as llm:
        expected = tokens_of(llm.generate(PROMPTS, GREEDY))
    with make_llm(tiny, max_queue_size=2) as llm:
        assert tokens_of(llm.generate(PROMPTS, GREEDY, options=options)) == expected
        with pytest.raises(QueueFull, match="your share of the waiting queue is full"):
            llm.generate("hi", GREEDY.model_copy(update={"n": 5}), options=options[0])
        assert_idle(llm)


def test_an_interrupt_between_steps_leaves_everything_free(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm(tiny) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(core_of(llm), "step", stepping(core_of(llm), KeyboardInterrupt(), after=2))
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, GREEDY)
        assert_idle(llm)


@pytest.mark.parametrize("after", [0, 2, 5])
def test_an_interrupt_in_the_middle_of_a_step_leaves_everything_free(
    tiny: str, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    with make_llm(tiny) as llm:
        with monkeypatch.context() as patch:
            fail_forward(patch, KeyboardInterrupt(), after)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, GREEDY)
        assert_idle(llm)


def test_an_interrupt_before_the_tokens_of_a_step_are_noted_leaves_everything_free(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> list[TokenEvent]:
        raise KeyboardInterrupt

    with make_llm(tiny) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, "update", interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, GREEDY)
        assert_idle(llm)


def test_after_a_failed_step_the_engine_is_dead_now_and_later(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm(tiny) as llm:
        patched = stepping(core_of(llm), RuntimeError("no luck"), after=2)
        monkeypatch.setattr(core_of(llm), "step", patched)
        with pytest.raises(EngineDead, match="RuntimeError: no luck") as caught:
            llm.generate(PROMPTS, GREEDY)
        assert isinstance(caught.value.__cause__, RuntimeError)
        monkeypatch.undo()
        with pytest.raises(EngineDead, match="no luck"):
            llm.generate("hi", GREEDY)


@pytest.mark.parametrize("after", [0, 2, 5])
def test_a_failure_in_the_middle_of_a_step_is_reported_as_the_engines_death(
    tiny: str, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    with make_llm(tiny) as llm:
        fail_forward(monkeypatch, RuntimeError("no luck"), after)
        with pytest.raises(EngineDead, match="RuntimeError: no luck"):
            llm.generate(PROMPTS, GREEDY)
        with pytest.raises(EngineDead, match="no luck"):
            llm.generate("hi", GREEDY)


def test_a_closed_llm_refuses_and_closing_twice_is_fine(tiny: str) -> None:
    llm = make_llm(tiny)
    llm.close()
    llm.close()
    with pytest.raises(EngineClosed):
        llm.generate("hi", GREEDY)
    with pytest.raises(EngineClosed):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY)
