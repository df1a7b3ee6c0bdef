"""The Python call: what goes in, what comes out, and the right exception when something is wrong."""

import io
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from chairlift import SamplingParams
from chairlift.engine import llm as llm_module
from chairlift.engine.core import EngineCore
from chairlift.errors import EngineClosed, EngineDead, InvalidRequest, QueueFull
from chairlift.models.decoder import Decoder
from chairlift.params import RequestOptions
from chairlift.scheduler import Scheduler, TokenEvent
from tests.engine.support import GREEDY, PROMPTS, assert_idle, core_of, make_llm, tokens_of

LETTERS = {ord(letter): 100.0 for letter in "abcdefgh"}  # as a bias: nothing else is drawn


# --- in and out


def test_a_text_texts_and_token_ids_are_prompts(tiny: str) -> None:
    with make_llm(tiny) as llm:
        (single,) = llm.generate("hi", GREEDY)
        several = llm.generate(["hi", "ho"], GREEDY)
        ids = llm.generate([[104, 105], [104, 111]], GREEDY)
        assert llm.generate([], GREEDY) == []
    assert (single.prompt, single.prompt_token_ids) == ("hi", [104, 105])
    assert [output.prompt for output in several] == ["hi", "ho"]
    assert [output.prompt for output in ids] == [None, None]
    assert tokens_of([single]) == tokens_of(several)[:1]
    assert tokens_of(ids) == tokens_of(several)


def test_outputs_stand_in_prompt_order_whoever_ends_first(tiny: str) -> None:
    params = [GREEDY.model_copy(update={"max_tokens": count}) for count in (30, 1, 17, 2, 9, 25, 3, 12)]
    with make_llm(tiny) as llm:
        outputs = llm.generate(PROMPTS, params)
        again = llm.generate(PROMPTS[:2], params[:2])
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert [len(tokens) for tokens in tokens_of(outputs)] == [30, 1, 17, 2, 9, 25, 3, 12]
    assert len({output.request_id for output in outputs + again}) == 10


def test_params_that_do_not_match_the_prompts_are_refused_with_both_numbers(tiny: str) -> None:
    with make_llm(tiny) as llm:
        with pytest.raises(InvalidRequest, match="2 prompts, but 3") as caught:
            llm.generate(["a", "b"], [GREEDY] * 3)
        with pytest.raises(InvalidRequest, match="1 prompts, but 0"):
            llm.generate(["a"], [])
        with pytest.raises(InvalidRequest, match="1 prompts, but 0"):
            llm.chat([{"role": "user", "content": "hi"}], [])
        assert_idle(llm)
    assert caught.value.param == "params"


def test_a_conversation_or_several_are_answered_through_the_template(tiny: str) -> None:
    first = [{"role": "user", "content": "hi"}]
    second = [
        {"role": "user", "content": "ho"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "y"},
    ]
    with make_llm(tiny) as llm:
        single = llm.chat(first, GREEDY)
        both = llm.chat([first, second], GREEDY)
        rendered = llm.generate([llm.inputs.encode_chat(first), llm.inputs.encode_chat(second)], GREEDY)
        with pytest.raises(InvalidRequest, match="at least one message"):
            llm.chat([first, []], GREEDY)
    assert tokens_of(single) == tokens_of(both)[:1]
    assert tokens_of(both) == tokens_of(rendered)


# --- sampling


def test_choices_differ_and_a_seed_repeats_them(tiny: str) -> None:
    params = SamplingParams(n=5, seed=11, max_tokens=10, ignore_eos=True)
    with make_llm(tiny) as llm:
        (first,) = llm.generate("hi", params)
        (second,) = llm.generate("hi", params)
        (single,) = llm.generate("hi", params.model_copy(update={"n": 1}))
    assert [choice.index for choice in first.outputs] == [0, 1, 2, 3, 4]
    assert len({tuple(choice.token_ids) for choice in first.outputs}) == 5
    assert tokens_of([first]) == tokens_of([second])
    assert tokens_of([single]) == tokens_of([first])[:1]


def test_without_a_seed_calls_differ_and_the_configurations_seed_repeats_the_whole(tiny: str) -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    runs = []
    for _ in range(2):
        with make_llm(tiny, seed=5) as llm:
            runs.append(tokens_of(llm.generate(["hi", "hi"], params) + llm.generate("hi", params)))
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 3


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(seed=9, max_tokens=12, ignore_eos=True),
        SamplingParams(seed=9, max_tokens=12, top_p=0.9, top_k=50, frequency_penalty=0.5, min_tokens=3),
    ],
)
def test_the_same_seed_gives_the_same_tokens_alone_and_in_a_crowd(tiny: str, params: SamplingParams) -> None:
    with make_llm(tiny) as llm:
        alone = [llm.generate([prompt], params)[0] for prompt in PROMPTS]
        crowd = llm.generate(PROMPTS, params)
    with make_llm(tiny, max_batch_size=8, max_steps_per_launch=1, max_num_batched_tokens=8) as other:
        chunked = other.generate(PROMPTS, params)
    assert tokens_of(crowd) == tokens_of(alone) == tokens_of(chunked)


def test_a_stop_string_ends_the_text_and_frees_the_slot_for_those_who_wait(tiny: str) -> None:
    free = SamplingParams(max_tokens=60, seed=1, logit_bias=LETTERS, ignore_eos=True)
    with make_llm(tiny) as llm:
        whole = [output.outputs[0].text for output in llm.generate(PROMPTS, free)]
        stops = [text[20:23] for text in whole]
        outputs = llm.generate(PROMPTS, [free.model_copy(update={"stop": [stop]}) for stop in stops])
        assert_idle(llm)
    for text, stop, output in zip(whole, stops, outputs, strict=True):
        (choice,) = output.outputs
        at = text.index(stop)
        assert choice.text == text[:at]
        assert bytes(choice.token_ids).decode() == text[: at + 3]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


# --- threads and terminals


def test_several_threads_take_turns(tiny: str) -> None:
    results: dict[int, list[list[int]]] = {}
    with make_llm(tiny) as llm:
        expected = tokens_of(llm.generate(PROMPTS, GREEDY))

        def generate(number: int) -> None:
            results[number] = tokens_of(llm.generate(PROMPTS, GREEDY))

        threads = [threading.Thread(target=generate, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert_idle(llm)
    assert results == {0: expected, 1: expected, 2: expected}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_there_is_a_progress_bar_on_a_terminal_only_and_only_if_wanted(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm_module, "_PROGRESS_DELAY_S", 0.0)
    shown = []
    with make_llm(tiny) as llm:
        for stream, use_tqdm in [(io.StringIO(), True), (Terminal(), False), (Terminal(), True)]:
            monkeypatch.setattr(sys, "stderr", stream)
            llm.generate(PROMPTS, GREEDY, use_tqdm=use_tqdm)
            shown.append(stream.getvalue())
    assert shown[:2] == ["", ""]
    assert "8/8" in shown[2]


# --- failures


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


def fail_forward(patch: pytest.MonkeyPatch, _: EngineCore, error: BaseException, after: int) -> None:
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


def fail_step(patch: pytest.MonkeyPatch, core: EngineCore, error: BaseException) -> None:
    """Between two steps."""
    patch.setattr(core, "step", stepping(core, error, after=2))


def fail_update(patch: pytest.MonkeyPatch, _: EngineCore, error: BaseException) -> None:
    """Before the tokens of a step are noted."""

    def raise_it(*_: object) -> list[TokenEvent]:
        raise error

    patch.setattr(Scheduler, "update", raise_it)


PLACES = pytest.mark.parametrize(
    "fail",
    [fail_step, fail_update, *(partial(fail_forward, after=after) for after in (0, 2, 5))],
    ids=["between steps", "before tokens are noted", "in the first forward pass", "in the third", "in the sixth"],
)
Fail = Callable[[pytest.MonkeyPatch, EngineCore, BaseException], None]


@PLACES
def test_an_interrupt_leaves_everything_free(tiny: str, monkeypatch: pytest.MonkeyPatch, fail: Fail) -> None:
    with make_llm(tiny) as llm:
        with monkeypatch.context() as patch:
            fail(patch, core_of(llm), KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, GREEDY)
        assert_idle(llm)


@PLACES
def test_after_a_failed_step_the_engine_is_dead_now_and_later(
    tiny: str, monkeypatch: pytest.MonkeyPatch, fail: Fail
) -> None:
    with make_llm(tiny) as llm:
        with monkeypatch.context() as patch:
            fail(patch, core_of(llm), RuntimeError("no luck"))
            with pytest.raises(EngineDead, match="RuntimeError: no luck") as caught:
                llm.generate(PROMPTS, GREEDY)
        assert isinstance(caught.value.__cause__, RuntimeError)
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
