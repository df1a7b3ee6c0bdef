"""Guesses at what comes next: what followed, earlier in the text, the tokens that it ends with."""

import random

import pytest

from chairlift.scheduler import Drafter, Guess
from chairlift.scheduler.drafting import NO_GUESS, Answers, IndexBudget, Rates


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
        ([4, 5, 6, 4, 5], [6, 4, 5, 6], 2),  # what repeats itself goes on so
    ],
)
def test_the_longest_end_that_was_there_before_says_what_comes(
    tokens: list[int], expected: list[int], num_matched: int
) -> None:
    found = guess(tokens)
    assert (list(found.tokens), found.num_matched) == (expected, num_matched)


def test_an_answer_that_begins_as_predicted_is_guessed_to_go_on_so_to_the_end_of_the_prediction() -> None:
    drafter = Drafter(3, [10, 11, 12, 13])
    assert drafter.guess([1, 2, 3], 4) == NO_GUESS  # there is no answer yet
    assert drafter.guess([1, 2, 3, 10], 2) == Guess([11, 12], 32)
    assert drafter.guess([1, 2, 3, 10, 11, 12], 4) == Guess([13], 32)
    assert not drafter.guess([1, 2, 3, 10, 11, 12, 13], 4).tokens


def test_an_answer_that_left_the_prediction_finds_its_way_back() -> None:
    drafter = Drafter(1, [10, 11, 12, 13, 14, 15, 16, 17])
    assert drafter.guess([1, 10, 50, 51, 14], 3) == NO_GUESS
    assert drafter.guess([1, 10, 50, 51, 14, 15], 3) == Guess([16, 17], 16)


def test_tokens_that_come_later_change_nothing_that_a_new_drafter_would_not_know() -> None:
    rng = random.Random(3)
    tokens = [rng.randrange(6) for _ in range(400)]
    one = Drafter(100)
    for end in range(100, 400, 7):
        found, anew = one.guess(tokens[:end], 8), Drafter(100).guess(tokens[:end], 8)
        assert found.num_matched >= anew.num_matched > 0
        if found.num_matched == anew.num_matched == 32:
            assert found.tokens == anew.tokens


PROMPT, ANSWER, OTHER = list(range(100, 140)), list(range(200, 260)), list(range(300, 305))


def continued(*continuations: list[int], prediction: list[int] | None = None) -> Drafter:
    drafter = Drafter(len(PROMPT), prediction or [])
    drafter.add_continuations(PROMPT, continuations)
    return drafter


def test_what_was_said_behind_the_prompt_is_followed_the_newest_first_and_each_to_its_end() -> None:
    drafter = continued(OTHER, ANSWER)
    assert drafter.guess(PROMPT, 2) == Guess(OTHER[:2], 32)
    assert drafter.guess([*PROMPT, 200], 2) == Guess(ANSWER[1:3], 32)
    assert drafter.guess([*PROMPT, 200, 9], 2) == NO_GUESS
    assert drafter.guess([*PROMPT, 200, 9, 202], 2) == Guess(ANSWER[3:5], 1)  # it was edited, and is followed on
    assert drafter.guess([*PROMPT, 200, 9, *ANSWER[2:]], 2).tokens == []
    assert continued(OTHER, ANSWER).guess(PROMPT + OTHER[:3], 9) == Guess(OTHER[3:], 32)
    assert continued().guess(PROMPT, 2) == NO_GUESS


def test_long_continuations_of_a_short_prompt_are_indexed_in_several_goes() -> None:
    drafter = Drafter(1)
    drafter.add_continuations([7], [list(range(20, 2068)), [8, 9, 10, 11, 12]])
    assert drafter.guess([7, 20], 2) == Guess([21, 22], 2)
    assert [list(drafter.guess([7, 20, 7, 8, 9, 10], 2).tokens) for _ in range(2)] == [[], [11, 12]]


def test_rows_of_a_step_share_what_may_be_indexed_and_the_first_ones_are_served_first() -> None:
    budget, drafters = IndexBudget(), [Drafter(1002) for _ in range(3)]
    tokens = [*range(1000), 500, 501, 502, 503]
    found = [list(drafter.guess(tokens, 1, budget=budget).tokens) for drafter in drafters]
    assert (found, budget.num_left) == ([[504], [], []], 0)
    assert drafters[2].guess(tokens, 1).tokens == [504]  # a step later


def test_a_prediction_goes_before_continuations_for_as_long_as_it_is_right() -> None:
    drafter = continued(ANSWER, prediction=[200, *OTHER])
    assert drafter.guess([*PROMPT, 200], 2) == Guess(OTHER[:2], 32)
    assert drafter.guess([*PROMPT, 200, 300], 2) == Guess(OTHER[1:3], 32)
    assert drafter.guess([*PROMPT, 200, 300, *ANSWER[5:9]], 2) == Guess(ANSWER[9:11], 4)  # which it has left


def test_a_prompt_that_comes_again_is_guessed_to_be_answered_again_to_the_end_of_the_answer() -> None:
    answers = Answers()
    answers.remember("me", PROMPT + ANSWER, len(PROMPT), Rates())
    answers.remember("me", [7, 8, 9, *ANSWER[:5], 1, 2, 3], 3, Rates())
    drafter = Drafter(len(PROMPT))
    assert drafter.guess(PROMPT, 8, answers.of("me")) == Guess(ANSWER[:8], 32)
    assert drafter.guess(PROMPT + ANSWER[:50], 16, answers.of("me")) == Guess(ANSWER[50:], 32)
    assert drafter.guess(PROMPT + ANSWER, 16, answers.of("me")).tokens == []


def test_an_answer_that_was_edited_is_followed_again_after_one_token() -> None:
    answers = Answers()
    answers.remember("me", PROMPT + ANSWER, len(PROMPT), Rates())
    drafter = Drafter(len(PROMPT))
    drafter.guess(PROMPT, 8, answers.of("me"))
    edited = [*ANSWER[:3], 9, ANSWER[4]]
    assert drafter.guess(PROMPT + edited, 2, answers.of("me")) == Guess(ANSWER[5:7], 1)


def test_nobody_is_guessed_to_be_answered_as_another_was() -> None:
    answers = Answers()
    answers.remember("me", PROMPT + ANSWER, len(PROMPT), Rates())
    assert Drafter(len(PROMPT)).guess(PROMPT, 8, answers.of("you")) == NO_GUESS
    answers.forget()
    assert Drafter(len(PROMPT)).guess(PROMPT, 8, answers.of("me")) == NO_GUESS


def test_the_own_text_counts_before_an_answer_that_agrees_for_as_long() -> None:
    answers = Answers()
    answers.remember("me", [1, 2, 3, 4, 60, 61, 62], 4, Rates())
    tokens = [1, 2, 3, 4, 70, 71, 1, 2, 3, 4]
    assert Drafter(len(tokens)).guess(tokens, 2, answers.of("me")) == Guess([70, 71], 4)


def test_old_answers_make_room_and_then_who_came_least_lately() -> None:
    """A client's answers are kept in two halves of 16,384 tokens, and 131,072 tokens of all."""
    answers = Answers()
    for serial in range(9):
        answers.remember("me", [0] * 32 + [serial] * 4000, 32, Rates())
    assert [len(text.tokens) for text in answers.of("me")] == [4 * 4033, 4033]
    answers.remember("me", list(range(9000)), 5, Rates())
    assert [text.tokens[-2] for text in answers.of("me")] == [7, 4100]  # an answer's first 4,096 tokens
    for client in range(8):
        for _ in range(4):
            answers.remember(client, [0] * 4000, 32, Rates())
    assert not answers.of("me")
    assert [len(answers.of(client)) for client in range(8)] == [1] * 8


def test_a_clients_next_answer_is_expected_to_be_like_its_last_ones_and_hope_comes_back() -> None:
    answers, vague, expected = Answers(), Guess([1, 2, 3, 4], 2), list[float]()
    for num_wrong in [20] * 6 + [0] * 20:
        rates = answers.rates_of("me")
        expected.append(round(rates.of(vague), 2))
        for _ in range(num_wrong):
            rates.note(vague, 0)
        answers.remember("me", PROMPT + ANSWER, len(PROMPT), rates)
    assert expected[:7] == [0.2, 0.15, 0.11, 0.09, 0.07, 0.06, 0.05]
    assert expected[6:] == sorted(expected[6:])
    assert expected[-1] == 0.14
    assert answers.rates_of("you").of(vague) == 0.2


def test_a_long_prompt_is_indexed_in_several_goes() -> None:
    tokens = [*range(5000), 4000, 4001]
    drafter = Drafter(5002)
    found = [drafter.guess(tokens, 2).tokens for _ in range(6)]
    assert (found[0], found[-1]) == ((), [4002, 4003])
