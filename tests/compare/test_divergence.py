"""Divergences against formulas of other libraries, and what reducing a distribution may do to them."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from chairlift.compare.divergence import Positions, Summary, Told, Whole

VOCAB = 50


def random_logprobs(seed: int, num_positions: int = 40, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(scale * torch.randn(num_positions, VOCAB, generator=generator), dim=-1)


def told(logprobs: torch.Tensor, targets: list[int], num_top: int) -> Told:
    positions = []
    for row, target in zip(logprobs, targets, strict=True):
        tokens = {*row.topk(num_top).indices.tolist(), target}
        positions.append({token: row[token].item() for token in tokens})
    return Told(positions)


def compared(reference: Whole | Told, candidate: Whole | Told, targets: list[int]) -> Positions:
    positions = Positions()
    positions.add(reference, candidate, targets)
    return positions


@pytest.fixture
def pair() -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    reference = random_logprobs(1)
    candidate = torch.log_softmax(reference + 0.5 * random_logprobs(2), dim=-1)
    return reference, candidate, [index % VOCAB for index in range(len(reference))]


def test_whole_distributions_diverge_as_torch_says(pair: tuple[torch.Tensor, torch.Tensor, list[int]]) -> None:
    reference, candidate, targets = pair
    positions = compared(Whole(reference), Whole(candidate), targets)
    expected = functional.kl_div(candidate.double(), reference.double(), reduction="none", log_target=True).sum(dim=1)
    torch.testing.assert_close(torch.tensor(positions.divergence).double(), expected, rtol=1e-6, atol=1e-9)
    entropies = functional.cross_entropy(candidate.double(), torch.tensor(targets), reduction="none")
    torch.testing.assert_close(torch.tensor(positions.candidate).double(), entropies, rtol=1e-6, atol=1e-9)
    assert positions.agrees == (reference.argmax(1) == candidate.argmax(1)).tolist()
    assert not all(positions.agrees)


def test_nothing_diverges_from_itself(pair: tuple[torch.Tensor, torch.Tensor, list[int]]) -> None:
    reference, _, targets = pair
    summary = Summary.of(compared(Whole(reference), Whole(reference), targets))
    assert summary.mean_divergence.value == summary.max_divergence == 0.0
    assert summary.top_agreement.value == 1.0
    assert (summary.perplexity_ratio.value, summary.perplexity_ratio.error) == (1.0, 0.0)


@pytest.mark.parametrize("num_top", [1, 5, VOCAB])
@pytest.mark.parametrize("are_told", [(True, True), (True, False), (False, True)])
def test_told_tokens_bound_the_divergence_from_below(
    pair: tuple[torch.Tensor, torch.Tensor, list[int]], num_top: int, are_told: tuple[bool, bool]
) -> None:
    reference, candidate, targets = pair
    whole = compared(Whole(reference), Whole(candidate), targets)
    sides = [
        told(logprobs, targets, num_top) if is_told else Whole(logprobs)
        for logprobs, is_told in zip((reference, candidate), are_told, strict=True)
    ]
    reduced = compared(sides[0], sides[1], targets)
    assert reduced.agrees == whole.agrees
    assert np.allclose(reduced.reference, whole.reference, atol=1e-6)
    assert all(low <= high + 1e-6 for low, high in zip(reduced.divergence, whole.divergence, strict=True))
    if num_top == VOCAB:
        assert np.allclose(reduced.divergence, whole.divergence, atol=1e-5)
    else:
        assert sum(reduced.divergence) > 0.1 * sum(whole.divergence)


def test_a_token_that_the_candidate_excludes_costs_a_finite_amount() -> None:
    reference = torch.tensor([[0.5, 0.5]]).log()
    candidate = torch.tensor([[1.0, 0.0]]).log()
    positions = compared(Whole(reference), Whole(candidate), [1])
    assert 30 < positions.divergence[0] < 40
    assert 60 < positions.candidate[0] < 70


def test_errors_are_those_of_repeated_measurements() -> None:
    """The spread of 400 measurements of 500 positions each is what one measurement says of itself."""
    generator = np.random.default_rng(3)
    ratios, perplexities, summaries = [], [], []
    for _ in range(400):
        reference = generator.exponential(2.0, 500)
        candidate = reference + generator.normal(0.02, 0.1, 500)
        positions = Positions(
            reference.tolist(), candidate.tolist(), generator.exponential(0.01, 500).tolist(), [True, False] * 250
        )
        summary = Summary.of(positions)
        summaries.append(summary)
        ratios.append(summary.perplexity_ratio.value)
        perplexities.append(summary.candidate_perplexity.value)
    assert np.std(ratios) == pytest.approx(np.mean([each.perplexity_ratio.error for each in summaries]), rel=0.15)
    assert np.std(perplexities) == pytest.approx(
        np.mean([each.candidate_perplexity.error for each in summaries]), rel=0.15
    )
    assert summaries[0].top_agreement.error == pytest.approx(math.sqrt(0.25 / 499))
