"""Sampling, batched on the device, with each row's own parameters.

Order, as in vLLM: log-probabilities are taken from the model's own logits; then logit bias, forbidden tokens (bad
words, those that are not allowed) and grammars, penalties, then for rows that are not greedy temperature, min-p, top-k
and top-p.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from chairlift.device import bring, send, to_device
from chairlift.engine.sampling.drawing import INVALID_TOKEN, DrawBatch, DrawKind, sample_in_graph
from chairlift.engine.sampling.guesses import NOTHING_GUESSED, Guessed
from chairlift.engine.sampling.kernels import SampleRows, find_kernels
from chairlift.engine.sampling.penalties import PenaltyBatch, PenaltyState
from chairlift.engine.sampling.pending_masks import PendingMasks
from chairlift.engine.sampling.token_rules import RuleFilter, TokenIds
from chairlift.params import MAX_LOGPROBS, Logprob, SamplingParams, TokenLogprobs
from chairlift.plan import ON_DEVICE, RowPlan, SamplingKey, Work


class LogprobTensors(NamedTuple):
    """By position: the token there, its log-probability and rank, and the likeliest tokens."""

    tokens: torch.Tensor  # int64 [L]
    values: torch.Tensor  # float32 [L]
    ranks: torch.Tensor  # int64 [L], from 1
    top_tokens: torch.Tensor  # int64 [L, k]
    top_values: torch.Tensor  # float32 [L, k]

    @classmethod
    def join(cls, parts: Sequence["LogprobTensors"]) -> "LogprobTensors":
        """All positions of the parts, which have the same k, one after the other."""
        return cls(*map(torch.cat, zip(*parts, strict=True))) if len(parts) > 1 else parts[0]

    def bring(self) -> "LogprobTensors":
        """Starts an asynchronous copy to the host."""
        return LogprobTensors(*map(bring, self))

    def to_host(self, num_top: Sequence[int] | None = None) -> list[TokenLogprobs]:
        """By position, once the copy is complete; `num_top[i]` of the likeliest tokens for position i, or all."""
        wanted = [self.top_tokens.shape[1]] * len(self.tokens) if num_top is None else num_top
        rows = zip(*(column.tolist() for column in self), wanted, strict=True)
        return [
            {token: Logprob(value, rank)} | _top(top_tokens[:count], top_values[:count], token)
            for token, value, rank, top_tokens, top_values, count in rows
        ]


def pick_logprobs(logprobs: torch.Tensor, tokens: torch.Tensor, num_top: int) -> LogprobTensors:
    """Log-probabilities float32 `[L, vocab]` and tokens int64 `[L]` -> what is reported of them."""
    values = logprobs.gather(1, tokens.unsqueeze(1))
    ranks = (logprobs > values).sum(dim=-1) + 1
    top_values, top_tokens = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
    return LogprobTensors(tokens, values.squeeze(1), ranks, top_tokens, top_values)


def _top(tokens: list[int], values: list[float], first: int) -> dict[int, Logprob]:
    pairs = zip(tokens, values, strict=True)
    return {token: Logprob(value, rank) for rank, (token, value) in enumerate(pairs, 1) if token != first}


@dataclass(frozen=True, slots=True)
class _Additions:
    """Some elements of the logits, and what to add to them."""

    rows: torch.Tensor  # int64 [E]
    tokens: torch.Tensor  # int64 [E]
    values: torch.Tensor  # float32 [E]


class _RowAdditions(NamedTuple):
    """Holds what a row contributes to `_Additions`, on the host."""

    tokens: TokenIds
    values: npt.NDArray[np.float32]


class _Constants(NamedTuple):
    """Parts of a row's key that may have thousands of entries, as arrays."""

    bias: _RowAdditions
    no_end: _RowAdditions  # forbids its end tokens


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Holds what the rows of one launch asked for; parts that no row asked for are None or empty."""

    additions: list[_Additions | None]  # per step: logit bias, bad words, and end tokens below min_tokens
    refused: dict[int, torch.Tensor]  # by row with `allowed_token_ids`: all other tokens, bool [vocab]
    masks: PendingMasks | None  # for the first step of the launch; rows with a grammar keep only its token
    penalties: PenaltyBatch | None
    draws: DrawBatch | None
    logprob_rows: torch.Tensor | None  # int64 [L]: rows that want log-probabilities
    num_top_logprobs: list[int]  # how many likeliest tokens each of them wants

    def changes_logits(self, step: int) -> bool:
        """Returns true if a row's logits are not sampled as they are in that step of the launch."""
        has_masks = self.masks is not None and step == 0
        return has_masks or self.additions[step] is not None or bool(self.refused) or self.penalties is not None


@dataclass(frozen=True, slots=True)
class Sampled:
    """One step's tokens."""

    tokens: torch.Tensor  # int64 [N]; INVALID_TOKEN where there is none
    logprobs: LogprobTensors | None


class Sampler:
    """Turns logits into tokens. Holds the token counts that penalties need, by slot."""

    def __init__(
        self, vocab_size: int, num_slots: int, device: torch.device, kernels: SampleRows | None = None
    ) -> None:
        """`kernels`: sample all rows of a launch together; None: those that the device has, if any."""
        self._device = device
        self._kernels = kernels or find_kernels(device)
        self._first_step = torch.zeros(1, dtype=torch.int64, device=device)
        self._no_table = torch.empty(0, 0, dtype=torch.float64, device=device)
        self._penalties = PenaltyState(vocab_size, num_slots, device)
        self._constants: dict[SamplingKey, _Constants] = {}  # for the rows of the last launch

    def prepare(self, rows: Sequence[RowPlan], num_steps: int, guessed: Guessed = NOTHING_GUESSED) -> SamplingBatch:
        """Gathers what the rows that will be sampled ask for, once per launch. A row with a guess has several places.

        `rows`: by place, that is by row of the logits.
        """
        wanting = [place for place, row in enumerate(rows) if row.key.params.logprobs is not None]
        return SamplingBatch(
            masks=_masks_of(rows, guessed),
            logprob_rows=to_device(wanting, torch.int64, self._device) if wanting else None,
            num_top_logprobs=[rows[place].key.params.logprobs or 0 for place in wanting],
            additions=self._additions(rows, num_steps, guessed),
            refused=self._refused(rows),
            penalties=self._penalties.prepare(rows, guessed),
            draws=DrawBatch.of(rows, num_steps, self._device, guessed, has_greedy=self._kernels is not None),
        )

    @property
    def sample_rows(self) -> SampleRows:
        """Samples rows that need nothing else, in a way that a graph can record."""
        return self._kernels or sample_in_graph

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, step: int) -> Sampled:
        """Logits `[N, vocab]` of any float type (float32 ones are changed in place) -> that step's tokens."""
        if self._kernels is None or batch.changes_logits(step):
            logits = logits.float()
        raw = None if batch.logprob_rows is None else logits[batch.logprob_rows].float().log_softmax(dim=-1)
        self._change(logits, batch, step)
        tokens = self._choose(logits, batch.draws, step)
        chosen = tokens.clamp(min=0)  # without a valid token a row ends; its surplus only has to be harmless
        if batch.penalties is not None:
            self._penalties.count(batch.penalties, chosen)
        logprobs = None
        if raw is not None and batch.logprob_rows is not None:
            logprobs = pick_logprobs(raw, chosen[batch.logprob_rows], max(batch.num_top_logprobs))
        return Sampled(tokens, logprobs)

    def _change(self, logits: torch.Tensor, batch: SamplingBatch, step: int) -> None:
        """Applies bias, masks and penalties in place."""
        additions = batch.additions[step]
        if additions is not None:
            logits.index_put_((additions.rows, additions.tokens), additions.values, accumulate=True)
        for row, refused in batch.refused.items():
            logits[row].masked_fill_(refused, -torch.inf)
        if batch.masks is not None and step == 0:
            batch.masks.apply(logits)
        if batch.penalties is not None:
            self._penalties.apply(batch.penalties, logits)

    def _choose(self, logits: torch.Tensor, draws: DrawBatch | None, step: int) -> torch.Tensor:
        """Returns tokens, int64 `[N]`; INVALID_TOKEN where there is none."""
        if self._kernels is not None and draws is not None:
            return self._kernels(logits, draws.kind, draws.table_of(step), self._first_step)
        if self._kernels is not None:
            return self._kernels(logits, DrawKind.GREEDY, self._no_table, self._first_step)
        best, tokens = logits.max(dim=-1)  # NaN, if there is one, counts as the maximum
        if draws is not None:
            tokens[draws.rows] = draws.draw(logits, step)
        return tokens.masked_fill_(~best.isfinite(), INVALID_TOKEN)

    def dummy_run(self, logits: torch.Tensor) -> None:
        """Samples logits `[N, vocab]`, N up to the slots, as if each row asked for everything that takes memory."""
        params = SamplingParams(top_k=1, top_p=0.5, min_p=0.1, repetition_penalty=2.0, logprobs=MAX_LOGPROBS)
        key = SamplingKey("dummy", params, seed=0, num_prompt_tokens=1)
        work = Work(is_sampled=True, history=[0])
        rows = [RowPlan(key, slot, 0, (ON_DEVICE,), 0, work) for slot in range(len(logits))]
        self.sample(logits, self.prepare(rows, num_steps=1), step=0)

    def _additions(self, rows: Sequence[RowPlan], num_steps: int, guessed: Guessed) -> list[_Additions | None]:
        """Bad words depend on the tokens that the host knows: where that matters, only the first step counts."""
        known, self._constants = self._constants, {}
        in_all: list[tuple[int, _RowAdditions]] = []
        may_not_end: list[int] = []
        for place, row in enumerate(rows):
            key = row.key
            may_end = not _may_not_end(row, len(guessed.get(place, ())))
            if key.params.logit_bias or not may_end:
                self._constants[key] = known.get(key) or _constants_of(key)
                in_all.append((place, self._constants[key].bias))
            if not may_end:
                may_not_end.append(place)
            if len(row.work.forbidden):
                in_all.append((place, _forbid(np.asarray(row.work.forbidden, dtype=np.int64))))
        if not may_not_end:
            return [self._send(in_all)] * num_steps
        steps = []
        for step in range(num_steps):
            held = [place for place in may_not_end if _may_not_end(rows[place], step + len(guessed.get(place, ())))]
            steps.append(self._send(in_all + [(place, self._constants[rows[place].key].no_end) for place in held]))
        return steps

    def _send(self, parts: list[tuple[int, _RowAdditions]]) -> _Additions | None:
        sizes = [len(part.tokens) for _, part in parts]
        if not any(sizes):
            return None
        rows = np.repeat([row for row, _ in parts], sizes)
        tokens = np.concatenate([part.tokens for _, part in parts])
        values = np.concatenate([part.values for _, part in parts])
        return _Additions(*(send(torch.from_numpy(each), self._device) for each in (rows, tokens, values)))

    def _refused(self, rows: Sequence[RowPlan]) -> dict[int, torch.Tensor]:
        return {
            place: refused
            for place, row in enumerate(rows)
            if isinstance(row.key.token_filter, RuleFilter)
            and (refused := row.key.token_filter.rules.refused_on(self._device)) is not None
        }


def _masks_of(rows: Sequence[RowPlan], guessed: Guessed) -> PendingMasks | None:
    pending = [place for place, row in enumerate(rows) if row.input_ids[-1] == ON_DEVICE]
    return PendingMasks.of([row.key.grammar for row in rows], guessed, pending)


def _may_not_end(row: RowPlan, num_more: int) -> bool:
    """Returns true if `num_more` more tokens leave the row below its min_tokens, and tokens could end it."""
    return bool(row.key.end_token_ids) and row.num_output_tokens + num_more < row.key.min_tokens


def _constants_of(key: SamplingKey) -> _Constants:
    bias = key.params.logit_bias
    tokens, ends = (np.array(list(each), dtype=np.int64) for each in (bias, key.end_token_ids))
    return _Constants(_RowAdditions(tokens, np.array(list(bias.values()), dtype=np.float32)), _forbid(ends))


def _forbid(tokens: TokenIds) -> _RowAdditions:
    return _RowAdditions(tokens, np.full(len(tokens), -np.inf, dtype=np.float32))
