"""One sequence: what it counts, which sampled tokens it keeps, and why it ends."""

from typing import Any

import pytest

from chairlift.params import FinishReason, SamplingParams
from chairlift.scheduler import Request, RequestState

EOS, OTHER_EOS, STOP, WORD = 1, 2, 3, 9


def make_request(num_prompt_tokens: int = 4, max_tokens: int = 6, **params: Any) -> RequestState:
    prompt = list(range(100, 100 + num_prompt_tokens))
    request = Request("a", prompt, SamplingParams(**params), max_tokens, 0, frozenset({EOS, OTHER_EOS}))
    return RequestState(request, arrival_time=0.0)


def test_a_new_request_has_its_prompt_to_compute() -> None:
    request = make_request(num_prompt_tokens=4, max_tokens=6)
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (4, 4, 0)
    assert (request.num_computed, request.num_uncomputed, request.num_remaining) == (0, 4, 6)
    assert (request.slot, request.finish_reason, request.stop_reason) == (None, None, None)


def test_counts_follow_the_tokens() -> None:
    request = make_request(num_prompt_tokens=4, max_tokens=6)
    request.num_computed = 4
    assert request.num_uncomputed == 0
    request.accept([WORD])
    assert (request.num_tokens, request.num_output_tokens) == (5, 1)
    assert (request.num_uncomputed, request.num_remaining) == (1, 5)
    assert request.token_ids == [100, 101, 102, 103, WORD]


def test_the_prompt_stays_as_it_was() -> None:
    prompt = [100, 101]
    request = Request("a", prompt, SamplingParams(), 4, 0)
    RequestState(request, arrival_time=0.0).accept([WORD])
    assert request.prompt_token_ids == prompt == [100, 101]


def test_all_tokens_are_kept_while_the_sequence_goes_on() -> None:
    request = make_request(max_tokens=6)
    assert request.accept([WORD, WORD, WORD]) == [WORD, WORD, WORD]
    assert request.finish_reason is None


def test_sampling_nothing_changes_nothing() -> None:
    request = make_request()
    assert request.accept([]) == []
    assert (request.num_output_tokens, request.finish_reason) == (0, None)


@pytest.mark.parametrize("end", [EOS, OTHER_EOS])
def test_an_end_token_is_kept_and_what_follows_is_dropped(end: int) -> None:
    request = make_request()
    assert request.accept([WORD, end, WORD, WORD]) == [WORD, end]
    assert request.token_ids[-2:] == [WORD, end]
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, None)


def test_a_stop_token_is_given_as_the_reason() -> None:
    request = make_request(stop_token_ids=[STOP, 7])
    assert request.accept([WORD, STOP, WORD]) == [WORD, STOP]
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, STOP)


def test_the_limit_ends_a_sequence_and_drops_the_rest() -> None:
    request = make_request(max_tokens=3)
    assert request.accept([WORD] * 5) == [WORD] * 3
    assert (request.finish_reason, request.stop_reason) == (FinishReason.LENGTH, None)
    assert request.num_remaining == 0


def test_an_end_token_in_the_last_place_is_a_stop() -> None:
    request = make_request(max_tokens=3)
    request.accept([WORD, WORD, EOS])
    assert request.finish_reason is FinishReason.STOP


def test_ignoring_the_end_token_leaves_stop_tokens_in_force() -> None:
    request = make_request(ignore_eos=True, stop_token_ids=[STOP])
    assert request.accept([EOS, OTHER_EOS, STOP, WORD]) == [EOS, OTHER_EOS, STOP]
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, STOP)


def test_an_ignored_end_token_may_be_a_stop_token_of_the_caller() -> None:
    request = make_request(ignore_eos=True, stop_token_ids=[EOS])
    assert request.accept([WORD, EOS, WORD]) == [WORD, EOS]
    assert request.stop_reason == EOS


@pytest.mark.parametrize(
    ("min_tokens", "kept"),
    [(0, [EOS]), (1, [EOS, EOS]), (3, [EOS, EOS, EOS, EOS]), (6, [EOS] * 6)],
)
def test_an_end_token_counts_only_after_min_tokens_others(min_tokens: int, kept: list[int]) -> None:
    request = make_request(max_tokens=6, min_tokens=min_tokens)
    assert request.accept([EOS] * 8) == kept


def test_min_tokens_holds_for_stop_tokens_and_over_several_launches() -> None:
    request = make_request(min_tokens=2, stop_token_ids=[STOP])
    ends = []
    for _ in range(3):
        assert request.accept([STOP]) == [STOP]
        ends.append((request.finish_reason, request.stop_reason))
    assert ends == [(None, None), (None, None), (FinishReason.STOP, STOP)]


def test_with_min_tokens_at_the_limit_the_reason_is_the_length() -> None:
    request = make_request(max_tokens=2, min_tokens=2)
    request.accept([WORD, EOS])
    assert (request.finish_reason, request.stop_reason) == (FinishReason.LENGTH, None)


def test_the_tokens_that_may_end_a_sequence_are_known_to_the_sampler() -> None:
    assert make_request(stop_token_ids=[STOP]).end_token_ids == {EOS, OTHER_EOS, STOP}
    assert make_request(stop_token_ids=[STOP], ignore_eos=True).end_token_ids == {STOP}
