"""Sampling in tensors of fixed size and place, so that it can be recorded in a graph.

It serves launches whose rows want no more than temperature, min-p, top-k and top-p, and draws what `Sampler` would.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import torch

from chairlift.engine.drawing import Knobs, RowKnobs, draw, is_filtered
from chairlift.engine.penalties import has_penalty
from chairlift.engine.sampling import INVALID_TOKEN, uniforms
from chairlift.params import SamplingParams
from chairlift.scheduler import Request

_NUM_KNOBS = 5  # does it draw, temperature, min-p, top-k, top-p


class PlainKind(Enum):
    """What the rows of a launch need at most."""

    GREEDY = auto()
    RANDOM = auto()  # a temperature
    FILTERED = auto()  # min-p, top-k or top-p besides


@dataclass(frozen=True, slots=True)
class PlainSampling:
    """Rows that want nothing but temperature, min-p, top-k and top-p, or not even these."""

    kind: PlainKind
    # float64 [5 + num_steps, N], on the host: knobs, then a number to draw with per step; None: no row draws.
    table: torch.Tensor | None


def greedy_table(num_steps: int, num_rows: int) -> torch.Tensor:
    """A table for rows that do not draw, and in which others can be written over them."""
    knobs = torch.tensor([0.0, *RowKnobs.of(SamplingParams(temperature=0.0))], dtype=torch.float64)
    return torch.cat((knobs, torch.zeros(num_steps, dtype=torch.float64))).unsqueeze(1).repeat(1, num_rows)


def prepare_plain(requests: Sequence[Request], num_steps: int) -> PlainSampling | None:
    """How the rows of a launch are sampled; None if one of them wants more than a plain sampling offers."""
    params = [request.params for request in requests]
    if not all(map(_is_plain, requests)):
        return None
    kind = _kind_for(params)
    if kind is PlainKind.GREEDY:
        return PlainSampling(kind, None)
    knobs = [(float(not p.is_greedy), *RowKnobs.of(p)) for p in params]
    table = np.concatenate((np.array(knobs).T, uniforms(requests, num_steps)))
    return PlainSampling(kind, torch.from_numpy(table))


def sample_plain(logits: torch.Tensor, kind: PlainKind, table: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """float32 `[N, vocab]` -> int64 `[N]`, INVALID_TOKEN where there is none, as `Sampler.sample` would.

    `table`: of a `PlainSampling`, or more of it, on the device; `step`: int64 `[1]`, likewise. Every shape depends on
    those of the arguments alone.
    """
    best, tokens = logits.max(dim=-1)  # of NaN and anything, NaN is the greatest
    if kind is not PlainKind.GREEDY:
        is_drawing, temperature, min_p, top_k, top_p = table[:_NUM_KNOBS].unsqueeze(2)  # [N, 1] each
        has_filters = kind is PlainKind.FILTERED
        knobs = Knobs(
            temperature=temperature.float(),
            min_p=min_p.float() if has_filters else None,
            top_k=top_k.long() if has_filters else None,
            top_p=top_p.float() if has_filters else None,
        )
        drawn = draw(logits, knobs, table[_NUM_KNOBS:].index_select(0, step).squeeze(0))
        tokens = torch.where(is_drawing.squeeze(1) > 0, drawn, tokens)
    return tokens.masked_fill_(~best.isfinite(), INVALID_TOKEN)


def _is_plain(request: Request) -> bool:
    params = request.params
    has_forbidden = bool(request.end_token_ids) and request.num_output_tokens < request.min_tokens
    wants_more = request.grammar is not None or params.logit_bias or params.logprobs is not None
    return not (wants_more or has_forbidden or has_penalty(params))


def _kind_for(params: Sequence[SamplingParams]) -> PlainKind:
    drawing = [each for each in params if not each.is_greedy]
    if not drawing:
        return PlainKind.GREEDY
    has_filters = any(is_filtered(each) or each.min_p for each in drawing)
    return PlainKind.FILTERED if has_filters else PlainKind.RANDOM
