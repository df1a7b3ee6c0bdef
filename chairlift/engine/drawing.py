"""Drawing a token: temperature, min-p, top-k and top-p, then the inverse of the cumulative distribution at a number."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from chairlift.params import SamplingParams

_ALL = 2**24  # a top_k that keeps everything; the largest number below which float32 has all integers
_HOTTEST = 1e6  # uniform in float32 already; more could become inf
_COLDEST = 1e-6  # a smaller temperature could round to zero in float32


class RowKnobs(NamedTuple):
    """What one row does to its distribution, each a number to compute with."""

    temperature: float
    min_p: float
    top_k: float
    top_p: float

    @classmethod
    def of(cls, params: SamplingParams) -> "RowKnobs":
        """Those of a request that draws, and harmless ones for one that does not."""
        return cls(
            temperature=min(max(params.temperature, _COLDEST), _HOTTEST),
            min_p=params.min_p,
            top_k=min(params.top_k, _ALL) if params.top_k > 0 else _ALL,
            # A row that keeps everything must not lose its tail to rounding because another row filters.
            top_p=params.top_p if params.top_p < 1.0 else np.inf,
        )


@dataclass(frozen=True, slots=True)
class Knobs:
    """What rows that draw do to their distribution. All tensors are float32 `[R, 1]` unless said otherwise."""

    temperature: torch.Tensor
    min_p: torch.Tensor | None
    top_k: torch.Tensor | None  # int64; with top_p None: no row filters
    top_p: torch.Tensor | None


def is_filtered(params: SamplingParams) -> bool:
    """True if top-k or top-p may leave something out."""
    return params.top_k > 0 or params.top_p < 1.0


def draw(logits: torch.Tensor, knobs: Knobs, uniforms: torch.Tensor) -> torch.Tensor:
    """float32 `[R, vocab]` and a number in [0, 1) for each, float64 `[R]` -> int64 `[R]`."""
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / knobs.temperature  # the likeliest token is at 0
    if knobs.min_p is not None:
        scaled = scaled.masked_fill(scaled < knobs.min_p.log(), -torch.inf)
    if knobs.top_k is not None and knobs.top_p is not None:
        scaled = scaled.masked_fill(scaled < _cutoff(scaled, knobs.top_k, knobs.top_p), -torch.inf)
    cumulative = scaled.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    targets = uniforms.unsqueeze(1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    return tokens.clamp_(max=logits.shape[-1] - 1)  # NaN logits must not become an index out of range


def _cutoff(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest logit `[R, 1]` that both top-k and, of those, top-p keep."""
    descending = scaled.sort(dim=-1, descending=True).values
    kth = descending.gather(1, (top_k - 1).clamp(max=scaled.shape[-1] - 1))
    probabilities = descending.masked_fill(descending < kth, -torch.inf).softmax(dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    num_kept = (mass_before < top_p).sum(dim=-1, keepdim=True).clamp(min=1)
    return torch.maximum(kth, descending.gather(1, num_kept - 1))
