"""Guesses at what comes next: what followed, earlier in the text, the tokens that it ends with."""

import random

import pytest

from chairlift.scheduler import Drafter, Guess
from chairlift.scheduler.drafting import NO_GUESS


def guess(tokens: list[int], num_tokens: int = 4, prediction: list[int] | None = None) -> Guess:
    return Drafter(len(tokens), prediction or []).guess(tokens, num_tokens)


@pytest.mark.parametrize(
    ("tokens", "expected", "num_matched"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5, 6], 2),
        ([1, 2, 3, 9, 1, 2], [3, 9, 1, 2], 2),
        ([5, 1, 2, 3, 4, 7, 8, 1, 2, 3, 4, 6, 6, 5, 1, 2, 3, 4], [7, 8, 1, 2], 5),  # the longest, not the newest
        ([1, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2, 8], 2),  # the newest of equals, and that once more
        ([1, 2, 3, 4], [], 0),
        ([1, 2, 3, 1], [], 0),  # one token is no reason
        ([7], [], 0),
    ],
)
def test_the_longest_end_that_was_there_before_says_what_comes(
    tokens: list[int], expected: list[int], num_matched: int
) -> None:
    found = guess(tokens)
    assert (list(found.tokens), found.num_matched) == (expected, num_matched)


def test_what_repeats_itself_goes_on_so() -> None:
    assert guess([4, 5, 6, 4, 5, 6, 4, 5], 7).tokens == [6, 4, 5, 6, 4, 5, 6]


def test_an_answer_that_begins_as_predicted_is_guessed_to_go_on_so_to_the_end_of_the_prediction() -> None:
    drafter = Drafter(3, [10, 11, 12, 13])
    assert drafter.guess([1, 2, 3], 4) == NO_GUESS  # there is no answer yet
    assert drafter.guess([1, 2, 3, 10], 2) == Guess([11, 12], 16)
    assert drafter.guess([1, 2, 3, 10, 11, 12], 4) == Guess([13], 16)
    assert not drafter.guess([1, 2, 3, 10, 11, 12, 13], 4).tokens


def test_an_answer_that_left_the_prediction_finds_its_way_back() -> None:
    drafter = Drafter(1, [10, 11, 12, 13, 14, 15, 16, 17])
    assert drafter.guess([1, 10, 50, 51, 14], 3) == NO_GUESS
    assert drafter.guess([1, 10, 50, 51, 14, 15], 3).tokens == [16, 17]


def test_tokens_that_come_later_change_nothing_that_a_new_drafter_would_not_know() -> None:
    rng = random.Random(3)
    tokens = [rng.randrange(6) for _ in range(400)]
    one = Drafter(100)
    for end in range(100, 400, 7):
        found, anew = one.guess(tokens[:end], 8), Drafter(100).guess(tokens[:end], 8)
        assert found.num_matched >= anew.num_matched > 0
        if found.num_matched == anew.num_matched == 32:
            assert found.tokens == anew.tokens


def test_a_long_prompt_is_indexed_in_several_goes() -> None:
    tokens = [*range(5000), 4000, 4001]
    drafter = Drafter(5002)
    found = [drafter.guess(tokens, 2).tokens for _ in range(6)]
    assert (found[0], found[-1]) == ((), [4002, 4003])
