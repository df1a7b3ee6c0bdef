"""One sequence: what it counts, which sampled tokens it keeps, and why it ends."""

from typing import Any

import pytest

from chairlift.params import FinishReason, SamplingParams
from chairlift.scheduler import Request, RequestState

EOS, OTHER_EOS, STOP, WORD = 1, 2, 3, 9


def make_request(max_tokens: int = 6, **params: Any) -> RequestState:
    request = Request("a", [100, 101, 102, 103], SamplingParams(**params), max_tokens, 0, frozenset({EOS, OTHER_EOS}))
    return RequestState(request, arrival_time=0.0)


def test_counts_follow_the_tokens_and_the_prompt_stays_as_it_was() -> None:
    prompt = [100, 101, 102, 103]
    asked = Request("a", prompt, SamplingParams(), 6, 0)
    request = RequestState(asked, arrival_time=0.0)
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (4, 4, 0)
    assert (request.num_computed, request.num_uncomputed, request.num_remaining) == (0, 4, 6)
    assert (request.slot, request.finish_reason, request.stop_reason) == (None, None, None)
    request.num_computed = 4
    assert request.num_uncomputed == 0
    request.accept([WORD])
    assert (request.num_tokens, request.num_output_tokens) == (5, 1)
    assert (request.num_uncomputed, request.num_remaining) == (1, 5)
    assert request.token_ids == [100, 101, 102, 103, WORD]
    assert asked.prompt_token_ids == prompt == [100, 101, 102, 103]


@pytest.mark.parametrize(
    ("params", "sampled", "kept", "finish_reason", "stop_reason"),
    [
        ({}, [], [], None, None),
        ({}, [WORD, WORD, WORD], [WORD, WORD, WORD], None, None),
        ({}, [WORD, EOS, WORD, WORD], [WORD, EOS], FinishReason.STOP, None),
        ({}, [WORD, OTHER_EOS, WORD, WORD], [WORD, OTHER_EOS], FinishReason.STOP, None),
        ({"stop_token_ids": [STOP, 7]}, [WORD, STOP, WORD], [WORD, STOP], FinishReason.STOP, STOP),
        ({"max_tokens": 3}, [WORD] * 5, [WORD] * 3, FinishReason.LENGTH, None),
        ({"max_tokens": 3}, [WORD, WORD, EOS], [WORD, WORD, EOS], FinishReason.STOP, None),
        # Ignoring the end tokens leaves stop tokens in force, even if they are the same.
        ({"ignore_eos": True, "stop_token_ids": [STOP]}, [EOS, STOP, WORD], [EOS, STOP], FinishReason.STOP, STOP),
        ({"ignore_eos": True, "stop_token_ids": [EOS]}, [WORD, EOS, WORD], [WORD, EOS], FinishReason.STOP, EOS),
        # An end token counts only after `min_tokens` others.
        ({"min_tokens": 0}, [EOS] * 8, [EOS], FinishReason.STOP, None),
        ({"min_tokens": 1}, [EOS] * 8, [EOS] * 2, FinishReason.STOP, None),
        ({"min_tokens": 3}, [EOS] * 8, [EOS] * 4, FinishReason.STOP, None),
        ({"min_tokens": 6}, [EOS] * 8, [EOS] * 6, FinishReason.LENGTH, None),
    ],
)
def test_tokens_are_kept_up_to_the_one_that_ends_the_sequence(
    params: dict[str, Any],
    sampled: list[int],
    kept: list[int],
    finish_reason: FinishReason | None,
    stop_reason: int | None,
) -> None:
    request = make_request(**params)
    assert request.accept(sampled) == request.token_ids[4:] == kept
    assert (request.finish_reason, request.stop_reason) == (finish_reason, stop_reason)


def test_min_tokens_holds_for_stop_tokens_and_over_several_launches() -> None:
    request = make_request(min_tokens=2, stop_token_ids=[STOP])
    ends = []
    for _ in range(3):
        assert request.accept([STOP]) == [STOP]
        ends.append((request.finish_reason, request.stop_reason))
    assert ends == [(None, None), (None, None), (FinishReason.STOP, STOP)]


def test_the_tokens_that_may_end_a_sequence_are_known_to_the_sampler() -> None:
    assert make_request(stop_token_ids=[STOP]).end_token_ids == {EOS, OTHER_EOS, STOP}
    assert make_request(stop_token_ids=[STOP], ignore_eos=True).end_token_ids == {STOP}
