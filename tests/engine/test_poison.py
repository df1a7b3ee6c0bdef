"""One request that cannot be computed ends alone: the others' bits, its slot's next owner and the engine are sound."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.engine.text.inputs import Generation
from chairlift.params import RequestOutput, StructuredOutputs
from chairlift.scheduler import Scheduler
from tests.engine.support import GREEDY, PROMPTS, assert_idle, core_of, make_llm, state_of, tokens_of

POISON = 255  # the token whose embedding is no number; none of PROMPTS has it
AVOIDING = {POISON: -100.0}  # so that a sound request never says it
SCORED = GREEDY.model_copy(update={"logprobs": 3, "logit_bias": AVOIDING})
SAID = "no valid token could be computed for this sequence: its logits are not numbers, or none was allowed"

POISONED_PROMPTS = [[POISON], [1, 2, POISON, 3], [POISON, *range(40)], [*range(40), POISON]]


@contextmanager
def poisoned(llm: LLM, value: float = torch.nan) -> Iterator[None]:
    """Meanwhile prompts with that token cannot be computed; all others can."""
    weight = core_of(llm)._runner._forward._model.model.embed_tokens.weight.data  # type: ignore[attr-defined]
    before = weight[POISON].clone()
    weight[POISON] = value
    try:
        yield
    finally:
        weight[POISON] = before


def assert_failed(output: RequestOutput, num_tokens: int = 0) -> None:
    (choice,) = output.outputs
    assert (choice.finish_reason, choice.error, len(choice.token_ids)) == ("abort", SAID, num_tokens)


def assert_all_finite(llm: LLM) -> None:
    cache = core_of(llm).cache
    cache.settle()  # as before the next launch
    for blocks in cache.blocks:
        assert blocks.isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("bad", POISONED_PROMPTS)
@pytest.mark.parametrize("steps", [1, 4])
def test_the_others_get_bit_for_bit_what_they_get_beside_a_sound_request(
    tiny: str, bad: list[int], value: float, steps: int
) -> None:
    prompts = [PROMPTS[0], bad, PROMPTS[3], PROMPTS[4]]
    params = [SCORED, GREEDY.model_copy(update={"max_tokens": 1}), SCORED, SCORED]  # a sound one ends as early
    # Reused prompts are not computed in the batch in which they were, of which the torch backend's bits tell.
    with make_llm(tiny, max_steps_per_launch=steps, enable_prefix_caching=False) as llm:
        sound = llm.generate(prompts, params)
        with poisoned(llm, value):
            mixed = llm.generate(prompts, params)
        assert_failed(mixed.pop(1))
        sound.pop(1)
        assert [output.outputs for output in mixed] == [output.outputs for output in sound]
        assert_idle(llm)
        assert_all_finite(llm)


@pytest.mark.parametrize("budget", [3, 8, 64])
def test_slots_that_held_poison_serve_the_next_as_if_new(tiny: str, budget: int) -> None:
    sound = [PROMPTS[1], PROMPTS[3], PROMPTS[6], PROMPTS[7], PROMPTS[2], PROMPTS[5]]
    pairs = zip(POISONED_PROMPTS, sound, strict=False)
    mixed = [prompt for pair in pairs for prompt in pair] + sound[4:]
    with make_llm(tiny, max_num_batched_tokens=budget) as llm:
        expected = tokens_of(llm.generate(sound, SCORED))
        with poisoned(llm):
            outputs = llm.generate(mixed, SCORED)
            again = tokens_of(llm.generate(sound, SCORED))
        assert_all_finite(llm)
    for output in outputs:
        if POISON in output.prompt_token_ids:
            assert_failed(output)
    assert tokens_of(output for output in outputs if POISON not in output.prompt_token_ids) == expected
    assert again == expected


@pytest.mark.parametrize("steps", [1, 4])
def test_one_that_is_spoiled_by_its_own_token_keeps_what_came_before(tiny: str, steps: int) -> None:
    saying_it = GREEDY.model_copy(update={"logit_bias": {POISON: 100.0}})
    with make_llm(tiny, max_steps_per_launch=steps) as llm:
        expected = tokens_of(llm.generate(PROMPTS[:2], SCORED))
        with poisoned(llm):
            first, bad, second = llm.generate([PROMPTS[0], [104, 105], PROMPTS[1]], [SCORED, saying_it, SCORED])
        assert bad.outputs[0].token_ids == [POISON]
        assert_failed(bad, num_tokens=1)
        assert tokens_of([first, second]) == expected
        assert_idle(llm)
        assert_all_finite(llm)


CASES: dict[str, dict[str, Any]] = {
    "random": {"temperature": 1.0, "seed": 1},
    "filtered": {"temperature": 1.0, "seed": 1, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    "penalised": {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 1.0},
    "scored": {"logprobs": 5, "prompt_logprobs": 5},
    "structured": {"structured_outputs": StructuredOutputs(regex="[a-z]{20}")},
    "only the prompt": {"max_tokens": 0, "prompt_logprobs": 2},
    "with min_tokens": {"min_tokens": 5, "ignore_eos": False},
}


@pytest.mark.parametrize("case", CASES)
def test_whatever_it_asked_for_it_ends_alone(tiny: str, case: str) -> None:
    params = GREEDY.model_copy(update=CASES[case])
    with make_llm(tiny) as llm:
        expected = llm.generate([PROMPTS[0], PROMPTS[1]], params)
        with poisoned(llm):
            first, bad, second = llm.generate([PROMPTS[0], [1, POISON, 2], PROMPTS[1]], params)
            assert_failed(bad)
            assert tokens_of([first, second]) == tokens_of(expected)
        assert [output.outputs for output in llm.generate([PROMPTS[0], PROMPTS[1]], params)] == [
            output.outputs for output in expected
        ]
        assert_idle(llm)
        assert_all_finite(llm)


def test_all_choices_of_a_poisoned_prompt_fail_and_say_so(tiny: str) -> None:
    with make_llm(tiny) as llm, poisoned(llm):
        (output,) = llm.generate([[POISON]], GREEDY.model_copy(update={"n": 5}))
        assert [choice.error for choice in output.outputs] == [SAID] * 5
        assert_idle(llm)


# --- aborted before anybody could know


def begun(llm: LLM, prompt: list[int], num_steps: int) -> Generation:
    """A generation of which that many steps were taken, with eight tokens each."""
    core = core_of(llm)
    generation = llm.inputs.prepare("bad", prompt, GREEDY)
    core.add(*generation.requests)
    for _ in range(num_steps):
        assert core.step() == []
    return generation


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_a_poisoned_prompt_that_is_aborted_half_way_leaves_a_clean_slot(tiny: str, num_steps: int) -> None:
    with make_llm(tiny, max_num_batched_tokens=8) as llm:
        core = core_of(llm)
        with poisoned(llm):
            bad = begun(llm, [POISON] * 40, num_steps)
            assert not core.cache.blocks[0].isfinite().all()
            event = core.abort(bad.requests[0].request_id)
        assert event is not None
        assert event.finish_reason == "abort"
        assert_all_finite(llm)
        assert_idle(llm)


@pytest.mark.parametrize("prompt", [[POISON, 1, 2], [POISON] * 40])
def test_a_poisoned_step_that_is_interrupted_leaves_a_clean_slot(
    tiny: str, monkeypatch: pytest.MonkeyPatch, prompt: list[int]
) -> None:
    """Keys and values were written, but the request does not count them."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with make_llm(tiny, max_num_batched_tokens=8) as llm:
        expected = tokens_of(llm.generate(PROMPTS, SCORED))
        with poisoned(llm), monkeypatch.context() as patch:
            patch.setattr(Scheduler, "update", interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([prompt], GREEDY)
        assert tokens_of(llm.generate(PROMPTS, SCORED)) == expected
        assert_all_finite(llm)


@pytest.mark.parametrize("caching", [False, True])
def test_what_is_computed_after_the_end_of_a_sequence_leaves_a_clean_slot(tiny: str, caching: bool) -> None:
    """The second token is poison and ends it, in the first of four steps."""
    ending = {"logit_bias": {POISON: 100.0}, "stop_token_ids": [POISON], "min_tokens": 1}
    with make_llm(tiny, max_steps_per_launch=4, enable_prefix_caching=caching) as llm, poisoned(llm):
        (output,) = llm.generate([PROMPTS[0]], GREEDY.model_copy(update=ending))
        assert (output.outputs[0].finish_reason, output.outputs[0].error) == ("stop", None)
        assert_all_finite(llm)


def test_a_follower_of_a_poisoned_prompt_that_is_aborted_before_it_says_anything_leaves_a_clean_slot(tiny: str) -> None:
    shared = [POISON, *range(20, 51)]
    with make_llm(tiny, max_num_batched_tokens=16) as llm:
        core = core_of(llm)
        with poisoned(llm):
            leader = llm.inputs.prepare("leader", shared + list(range(60, 160)), GREEDY)
            follower = llm.inputs.prepare("follower", shared + list(range(160, 250)), GREEDY)
            core.add(*leader.requests, *follower.requests)
            while not state_of(core, follower.requests[0]).num_reused:
                core.step()
            core.abort(follower.requests[0].request_id)
            core.abort(leader.requests[0].request_id)  # which still computes what it shares with nobody
        assert core.cache.warm == {}
        assert_all_finite(llm)
        assert_idle(llm)


# --- logits that are no numbers, though what led to them was


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("params", [SCORED, SCORED.model_copy(update={"temperature": 1.0, "seed": 3, "top_p": 0.9})])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_row_without_usable_logits_fails_and_no_other(
    tiny: str, monkeypatch: pytest.MonkeyPatch, value: float, params: SamplingParams, row: int
) -> None:
    with make_llm(tiny, max_steps_per_launch=1, enable_prefix_caching=False) as llm:
        lengths = [5 if index == row else 12 for index in range(3)]
        each = [params.model_copy(update={"max_tokens": length}) for length in lengths]  # a sound one ends as early
        expected = llm.generate(PROMPTS[:3], each)
        forward = core_of(llm)._runner._forward
        logits, num_calls = forward.logits, 0

        def spoil(hidden: torch.Tensor) -> torch.Tensor:
            nonlocal num_calls
            num_calls += 1
            result = logits(hidden)
            if num_calls == 5:
                result[row] = value
            return result

        monkeypatch.setattr(forward, "logits", spoil)
        outputs = llm.generate(PROMPTS[:3], each)
        assert_failed(outputs[row], num_tokens=4)
        assert outputs[row].outputs[0].token_ids == expected[row].outputs[0].token_ids[:4]
        assert len(outputs[row].outputs[0].logprobs or []) == 4
        for other in {0, 1, 2} - {row}:
            assert outputs[other].outputs == expected[other].outputs
        monkeypatch.undo()
        assert_idle(llm)
