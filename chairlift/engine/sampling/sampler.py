"""Sampling, batched on the device, with each row's own parameters.

Order, as in vLLM: log-probabilities are taken from the model's own logits; then logit bias, forbidden tokens (bad
words, those that are not allowed) and grammars, penalties, then for rows that are not greedy temperature, min-p, top-k
and top-p.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from chairlift.device import bring, send, to_device
from chairlift.engine.sampling.additions import AdditionsMaker, Scattered
from chairlift.engine.sampling.drawing import INVALID_TOKEN, DrawBatch, DrawKind, sample_in_graph
from chairlift.engine.sampling.guesses import NOTHING_GUESSED, Guessed
from chairlift.engine.sampling.kernels import SampleChanged, SampleRows, find_kernels
from chairlift.engine.sampling.penalties import PenaltyBatch, PenaltyState
from chairlift.engine.sampling.pending_masks import PendingMasks
from chairlift.engine.sampling.token_rules import RuleFilter, TokenRules
from chairlift.kernels.changes import NOTHING, Additions, Changes, TokenSets
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


def _best_of(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 `[N, vocab]` -> the largest of each row, and where it is first; NaN, if there is one, is the largest."""
    if logits.device.type != "cpu":
        return logits.max(dim=-1)
    # NumPy compares vectors; torch compares number by number, which takes a CPU several times as long.
    tokens = torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.gather(1, tokens.unsqueeze(1)).squeeze(1), tokens


def _top(tokens: list[int], values: list[float], first: int) -> dict[int, Logprob]:
    pairs = zip(tokens, values, strict=True)
    return {token: Logprob(value, rank) for rank, (token, value) in enumerate(pairs, 1) if token != first}


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Holds what the rows of one launch asked for; parts that no row asked for are None or empty."""

    is_for_kernels: bool  # these make all changes; else operators do
    additions: list[Scattered | Additions | None]  # per step: logit bias, bad words, and end tokens below min_tokens
    rules: dict[int, TokenRules]  # by row with `allowed_token_ids`
    masks: PendingMasks | None  # for the first step of the launch; rows with a grammar keep only its token
    penalties: PenaltyBatch | None
    draws: DrawBatch | None
    logprob_rows: torch.Tensor | None  # int64 [L]: rows that want log-probabilities
    num_top_logprobs: list[int]  # how many likeliest tokens each of them wants


@dataclass(frozen=True, slots=True)
class Sampled:
    """One step's tokens."""

    tokens: torch.Tensor  # int64 [N]; INVALID_TOKEN where there is none
    logprobs: LogprobTensors | None


class Sampler:
    """Turns logits into tokens. Holds the token counts that penalties need, by slot."""

    def __init__(
        self, vocab_size: int, num_slots: int, device: torch.device, kernels: SampleChanged | None = None
    ) -> None:
        """`kernels`: sample all rows of a launch together; None: those that the device has, if any."""
        self._device = device
        self._kernels = kernels or find_kernels(device)
        self._first_step = torch.zeros(1, dtype=torch.int64, device=device)
        self._no_table = torch.empty(0, 0, dtype=torch.float64, device=device)
        self._penalties = PenaltyState(vocab_size, num_slots, device)
        self._additions = AdditionsMaker(device)

    def prepare(self, rows: Sequence[RowPlan], num_steps: int, guessed: Guessed = NOTHING_GUESSED) -> SamplingBatch:
        """Gathers what the rows that will be sampled ask for, once per launch. A row with a guess has several places.

        `rows`: by place, that is by row of the logits.
        """
        is_for_kernels = self._kernels is not None and not guessed
        wanting = [place for place, row in enumerate(rows) if row.key.params.logprobs is not None]
        return SamplingBatch(
            is_for_kernels=is_for_kernels,
            masks=_masks_of(rows, guessed),
            logprob_rows=to_device(wanting, torch.int64, self._device) if wanting else None,
            num_top_logprobs=[rows[place].key.params.logprobs or 0 for place in wanting],
            additions=self._additions.gather(rows, num_steps, guessed, is_for_kernels=is_for_kernels),
            rules=_rules_of(rows),
            penalties=self._penalties.prepare(rows, guessed, is_for_kernels=is_for_kernels),
            draws=DrawBatch.of(rows, num_steps, self._device, guessed, has_greedy=is_for_kernels),
        )

    @property
    def sample_rows(self) -> SampleRows:
        """Samples rows that need nothing else, in a way that a graph can record."""
        return self._kernels or sample_in_graph

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, step: int) -> Sampled:
        """Logits `[N, vocab]` of any float type (float32 ones are changed in place) -> that step's tokens."""
        raw = None if batch.logprob_rows is None else logits[batch.logprob_rows].float().log_softmax(dim=-1)
        if self._kernels is not None and batch.is_for_kernels:
            tokens = self._choose_by(self._kernels, logits, batch, step)
        else:
            logits = logits.float()
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
        if isinstance(additions, Scattered):
            additions.add_to(logits)
        for row, rules in batch.rules.items():
            if (refused := rules.refused_on(self._device)) is not None:
                logits[row].masked_fill_(refused, -torch.inf)
        if batch.masks is not None and step == 0:
            batch.masks.apply(logits)
        if batch.penalties is not None and batch.penalties.for_operators is not None:
            self._penalties.apply(batch.penalties.for_operators, logits)

    def _choose(self, logits: torch.Tensor, draws: DrawBatch | None, step: int) -> torch.Tensor:
        """Returns tokens, int64 `[N]`; INVALID_TOKEN where there is none."""
        best, tokens = _best_of(logits)
        if draws is not None:
            tokens[draws.rows] = draws.draw(logits, step)
        return tokens.masked_fill_(~best.isfinite(), INVALID_TOKEN)

    def _choose_by(self, kernels: SampleChanged, logits: torch.Tensor, batch: SamplingBatch, step: int) -> torch.Tensor:
        """Returns tokens as `_choose` does, from logits that the kernels change as `_change` would."""
        additions, draws = batch.additions[step], batch.draws
        changes = Changes(
            additions=additions if isinstance(additions, Additions) else None,
            allowed=self._token_sets(
                {row: rules.allowed_on(self._device) for row, rules in batch.rules.items()}, logits
            ),
            masks=self._token_sets(batch.masks.gather(), logits) if batch.masks is not None and step == 0 else None,
            penalties=None if batch.penalties is None else batch.penalties.for_kernels,
        )
        if draws is None:
            return kernels(logits, DrawKind.GREEDY, self._no_table, self._first_step, changes)
        return kernels(logits, draws.kind, draws.table_of(step), self._first_step, changes)

    def _token_sets(self, sets: Mapping[int, torch.Tensor | None], logits: torch.Tensor) -> TokenSets | None:
        """`sets`: int32 `[words]` by row, all of one size. None: no row has one."""
        words = {row: each for row, each in sets.items() if each is not None}
        if not words:
            return None
        index = [NOTHING] * len(logits)
        for place, row in enumerate(words):
            index[row] = place
        stacked = torch.stack(list(words.values()))
        if stacked.device.type == "cpu":
            stacked = send(stacked, self._device)
        return TokenSets(stacked, to_device(index, torch.int32, self._device))

    def dummy_run(self, logits: torch.Tensor) -> None:
        """Samples logits `[N, vocab]`, N up to the slots, as if each row asked for everything that takes memory."""
        params = SamplingParams(top_k=1, top_p=0.5, min_p=0.1, repetition_penalty=2.0, logprobs=MAX_LOGPROBS)
        key = SamplingKey("dummy", params, seed=0, num_prompt_tokens=1)
        work = Work(is_sampled=True, history=[0])
        rows = [RowPlan(key, slot, 0, (ON_DEVICE,), 0, work) for slot in range(len(logits))]
        self.sample(logits, self.prepare(rows, num_steps=1), step=0)


def _rules_of(rows: Sequence[RowPlan]) -> dict[int, TokenRules]:
    filters = {place: row.key.token_filter for place, row in enumerate(rows)}
    return {
        place: each.rules
        for place, each in filters.items()
        if isinstance(each, RuleFilter) and each.rules.refused is not None
    }


def _masks_of(rows: Sequence[RowPlan], guessed: Guessed) -> PendingMasks | None:
    pending = [place for place, row in enumerate(rows) if row.input_ids[-1] == ON_DEVICE]
    return PendingMasks.of([row.key.grammar for row in rows], guessed, pending)
