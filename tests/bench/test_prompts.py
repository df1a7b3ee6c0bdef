"""Random prompts: exact lengths, all different, the same for the same seed."""

import numpy as np
import pytest

from chairlift.bench.failures import BenchError
from chairlift.bench.prompts import (
    WORDS,
    Draws,
    Purpose,
    TokenWriter,
    WordWriter,
    distinct_draws,
    draw_one,
    generator_of,
    num_possible_prompts,
)


def draws(lengths: list[int], num_choices: int = 95, seed: int = 0) -> list[Draws]:
    return distinct_draws(lengths, num_choices, np.random.default_rng(seed))


def test_each_prompt_has_exactly_its_length() -> None:
    assert [len(prompt) for prompt in draws([17, 3, 1, 40])] == [17, 3, 1, 40]


def test_draws_reach_every_choice_and_no_other() -> None:
    assert {draw for prompt in draws([20] * 50, num_choices=4) for draw in prompt} == {0, 1, 2, 3}


def test_draws_are_plain_integers_fit_for_json() -> None:
    assert {type(draw) for draw in draws([8])[0]} == {int}


def test_draws_are_uniform() -> None:
    prompt = draw_one(40_000, 4, np.random.default_rng(3))
    for choice in range(4):
        assert prompt.count(choice) == pytest.approx(10_000, rel=0.05)


def test_the_same_seed_gives_the_same_prompts_and_another_other_ones() -> None:
    assert draws([8] * 3, seed=7) == draws([8] * 3, seed=7)
    assert not set(draws([8] * 50, seed=1)) & set(draws([8] * 50, seed=2))


def test_every_purpose_has_random_numbers_of_its_own() -> None:
    firsts = {generator_of(5, purpose).random() for purpose in Purpose}
    assert len(firsts) == len(Purpose)
    assert generator_of(5, Purpose.BLOCKS, 1).random() != generator_of(5, Purpose.BLOCKS, 2).random()
    assert generator_of(5, Purpose.BLOCKS, 1).random() == generator_of(5, Purpose.BLOCKS, 1).random()


def test_asking_for_more_keeps_the_first_ones() -> None:
    assert draws([8, 5, 6, 7])[:2] == draws([8, 5])


def test_prompts_are_distinct_even_when_every_possible_one_is_needed() -> None:
    assert len(set(draws([2] * 16, num_choices=4))) == 16


def test_too_few_possible_prompts_are_refused_with_the_way_out() -> None:
    with pytest.raises(BenchError) as caught:
        draws([2, 1, 1, 1, 1, 1], num_choices=4)
    assert str(caught.value) == (
        "5 prompts of 1 tokens cannot all differ: 4 choices for each token allow only 4; raise --prompt-tokens, lower "
        "--num-requests, or for completions widen --token-range"
    )


def test_tokens_are_written_as_ids_of_the_range_after_their_prefix() -> None:
    writer = TokenWriter(low=32, high=127)
    assert writer.num_choices == 95
    assert writer.write((0, 94), prefix=(5,)) == {"prompt": [37, 32, 126]}


def test_words_are_written_as_a_message_of_the_user_after_a_prefix_of_the_system() -> None:
    writer = WordWriter()
    assert writer.num_choices == len(WORDS)
    assert writer.write((0, 1)) == {"messages": [{"role": "user", "content": "the of"}]}
    assert writer.write((0,), prefix=(2, 1)) == {
        "messages": [{"role": "system", "content": "and of"}, {"role": "user", "content": "the"}]
    }


def test_words_are_distinct_and_single() -> None:
    assert len(set(WORDS)) == len(WORDS)
    assert all(word.isalpha() and len(word) <= 6 for word in WORDS)


@pytest.mark.parametrize(
    ("num_choices", "length", "possible"),
    [(95, 1, 95), (95, 2, 9025), (1, 1000, 1), (2, 64, 2**64)],
)
def test_number_of_possible_prompts(num_choices: int, length: int, possible: int) -> None:
    assert num_possible_prompts(num_choices, length) == possible


def test_number_of_possible_prompts_stays_small_enough_to_compute() -> None:
    assert num_possible_prompts(95, 10_000_000) == 95**64
