"""Random prompts: exact length, all different, the same for the same seed."""

import pytest

from chairlift.bench.prompts import WORDS, num_possible_prompts, random_token_prompts, random_word_prompts


def test_token_prompts_have_exactly_the_length_asked_for() -> None:
    prompts = random_token_prompts(count=20, length=17, token_range=(32, 127), seed=0)
    assert [len(prompt) for prompt in prompts] == [17] * 20


def test_word_prompts_have_exactly_the_number_of_words_asked_for() -> None:
    prompts = random_word_prompts(count=20, length=17, seed=0)
    assert [len(prompt.split(" ")) for prompt in prompts] == [17] * 20
    assert {word for prompt in prompts for word in prompt.split(" ")} <= set(WORDS)


def test_token_ids_reach_both_ends_of_the_range_and_never_leave_it() -> None:
    ids = {token for prompt in random_token_prompts(50, 20, (5, 9), seed=1) for token in prompt}
    assert ids == {5, 6, 7, 8}


def test_token_ids_are_plain_integers_fit_for_json() -> None:
    assert {type(token) for token in random_token_prompts(1, 8, (32, 127), seed=0)[0]} == {int}


def test_token_ids_are_uniform() -> None:
    [prompt] = random_token_prompts(1, 40_000, (10, 14), seed=3)
    for token in (10, 11, 12, 13):
        assert prompt.count(token) == pytest.approx(10_000, rel=0.05)


def test_the_same_seed_gives_the_same_prompts() -> None:
    assert random_token_prompts(3, 8, (32, 127), seed=7) == random_token_prompts(3, 8, (32, 127), seed=7)
    assert random_word_prompts(3, 8, seed=7) == random_word_prompts(3, 8, seed=7)


def test_another_seed_gives_other_prompts() -> None:
    ones = random_token_prompts(50, 8, (32, 127), seed=1)
    others = random_token_prompts(50, 8, (32, 127), seed=2)
    assert [one for one in ones if one in others] == []


def test_asking_for_more_keeps_the_first_ones() -> None:
    few = random_token_prompts(3, 8, (32, 127), seed=0)
    assert random_token_prompts(5, 8, (32, 127), seed=0)[:3] == few


def test_prompts_are_distinct_even_when_every_possible_one_is_needed() -> None:
    prompts = random_token_prompts(count=16, length=2, token_range=(0, 4), seed=0)
    assert len({tuple(prompt) for prompt in prompts}) == 16


def test_word_prompts_are_distinct_too() -> None:
    assert sorted(random_word_prompts(len(WORDS), 1, seed=0)) == sorted(WORDS)


def test_words_are_distinct_and_single() -> None:
    assert len(set(WORDS)) == len(WORDS)
    assert all(word.isalpha() and len(word) <= 6 for word in WORDS)


@pytest.mark.parametrize(
    ("choices", "length", "possible"),
    [(95, 1, 95), (95, 2, 9025), (1, 1000, 1), (2, 64, 2**64)],
)
def test_number_of_possible_prompts(choices: int, length: int, possible: int) -> None:
    assert num_possible_prompts(choices, length) == possible


def test_number_of_possible_prompts_stays_small_enough_to_compute() -> None:
    assert num_possible_prompts(95, 10_000_000) == 95**64
