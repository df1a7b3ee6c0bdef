"""Divergences between two models' next-token distributions, position by position, and their statistics.

A position's probabilities come over the whole vocabulary, or as those of some tokens only, from servers that tell no
others. In the second case both distributions are reduced to the tokens that both told and one class for all others.
The divergence of reduced distributions is never above the true one (the data processing inequality: Cover and Thomas,
Elements of Information Theory, 2.8).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

_ROWS = 32  # positions that are compared at once: float64 of a large vocabulary takes megabytes for each
_TINIEST = 1e-30  # a probability below counts as this, so that a token which one model excludes costs a finite amount
_ROUNDING = 1e-6  # what remains of 1 after all told tokens is not known better, since they come in float32


@dataclass(frozen=True, slots=True)
class Whole:
    """Log-probabilities over the whole vocabulary, float32 `[N, vocab]`."""

    logprobs: torch.Tensor

    def __len__(self) -> int:
        return len(self.logprobs)


@dataclass(frozen=True, slots=True)
class Told:
    """Log-probabilities of some tokens at each position, by token; the actual next token is among them."""

    logprobs: Sequence[dict[int, float]]

    def __len__(self) -> int:
        return len(self.logprobs)


Distributions = Whole | Told


@dataclass(slots=True)
class Positions:
    """The figures of each position so far, in nats."""

    reference: list[float] = field(default_factory=list)  # negative log-probability of the actual token
    candidate: list[float] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)  # KL(reference || candidate)
    agrees: list[bool] = field(default_factory=list)  # both have the same likeliest token

    def add(self, reference: Distributions, candidate: Distributions, targets: Sequence[int]) -> None:
        """Compares the distributions of N positions whose actual next tokens are `targets`."""
        if isinstance(reference, Whole) and isinstance(candidate, Whole):
            for start in range(0, len(targets), _ROWS):
                rows = slice(start, start + _ROWS)
                self._add_whole(reference.logprobs[rows].double(), candidate.logprobs[rows].double(), targets[rows])
        else:
            for row, target in enumerate(targets):
                self._add_told(*_same_tokens(reference, candidate, row), target)

    def _add_whole(self, reference: torch.Tensor, candidate: torch.Tensor, targets: Sequence[int]) -> None:
        probabilities = reference.exp()
        floor = math.log(_TINIEST)
        terms = probabilities * (reference.clamp(min=floor) - candidate.clamp(min=floor))
        actual = torch.tensor(targets)[:, None]
        self.reference += (-reference.gather(1, actual)[:, 0].clamp(min=floor)).tolist()
        self.candidate += (-candidate.gather(1, actual)[:, 0].clamp(min=floor)).tolist()
        self.divergence += terms.sum(dim=1).clamp(min=0.0).tolist()
        self.agrees += (reference.argmax(dim=1) == candidate.argmax(dim=1)).tolist()

    def _add_told(self, reference: dict[int, float], candidate: dict[int, float], target: int) -> None:
        self.reference.append(-reference[target])
        self.candidate.append(-candidate[target])
        both = sorted(reference.keys() & candidate.keys())
        pairs = [(math.exp(reference[token]), math.exp(candidate[token])) for token in both]
        others = (1 - sum(each) for each in zip(*pairs, strict=True))
        pairs.append((max(next(others), _ROUNDING), max(next(others), _ROUNDING)))
        terms = (p * math.log(p / max(q, _TINIEST)) for p, q in pairs if p > _TINIEST)
        self.divergence.append(max(0.0, sum(terms)))
        self.agrees.append(max(reference, key=reference.__getitem__) == max(candidate, key=candidate.__getitem__))


def _same_tokens(
    reference: Distributions, candidate: Distributions, row: int
) -> tuple[dict[int, float], dict[int, float]]:
    """Both as told tokens: a whole distribution tells those that the other told, and its own likeliest."""
    if isinstance(reference, Told) and isinstance(candidate, Told):
        return reference.logprobs[row], candidate.logprobs[row]
    if isinstance(candidate, Told):
        assert isinstance(reference, Whole)
        return _tell(reference.logprobs[row], candidate.logprobs[row]), candidate.logprobs[row]
    assert isinstance(reference, Told)
    return reference.logprobs[row], _tell(candidate.logprobs[row], reference.logprobs[row])


def _tell(logprobs: torch.Tensor, told: dict[int, float]) -> dict[int, float]:
    tokens = list(told.keys() | {int(logprobs.argmax())})
    return dict(zip(tokens, logprobs[torch.tensor(tokens)].tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its standard error."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Holds what is printed of a comparison. Divergences are in nats."""

    num_positions: int
    reference_perplexity: Estimate
    candidate_perplexity: Estimate
    perplexity_ratio: Estimate  # candidate's to reference's, over the same positions
    mean_divergence: Estimate
    median_divergence: float
    p99_divergence: float
    max_divergence: float
    top_agreement: Estimate  # share of positions

    @classmethod
    def of(cls, positions: Positions) -> "Summary":
        """Summarises at least two positions.

        Errors treat positions as independent. Those of perplexities and their ratio are of first order (the delta
        method), so a ratio's error is small where the two models err alike.
        """
        reference, candidate = np.array(positions.reference), np.array(positions.candidate)
        divergence = np.array(positions.divergence)
        return cls(
            num_positions=len(divergence),
            reference_perplexity=_exponential(reference),
            candidate_perplexity=_exponential(candidate),
            perplexity_ratio=_exponential(candidate - reference),
            mean_divergence=_mean(divergence),
            median_divergence=float(np.median(divergence)),
            p99_divergence=float(np.percentile(divergence, 99)),
            max_divergence=float(divergence.max()),
            top_agreement=_mean(np.array(positions.agrees, dtype=float)),
        )


def _mean(values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> Estimate:
    return Estimate(float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))))


def _exponential(values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> Estimate:
    mean = _mean(values)
    return Estimate(math.exp(mean.value), math.exp(mean.value) * mean.error)
