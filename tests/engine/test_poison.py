"""One request that cannot be computed ends alone: the others' bits, its slot's next owner and the engine are sound."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.engine.execution.runner import Launch
from chairlift.engine.parts import Parts
from chairlift.errors import EngineDead
from chairlift.models import load_forward
from chairlift.models.decoder import Decoder
from chairlift.params import RequestOutput, StructuredOutputs
from chairlift.scheduler import Scheduler
from tests.engine import support
from tests.engine.support import GREEDY, PROMPTS, assert_idle, core_of, make_tiny_checkpoint, state_of, tokens_of
from tests.support.engines import WrappedForward, ahead

POISON = 255  # the token whose embedding is no number; none of PROMPTS has it
SAID = "no valid token could be computed for this sequence: its logits are not finite, or no token was allowed"
POISONED_PROMPTS = [[POISON], [1, 2, POISON, 3], [POISON, *range(40)], [*range(40), POISON]]


def greedy(**changes: Any) -> SamplingParams:
    return GREEDY.model_copy(update=changes)


AVOIDING = greedy(logit_bias={POISON: -100.0})  # so that a sound request never says it
SAYING_IT = greedy(logit_bias={POISON: 100.0})
SCORED = AVOIDING.model_copy(update={"logprobs": 3})
make_llm = partial(support.make_llm, attention_backend="torch")  # whose weights are where `poisoned` finds them
NUMS_AHEAD = [0, pytest.param(1, marks=pytest.mark.slow), 2]


@contextmanager
def poisoned(llm: LLM, value: float = torch.nan) -> Iterator[None]:
    """Meanwhile prompts with that token cannot be computed; all others can."""
    weight = core_of(llm).executor.forward._model.model.embed_tokens.weight.data  # type: ignore[attr-defined]
    before = weight[POISON].clone()
    weight[POISON] = value
    try:
        yield
    finally:
        weight[POISON] = before


@contextmanager
def failing(llm: LLM, place: str, error: BaseException, after: int) -> Iterator[None]:
    """The call of `place` after that many raises: a launch when it has written to the slots, others at once."""
    owners: dict[str, Any] = {
        "launch": core_of(llm).executor.runner,
        "forward": Decoder,
        "wait": Launch,
        "update": Scheduler,
    }
    owners["process"] = llm._outputs
    call, num_left = getattr(owners[place], place), after

    def call_or_raise(*args: Any) -> Any:
        nonlocal num_left
        num_left -= 1
        result = call(*args) if num_left != -1 or place == "launch" else None
        if num_left == -1:
            raise error
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owners[place], place, call_or_raise)
        yield


def assert_failed(output: RequestOutput, num_tokens: int = 0) -> None:
    for choice in output.outputs:
        assert (choice.finish_reason, choice.error, len(choice.token_ids)) == ("abort", SAID, num_tokens)


def assert_all_finite(llm: LLM) -> None:
    cache = core_of(llm).cache
    cache.settle()  # as before the next launch
    assert all(blocks.isfinite().all() for blocks in cache.blocks)


def assert_clean(llm: LLM) -> None:
    assert_idle(llm)
    assert_all_finite(llm)


def choices_of(outputs: Iterable[RequestOutput]) -> list[Any]:
    return [output.outputs for output in outputs]


@pytest.mark.parametrize("steps", [1, 4])
def test_the_others_get_bit_for_bit_what_they_get_beside_a_sound_request(tiny: str, steps: int) -> None:
    params = [SCORED, greedy(max_tokens=1), SCORED, SCORED]  # a sound one ends as early
    # Reused prompts are not computed in the batch in which they were, of which the torch backend's bits tell.
    with make_llm(tiny, max_steps_per_launch=steps, enable_prefix_caching=False) as llm:
        for bad in POISONED_PROMPTS:
            prompts = [PROMPTS[0], bad, PROMPTS[3], PROMPTS[4]]
            first, _, *rest = llm.generate(prompts, params)
            for value in (torch.nan, torch.inf):
                with poisoned(llm, value):
                    mixed = llm.generate(prompts, params)
                assert_failed(mixed.pop(1))
                assert choices_of(mixed) == choices_of([first, *rest])
                assert_clean(llm)


SLOW_SIZES = [pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(1, 8), (4, 64)]]


@pytest.mark.parametrize("num_ahead", NUMS_AHEAD)
@pytest.mark.parametrize(("steps", "budget"), [(4, 8), *SLOW_SIZES])
def test_slots_that_held_poison_serve_the_next_as_if_new(tiny: str, num_ahead: int, steps: int, budget: int) -> None:
    sound = [PROMPTS[1], PROMPTS[3], PROMPTS[6], PROMPTS[7], PROMPTS[2], PROMPTS[5]]
    says_it = [104, 105]  # what came before its own token is kept
    bad = [*POISONED_PROMPTS, [POISON] * 30, says_it]
    mixed = [prompt for pair in zip(bad, sound, strict=True) for prompt in pair]
    params = [SAYING_IT if prompt is says_it else SCORED for prompt in mixed]
    with make_llm(tiny, ahead(num_ahead), max_steps_per_launch=steps, max_num_batched_tokens=budget) as llm:
        expected = tokens_of(llm.generate(sound, SCORED))
        with poisoned(llm):
            outputs = llm.generate(mixed, params)
            again = tokens_of(llm.generate(sound, SCORED))
        for output in outputs[:-2:2]:
            assert_failed(output)
        assert_failed(outputs[-2], num_tokens=1)
        assert outputs[-2].outputs[0].token_ids == [POISON]
        assert tokens_of(outputs[1::2]) == again == expected
        assert_clean(llm)


RECURRENT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@pytest.mark.parametrize("num_ahead", [0, 2])
def test_states_of_poison_reach_neither_others_nor_the_next(tmp_path: Path, num_ahead: int) -> None:
    """Nor the same prompts when they are sound again: no state that poison left is gone on from."""
    model = make_tiny_checkpoint(tmp_path, **RECURRENT)
    early, late = [POISON, *range(100)], [*range(80), POISON, *range(80, 120)]
    bad, sound = [early, late, [*late, 1, 2]], [[*late[:80], 7, 8, 9], PROMPTS[3], [*late[:70], 5]]
    mixed = [prompt for pair in zip(bad, sound, strict=True) for prompt in pair]
    sizes: dict[str, Any] = {"max_num_batched_tokens": 16, "state_snapshot_bytes": 2**18, "batch_invariant": True}
    with make_llm(model, ahead(num_ahead), **sizes, enable_prefix_caching=False) as forgetful:
        expected = choices_of(forgetful.generate(mixed, SCORED))
    with make_llm(model, ahead(num_ahead), **sizes) as llm:
        for _ in range(2):
            with poisoned(llm):
                outputs = llm.generate(mixed, SCORED)
            for output in outputs[::2]:
                assert_failed(output)
            assert choices_of(outputs[1::2]) == expected[1::2]
            assert_clean(llm)
        again = llm.generate(mixed, SCORED)
        assert choices_of(again) == expected
        assert sum(output.num_cached_tokens for output in again) > 200
        assert_clean(llm)


CASES: dict[str, dict[str, Any]] = {
    "random": {"temperature": 1.0, "seed": 1},
    "filtered": {"temperature": 1.0, "seed": 1, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    "penalised": {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 1.0},
    "scored": {"logprobs": 5, "prompt_logprobs": 5},
    "structured": {"structured_outputs": StructuredOutputs(regex="[a-z]{20}")},
    "only the prompt": {"max_tokens": 0, "prompt_logprobs": 2},
    "several choices": {"n": 3, "temperature": 1.0, "seed": 2},
    "with min_tokens": {"min_tokens": 5, "ignore_eos": False},
}


@pytest.mark.parametrize("case", CASES)
def test_whatever_it_asked_for_it_ends_alone(tiny: str, case: str) -> None:
    params = greedy(**CASES[case])
    with make_llm(tiny) as llm:
        expected = llm.generate(PROMPTS[:2], params)
        with poisoned(llm):
            first, bad, second = llm.generate([PROMPTS[0], [1, POISON, 2], PROMPTS[1]], params)
            assert_failed(bad)
            assert tokens_of([first, second]) == tokens_of(expected)
        assert choices_of(llm.generate(PROMPTS[:2], params)) == choices_of(expected)
        assert_clean(llm)


@pytest.mark.parametrize("num_ahead", NUMS_AHEAD)
def test_a_poisoned_prompt_that_is_aborted_half_way_leaves_a_clean_slot(tiny: str, num_ahead: int) -> None:
    with make_llm(tiny, ahead(num_ahead), max_num_batched_tokens=8) as llm:
        core = core_of(llm)
        for num_steps in range(1, 8):
            with poisoned(llm):
                (bad,) = llm.inputs.prepare("bad", [POISON] * 40, GREEDY).requests
                core.add(bad)
                heard = [event for _ in range(num_steps) for event in core.step()]
                assert [event.error for event in heard] == [SAID] * (num_steps > 4 + num_ahead)
                assert heard or not core.cache.blocks[0].isfinite().all()
                aborted = core.abort(bad.request_id)
                assert (aborted.finish_reason if aborted else None) == (None if heard else "abort")
                while core.has_work:
                    assert core.step() == []
            assert_clean(llm)


@pytest.mark.parametrize("num_ahead", NUMS_AHEAD)
@pytest.mark.parametrize(
    "place",
    ["launch", "update", *(pytest.param(each, marks=pytest.mark.slow) for each in ("forward", "wait", "process"))],
)
def test_an_interrupt_leaves_nothing_in_flight_and_the_next_call_is_as_if_new(
    tiny: str, place: str, num_ahead: int
) -> None:
    prompts = PROMPTS[:4]
    with make_llm(tiny, ahead(num_ahead), max_num_batched_tokens=8) as llm:
        expected = tokens_of(llm.generate(prompts, SCORED))
        for after in (0, 1, 5):
            with poisoned(llm), failing(llm, place, KeyboardInterrupt(), after), pytest.raises(KeyboardInterrupt):
                llm.generate([[POISON, 1], [POISON] * 40, *prompts], SCORED)
            if place != "process":  # what was in flight between two steps ends with the next call
                assert_all_finite(llm)
            assert tokens_of(llm.generate(prompts, SCORED)) == expected
            assert_clean(llm)


@pytest.mark.parametrize("num_ahead", NUMS_AHEAD)
@pytest.mark.parametrize("place", ["launch", "forward", "wait", "update"])
def test_a_launch_that_fails_takes_those_in_flight_with_it(tiny: str, place: str, num_ahead: int) -> None:
    for after in (0, 1, 5):
        with make_llm(tiny, ahead(num_ahead), max_steps_per_launch=1) as llm:
            with failing(llm, place, RuntimeError("no luck"), after), pytest.raises(EngineDead) as caught:
                llm.generate(PROMPTS, GREEDY)
            assert "a step failed: RuntimeError: no luck" in str(caught.value)
            assert isinstance(caught.value.__cause__, RuntimeError)
            core_of(llm).check()
            assert (core_of(llm).has_work, core_of(llm).cache.slots_remaining) == (False, 3)
            assert_all_finite(llm)
            with pytest.raises(EngineDead, match="no luck"):
                llm.generate("hi", GREEDY)


@pytest.mark.parametrize("caching", [False, True])
def test_what_is_computed_after_the_end_of_a_sequence_leaves_a_clean_slot(tiny: str, caching: bool) -> None:
    """The second token is poison and ends it, in the first of four steps."""
    ending = SAYING_IT.model_copy(update={"stop_token_ids": [POISON], "min_tokens": 1})
    with make_llm(tiny, max_steps_per_launch=4, enable_prefix_caching=caching) as llm, poisoned(llm):
        (output,) = llm.generate([PROMPTS[0]], ending)
        assert (output.outputs[0].finish_reason, output.outputs[0].error) == ("stop", None)
        assert_all_finite(llm)


def test_a_follower_of_a_poisoned_prompt_that_is_aborted_before_it_says_anything_leaves_a_clean_slot(tiny: str) -> None:
    shared = [POISON, *range(20, 51)]
    with make_llm(tiny, max_num_batched_tokens=16) as llm:
        core = core_of(llm)
        with poisoned(llm):
            (leader,) = llm.inputs.prepare("leader", shared + list(range(60, 160)), GREEDY).requests
            (follower,) = llm.inputs.prepare("follower", shared + list(range(160, 250)), GREEDY).requests
            core.add(leader, follower)
            while not state_of(core, follower).num_reused:
                core.step()
            core.abort(follower.request_id)
            core.abort(leader.request_id)  # which still computes what it shares with nobody
        assert core.cache.warm == {}
        assert_clean(llm)


@pytest.mark.parametrize("params", [SCORED, SCORED.model_copy(update={"temperature": 1.0, "seed": 3, "top_p": 0.9})])
@pytest.mark.parametrize("row", [0, 2])
def test_a_row_without_usable_logits_fails_and_no_other(tiny: str, params: SamplingParams, row: int) -> None:
    spoilt: list[float] = []  # the value of the row's logits in the fifth step that follows

    class Spoiling(WrappedForward):
        num_calls = 0

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            result = super().logits(hidden)
            self.num_calls += bool(spoilt)
            if self.num_calls == 5:
                result[row] = spoilt.pop()
                self.num_calls = 0
            return result

    parts = Parts(load_forward=lambda *given: Spoiling(load_forward(*given)))
    with make_llm(tiny, parts, max_steps_per_launch=1, enable_prefix_caching=False) as llm:
        lengths = [5 if index == row else 12 for index in range(3)]
        each = [params.model_copy(update={"max_tokens": length}) for length in lengths]  # a sound one ends as early
        expected = llm.generate(PROMPTS[:3], each)
        for value in (torch.nan, torch.inf, -torch.inf):
            spoilt.append(value)
            outputs = llm.generate(PROMPTS[:3], each)
            assert_failed(outputs[row], num_tokens=4)
            assert outputs[row].outputs[0].token_ids == expected[row].outputs[0].token_ids[:4]
            assert len(outputs[row].outputs[0].logprobs or []) == 4
            assert all(outputs[other].outputs == expected[other].outputs for other in {0, 1, 2} - {row})
            assert_idle(llm)
