"""Sampling, batched on the device, each row with parameters of its own.

Order, as in vLLM: log-probabilities are taken from the model's own logits; then logit bias, forbidden tokens and
grammars, penalties, then for rows that are not greedy temperature, min-p, top-k and top-p. A row draws by inverting its
cumulative distribution at one uniform number that depends on nothing but its seed and how many tokens it has, so
neither the batch around it nor the device changes what it draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from chairlift.engine.drawing import Knobs, RowKnobs, draw, is_filtered
from chairlift.engine.grammar import GrammarMasks, PendingMasks
from chairlift.engine.logprobs import LogprobTensors, pick_logprobs
from chairlift.engine.penalties import PenaltyBatch, PenaltyState
from chairlift.engine.transfers import send, to_device
from chairlift.scheduler import Request

INVALID_TOKEN = -1  # stands for what was drawn from logits that are not numbers, or of which a mask left none


@dataclass(frozen=True, slots=True)
class _Entries:
    """Some elements of the logits, and what to add to them."""

    rows: torch.Tensor  # int64 [E]
    tokens: torch.Tensor  # int64 [E]
    values: torch.Tensor  # float32 [E]

    def add_to(self, logits: torch.Tensor) -> None:
        logits.index_put_((self.rows, self.tokens), self.values, accumulate=True)


@dataclass(frozen=True, slots=True)
class _RandomRows:
    """The rows that draw."""

    rows: torch.Tensor  # int64 [R]
    knobs: Knobs
    uniforms: torch.Tensor  # float64 [num_steps, R]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """What the rows of one launch asked for; a part that no row asked for is None."""

    bias: _Entries | None
    forbidden: list[_Entries | None]  # per step of the launch: end tokens of rows below their min_tokens
    masks: PendingMasks | None  # of the launch's first step; rows with a grammar keep no more
    penalties: PenaltyBatch | None
    random: _RandomRows | None
    logprob_rows: torch.Tensor | None  # int64 [L]: rows that want log-probabilities
    num_top_logprobs: list[int]  # how many likeliest tokens each of them wants


@dataclass(frozen=True, slots=True)
class Sampled:
    """One step's tokens."""

    tokens: torch.Tensor  # int64 [N]; INVALID_TOKEN where there is none
    logprobs: LogprobTensors | None


class Sampler:
    """Turns logits into tokens. Holds the token counts that penalties need, by slot."""

    def __init__(self, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._penalties = PenaltyState(vocab_size, num_slots, device)
        self._grammars = GrammarMasks()

    def prepare(self, requests: Sequence[Request], num_steps: int) -> SamplingBatch:
        """Gathers the parameters of the rows that will be sampled, once per launch."""
        wanting = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
        return SamplingBatch(
            masks=self._grammars.start([request.grammar for request in requests]),
            logprob_rows=to_device(wanting, torch.int64, self._device) if wanting else None,
            num_top_logprobs=[requests[row].params.logprobs or 0 for row in wanting],
            bias=self._entries(
                [
                    (row, token, bias)
                    for row, request in enumerate(requests)
                    for token, bias in request.params.logit_bias.items()
                ]
            ),
            forbidden=[self._entries(_forbidden(requests, step)) for step in range(num_steps)],
            penalties=self._penalties.prepare(requests),
            random=self._random_rows(requests, num_steps),
        )

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, step: int) -> Sampled:
        """float32 `[N, vocab]` (changed in place) -> tokens, for that step of the launch."""
        raw = None if batch.logprob_rows is None else logits[batch.logprob_rows].log_softmax(dim=-1)
        for entries in (batch.bias, batch.forbidden[step]):
            if entries is not None:
                entries.add_to(logits)
        if batch.masks is not None and step == 0:
            batch.masks.apply(logits)
        if batch.penalties is not None:
            self._penalties.apply(batch.penalties, logits)
        best, tokens = logits.max(dim=-1)  # of NaN and anything, NaN is the greatest
        if batch.random is not None:
            rows, uniform = batch.random.rows, batch.random.uniforms[step]
            tokens[rows] = draw(logits[rows], batch.random.knobs, uniform)
        if batch.penalties is not None:
            self._penalties.count(batch.penalties, tokens)
        logprobs = None
        if raw is not None and batch.logprob_rows is not None:
            logprobs = pick_logprobs(raw, tokens[batch.logprob_rows], max(batch.num_top_logprobs))
        return Sampled(tokens.masked_fill_(~best.isfinite(), INVALID_TOKEN), logprobs)

    def _entries(self, triples: list[tuple[int, int, float]]) -> _Entries | None:
        if not triples:
            return None
        rows, tokens, values = zip(*triples, strict=True)
        return _Entries(
            to_device(rows, torch.int64, self._device),
            to_device(tokens, torch.int64, self._device),
            to_device(values, torch.float32, self._device),
        )

    def _random_rows(self, requests: Sequence[Request], num_steps: int) -> _RandomRows | None:
        rows = [row for row, request in enumerate(requests) if not request.params.is_greedy]
        if not rows:
            return None
        drawing = [requests[row] for row in rows]
        params = [request.params for request in drawing]
        temperature, min_p, top_k, top_p = zip(*map(RowKnobs.of, params), strict=True)
        has_filters = any(map(is_filtered, params))
        return _RandomRows(
            rows=to_device(rows, torch.int64, self._device),
            knobs=Knobs(
                temperature=self._column(temperature),
                min_p=self._column(min_p) if any(min_p) else None,
                top_k=self._column(top_k).long() if has_filters else None,
                top_p=self._column(top_p) if has_filters else None,
            ),
            uniforms=send(torch.from_numpy(uniforms(drawing, num_steps)), self._device),
        )

    def _column(self, values: Sequence[float]) -> torch.Tensor:
        return to_device(values, torch.float32, self._device).unsqueeze(1)


def uniforms(requests: Sequence[Request], num_steps: int) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1), `[num_steps, R]`: a hash of each request's seed and of the index of the token to come.

    The finalizer of SplitMix64 (Steele, Lea & Flood 2014), its state stepped to the token's index; 32 bits are used.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    seeds = np.array([request.seed & 0xFFFFFFFFFFFFFFFF for request in requests], dtype=np.uint64)
    indices = np.array([request.num_output_tokens + 1 for request in requests], dtype=np.uint64)
    steps = np.arange(num_steps, dtype=np.uint64)[:, None]
    state = _mix(seeds) + golden * (indices + steps)
    return (_mix(state) >> np.uint64(32)).astype(np.float64) * 2.0**-32


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _forbidden(requests: Sequence[Request], step: int) -> list[tuple[int, int, float]]:
    return [
        (row, token, -np.inf)
        for row, request in enumerate(requests)
        if request.num_output_tokens + step < request.min_tokens
        for token in request.end_token_ids
    ]
