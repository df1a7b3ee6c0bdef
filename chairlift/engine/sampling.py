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

from chairlift.engine.grammar import GrammarMasks, PendingMasks
from chairlift.engine.logprobs import LogprobTensors, pick_logprobs
from chairlift.engine.penalties import PenaltyBatch, PenaltyState
from chairlift.scheduler import Request

INVALID_TOKEN = -1  # stands for what was drawn from logits that are not numbers, or of which a mask left none

_ALL = 2**31 - 1  # a top_k that keeps everything
_HOTTEST = 1e6  # uniform in float32 already; more could become inf
_COLDEST = 1e-6  # a smaller temperature could round to zero in float32


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
    """The rows that draw. All tensors are float32 `[R, 1]` unless said otherwise."""

    rows: torch.Tensor  # int64 [R]
    temperature: torch.Tensor
    min_p: torch.Tensor | None
    top_k: torch.Tensor | None  # int64; with top_p None: no row filters
    top_p: torch.Tensor | None
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
            logprob_rows=torch.tensor(wanting, device=self._device) if wanting else None,
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
            tokens[batch.random.rows] = _draw(logits[batch.random.rows], batch.random, step)
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
            torch.tensor(rows, device=self._device),
            torch.tensor(tokens, device=self._device),
            torch.tensor(values, dtype=torch.float32, device=self._device),
        )

    def _random_rows(self, requests: Sequence[Request], num_steps: int) -> _RandomRows | None:
        rows = [row for row, request in enumerate(requests) if not request.params.is_greedy]
        if not rows:
            return None
        drawing = [requests[row] for row in rows]
        params = [request.params for request in drawing]
        is_filtered = any(p.top_k > 0 or p.top_p < 1.0 for p in params)
        top_k = [[min(p.top_k, _ALL) if p.top_k > 0 else _ALL] for p in params]
        # A row that keeps everything must not lose its tail to rounding because another row filters.
        top_p = [[p.top_p if p.top_p < 1.0 else np.inf] for p in params]
        return _RandomRows(
            rows=torch.tensor(rows, device=self._device),
            temperature=self._column([[min(max(p.temperature, _COLDEST), _HOTTEST)] for p in params]),
            min_p=self._column([[p.min_p] for p in params]) if any(p.min_p for p in params) else None,
            top_k=torch.tensor(top_k, device=self._device) if is_filtered else None,
            top_p=self._column(top_p) if is_filtered else None,
            uniforms=torch.from_numpy(uniforms(drawing, num_steps)).to(self._device, non_blocking=True),
        )

    def _column(self, values: list[list[float]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)


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


def _draw(logits: torch.Tensor, spec: _RandomRows, step: int) -> torch.Tensor:
    """`[R, vocab]` -> int64 `[R]`."""
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / spec.temperature  # the likeliest token is at 0
    if spec.min_p is not None:
        scaled = scaled.masked_fill(scaled < spec.min_p.log(), -torch.inf)
    if spec.top_k is not None and spec.top_p is not None:
        scaled = scaled.masked_fill(scaled < _cutoff(scaled, spec.top_k, spec.top_p), -torch.inf)
    cumulative = scaled.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    targets = spec.uniforms[step].unsqueeze(1) * cumulative[:, -1:]
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
