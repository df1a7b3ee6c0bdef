"""Penalties and min_tokens over several steps: what the sampler remembers, and what it forgets with the slot."""

from collections import Counter
from typing import Any

import pytest
import torch

from chairlift import SamplingParams
from chairlift.engine.sampling.sampler import Sampler
from chairlift.scheduler import RequestState
from tests.engine.support import make_request

VOCAB = 12
NUM_TOKENS = 24
EOS, STOP = 5, 6


def new_sampler() -> Sampler:
    return Sampler(VOCAB, 4, torch.device("cpu"))


def step_logits(step: int, num_rows: int) -> torch.Tensor:
    return 2.0 * torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(step))


def drive(sampler: Sampler, requests: list[RequestState], launch: int, num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """Generates that many tokens of each row in launches of `launch` steps; the tokens of each row."""
    for first in range(0, num_tokens, launch):
        batch = sampler.prepare(requests, launch)
        steps = [
            sampler.sample(step_logits(first + step, len(requests)), batch, step).tokens.tolist()
            for step in range(launch)
        ]
        for request, tokens in zip(requests, zip(*steps, strict=True), strict=True):
            request.accept(list(tokens))
    return [request.token_ids[request.num_prompt_tokens :] for request in requests]


def penalised(logits: list[float], prompt: list[int], generated: list[int], params: SamplingParams) -> list[float]:
    """The definition, token by token."""
    counts = Counter(generated)
    scores = []
    for token, logit in enumerate(logits):
        score = logit
        if token in prompt or token in generated:
            score = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        score -= params.frequency_penalty * counts[token]
        score -= params.presence_penalty * (token in generated)
        scores.append(score)
    return scores


def expected_tokens(row: int, num_rows: int, prompt: list[int], params: SamplingParams) -> list[int]:
    generated: list[int] = []
    for step in range(NUM_TOKENS):
        scores = penalised(step_logits(step, num_rows)[row].tolist(), prompt, generated, params)
        generated.append(scores.index(max(scores)))
    return generated


ROWS: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.8},
]
MORE_ROWS: list[dict[str, Any]] = [
    {"repetition_penalty": 0.6},
    {"presence_penalty": -0.8, "frequency_penalty": -0.2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.3},
    {"frequency_penalty": 2.0},
]


@pytest.mark.parametrize("launch", [1, 4, 24])
@pytest.mark.parametrize("rows", [ROWS, MORE_ROWS])
def test_penalties_follow_their_definition_over_many_steps(rows: list[dict[str, Any]], launch: int) -> None:
    prompts = [[1], [2, 3], [0, 0, 7, 11], [4, 8, 8]]
    params = [SamplingParams(temperature=0.0, **fields) for fields in rows]
    requests = [make_request(p, slot=3 - row, prompt=prompts[row]) for row, p in enumerate(params)]
    expected = [expected_tokens(row, 4, prompts[row], p) for row, p in enumerate(params)]
    assert drive(new_sampler(), requests, launch) == expected


def test_penalties_apply_to_random_rows() -> None:
    params = SamplingParams(temperature=1.0, presence_penalty=2.0, logit_bias={0: 1.0})
    draws = []
    for seed in range(200):
        request = make_request(params, slot=0, seed=seed)
        batch = (sampler := new_sampler()).prepare([request], 2)
        draws.append([int(sampler.sample(torch.zeros(1, VOCAB), batch, step).tokens) for step in range(2)])
    repeats = sum(first == second for first, second in draws)
    assert repeats / len(draws) < 0.06  # without the penalty about 0.11


@pytest.mark.parametrize("fields", [{"frequency_penalty": 0.7}, {"repetition_penalty": 1.8}])
def test_a_slot_that_another_request_used_before_starts_with_fresh_counts(fields: dict[str, float]) -> None:
    params = SamplingParams(temperature=0.0, **fields)
    used = new_sampler()
    drive(used, [make_request(params, slot=2, prompt=list(range(VOCAB)))], launch=4)
    (after,) = drive(used, [make_request(params, slot=2, prompt=[1])], launch=4)
    (fresh,) = drive(new_sampler(), [make_request(params, slot=2, prompt=[1])], launch=4)
    assert after == fresh == expected_tokens(0, 1, [1], params)


def test_a_request_that_returns_to_a_slot_is_counted_anew() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    sampler, request = new_sampler(), make_request(params, slot=1)
    tokens = []
    for slot in (1, 2, 1, 1):  # it was preempted twice
        request.slot = slot
        logits = torch.tensor([[3.0, 2.5, 2.0, 1.5] + [-9.0] * 8])
        tokens.append(int(sampler.sample(logits, sampler.prepare([request], 1), 0).tokens))
        request.accept(tokens[-1:])
    assert tokens == [0, 1, 2, 3]


def test_counts_survive_launches_in_which_the_row_stands_elsewhere_or_not_at_all() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    logits = [3.0, 2.5, 2.0, 1.5] + [-9.0] * 8
    sampler, request = new_sampler(), make_request(params, slot=1)
    other = make_request(params, slot=0)
    tokens = []
    for rows, row in [([request], 0), ([other, request], 1), ([other], None), ([request, other], 0)]:
        sampled = sampler.sample(torch.tensor([logits] * len(rows)), sampler.prepare(rows, 1), 0).tokens
        if row is not None:
            tokens.append(int(sampled[row]))
            request.accept(tokens[-1:])
    assert tokens == [0, 1, 2]


def eager_to_end(min_tokens: int, temperature: float, ignore_eos: bool = False) -> RequestState:
    params = SamplingParams(
        max_tokens=99,
        min_tokens=min_tokens,
        temperature=temperature,
        stop_token_ids=[STOP],
        ignore_eos=ignore_eos,
        seed=4,
    )
    return make_request(params, eos=frozenset({EOS}))


END_IS_LIKELIEST = [0.0, 0.0, 1.0, 0.0, 0.0, 99.0, 98.0] + [0.0] * 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("launch", [1, 2, 3, 5])
def test_no_end_token_is_sampled_before_min_tokens_and_one_may_be_right_after(launch: int, temperature: float) -> None:
    sampler = new_sampler()
    requests = [eager_to_end(min_tokens, temperature) for min_tokens in (0, 1, 3, 4)]
    while unfinished := [request for request in requests if request.finish_reason is None]:
        batch = sampler.prepare(unfinished, launch)
        logits = torch.tensor([END_IS_LIKELIEST] * len(unfinished))
        steps = [sampler.sample(logits.clone(), batch, step).tokens.tolist() for step in range(launch)]
        for request, tokens in zip(unfinished, zip(*steps, strict=True), strict=True):
            request.accept(list(tokens))
    assert [request.num_output_tokens for request in requests] == [1, 2, 4, 5]
    assert all(request.token_ids[-1] in (EOS, STOP) for request in requests)
    assert all(not {EOS, STOP} & set(request.token_ids[:-1]) for request in requests)


def test_min_tokens_forbids_the_models_end_token_only_if_it_would_end() -> None:
    sampler = new_sampler()
    request = eager_to_end(3, temperature=0.0, ignore_eos=True)
    tokens = sampler.sample(torch.tensor([END_IS_LIKELIEST]), sampler.prepare([request], 1), 0).tokens
    assert tokens.tolist() == [EOS]


def test_min_tokens_is_stronger_than_a_bias_for_the_end_token() -> None:
    params = SamplingParams(min_tokens=1, temperature=0.0, logit_bias={EOS: 100.0})
    request = make_request(params, eos=frozenset({EOS}))
    sampler = new_sampler()
    batch = sampler.prepare([request], 2)
    logits = torch.tensor([[0.0, 0.0, 1.0] + [0.0] * 9])
    assert [int(sampler.sample(logits.clone(), batch, step).tokens) for step in range(2)] == [2, EOS]
