"""Penalties and min_tokens over several steps: what the sampler remembers, and what it forgets with the slot."""

from collections import Counter
from collections.abc import Sequence
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
LIKELY = [3.0, 2.5, 2.0, 1.5] + [-9.0] * 8
END_IS_LIKELIEST = [0.0, 0.0, 1.0, 0.0, 0.0, 99.0, 98.0] + [0.0] * 5


def new_sampler() -> Sampler:
    return Sampler(VOCAB, 4, torch.device("cpu"))


def step_logits(step: int, num_rows: int) -> torch.Tensor:
    return 2.0 * torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(step))


def launch(sampler: Sampler, requests: Sequence[RequestState], logits: Sequence[torch.Tensor]) -> list[list[int]]:
    """One launch with these logits, step by step: what each row samples, which its request gets."""
    batch = sampler.prepare(requests, len(logits))
    steps = [sampler.sample(each.clone(), batch, step).tokens.tolist() for step, each in enumerate(logits)]
    rows = [list(tokens) for tokens in zip(*steps, strict=True)]
    for request, tokens in zip(requests, rows, strict=True):
        request.accept(tokens)
    return rows


def alike(logits: list[float], num_rows: int, num_steps: int = 1) -> list[torch.Tensor]:
    """The same logits for all rows and steps."""
    return [torch.tensor([logits] * num_rows)] * num_steps


def drive(sampler: Sampler, requests: list[RequestState], num_steps: int) -> list[list[int]]:
    """Generates tokens in launches of so many steps; the tokens of each row."""
    logits = [step_logits(step, len(requests)) for step in range(NUM_TOKENS)]
    for first in range(0, NUM_TOKENS, num_steps):
        launch(sampler, requests, logits[first : first + num_steps])
    return [request.token_ids[request.num_prompt_tokens :] for request in requests]


def penalised(logits: list[float], prompt: list[int], generated: list[int], params: SamplingParams) -> list[float]:
    """The definition, token by token."""
    counts = Counter(generated)
    scores = []
    for token, logit in enumerate(logits):
        score = logit
        if token in prompt or token in generated:
            score = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        scores.append(score - params.frequency_penalty * counts[token] - params.presence_penalty * (token in generated))
    return scores


def expected_tokens(row: int, num_rows: int, prompt: list[int], params: SamplingParams) -> list[int]:
    generated: list[int] = []
    for step in range(NUM_TOKENS):
        scores = penalised(step_logits(step, num_rows)[row].tolist(), prompt, generated, params)
        generated.append(scores.index(max(scores)))
    return generated


ROWS: list[dict[str, Any]] = [
    *({"presence_penalty": 1.5}, {}, {"frequency_penalty": 0.7}, {"repetition_penalty": 1.8}),
    *({"repetition_penalty": 0.6}, {"presence_penalty": -0.8, "frequency_penalty": -0.2}, {"frequency_penalty": 2.0}),
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize("num_steps", [1, 4, 24])
@pytest.mark.parametrize("rows", [ROWS[:4], ROWS[4:]])
def test_penalties_follow_their_definition_over_many_steps(rows: list[dict[str, Any]], num_steps: int) -> None:
    prompts = [[1], [2, 3], [0, 0, 7, 11], [4, 8, 8]]
    params = [SamplingParams(temperature=0.0, **fields) for fields in rows]
    requests = [make_request(p, slot=3 - row, prompt=prompts[row]) for row, p in enumerate(params)]
    expected = [expected_tokens(row, 4, prompts[row], p) for row, p in enumerate(params)]
    assert drive(new_sampler(), requests, num_steps) == expected


def test_penalties_apply_to_random_rows() -> None:
    params = SamplingParams(temperature=1.0, presence_penalty=2.0, logit_bias={0: 1.0})
    requests = [make_request(params, slot=0, seed=seed) for seed in range(200)]
    draws = [launch(new_sampler(), [request], alike([0.0] * VOCAB, 1, 2))[0] for request in requests]
    repeats = sum(first == second for first, second in draws)
    assert repeats / len(draws) < 0.06  # without the penalty about 0.11


@pytest.mark.parametrize("fields", [{"frequency_penalty": 0.7}, {"repetition_penalty": 1.8}])
def test_a_slot_that_another_request_used_before_starts_with_fresh_counts(fields: dict[str, float]) -> None:
    params = SamplingParams(temperature=0.0, **fields)
    used = new_sampler()
    drive(used, [make_request(params, slot=2, prompt=list(range(VOCAB)))], 4)
    (after,) = drive(used, [make_request(params, slot=2, prompt=[1])], 4)
    assert after == expected_tokens(0, 1, [1], params)


@pytest.mark.parametrize(
    ("slots", "others"),
    [([1, 2, 1, 1], [False] * 4), ([1, 1, 1], [False, True, False])],
    ids=["preempted twice", "beside another row, after which it rests"],
)
def test_counts_survive_launches_elsewhere_and_are_made_anew_in_another_slot(
    slots: list[int], others: list[bool]
) -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    sampler, request, other = new_sampler(), make_request(params, slot=1), make_request(params, slot=0)
    for slot, is_beside in zip(slots, others, strict=True):
        request.slot = slot
        launch(sampler, [other, request] if is_beside else [request], alike(LIKELY, 1 + is_beside))
        if is_beside:
            launch(sampler, [other], alike(LIKELY, 1))
    assert request.token_ids[1:] == [0, 1, 2, 3][: len(slots)]


def eager_to_end(min_tokens: int, temperature: float = 0.0, **fields: Any) -> RequestState:
    fields = {"max_tokens": 99, "stop_token_ids": [STOP], "seed": 4, "temperature": temperature, **fields}
    return make_request(SamplingParams(min_tokens=min_tokens, **fields), eos=frozenset({EOS}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
def test_no_end_token_is_sampled_before_min_tokens_and_one_may_be_right_after(
    num_steps: int, temperature: float
) -> None:
    sampler = new_sampler()
    requests = [eager_to_end(min_tokens, temperature) for min_tokens in (0, 1, 3, 4)]
    while unfinished := [request for request in requests if request.finish_reason is None]:
        launch(sampler, unfinished, alike(END_IS_LIKELIEST, len(unfinished), num_steps))
    assert [request.num_output_tokens for request in requests] == [1, 2, 4, 5]
    assert all(request.token_ids[-1] in (EOS, STOP) for request in requests)
    assert all(not {EOS, STOP} & set(request.token_ids[:-1]) for request in requests)


def test_min_tokens_forbids_the_models_end_token_only_if_it_would_end_and_is_stronger_than_a_bias_for_it() -> None:
    (tokens,) = launch(new_sampler(), [eager_to_end(3, ignore_eos=True)], alike(END_IS_LIKELIEST, 1))
    assert tokens == [EOS]
    biased = eager_to_end(1, logit_bias={EOS: 100.0}, stop_token_ids=[])
    (tokens,) = launch(new_sampler(), [biased], alike([0.0, 0.0, 1.0] + [0.0] * 9, 1, 2))
    assert tokens == [2, EOS]
