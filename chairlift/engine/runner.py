"""Plan -> tensors -> tokens: the only place where a step plan meets the model.

One launch may hold several decode steps. Each feeds its sampled tokens to the next on the device, and the tokens of
all steps come to the host in one copy at the end.
"""

from dataclasses import dataclass, replace
from itertools import accumulate, takewhile

import torch

from chairlift.cache import ContinuousBatchingKVCacheCollection, ContinuousBatchingKVCacheManager
from chairlift.cache.ledger import Reservation
from chairlift.engine.forward import Forward
from chairlift.engine.logprobs import LogprobTensors, score_tokens
from chairlift.engine.sampling import INVALID_TOKEN, Sampled, Sampler, SamplingBatch
from chairlift.models.attention import BatchMetadata
from chairlift.params import TokenLogprobs
from chairlift.scheduler import RowResult, StepPlan

_Inputs = list[ContinuousBatchingKVCacheCollection]

_NOT_A_NUMBER = "no valid token could be computed for this sequence: its logits are not numbers, or none was allowed"


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of each row, and the reservation to commit."""

    rows: list[RowResult]
    reservation: Reservation


class ModelRunner:
    """Executes step plans on one device."""

    def __init__(self, forward: Forward, cache: ContinuousBatchingKVCacheManager, sampler: Sampler) -> None:
        self._forward = forward
        self._cache = cache
        self._sampler = sampler
        self._device = cache.devices[0]

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Runs all steps of the plan. Writes keys and values to the slots; commits nothing."""
        batch, input_ids = self._first_batch(plan)
        inputs = self._cache.fetch(batch.slots, batch.num_new_tokens, plan.num_steps)
        reservation = inputs[0].reservation
        assert reservation is not None, "fetch always reserves"
        return StepResult(self._launch(plan, batch, input_ids, inputs), reservation)

    def _launch(
        self, plan: StepPlan, batch: BatchMetadata, input_ids: torch.Tensor, inputs: _Inputs
    ) -> list[RowResult]:
        """The steps one after the other on the device; then all their tokens, by row."""
        ends = torch.tensor([end - 1 for end in accumulate(batch.num_new_tokens)], device=self._device)
        sampled_rows = [index for index, row in enumerate(plan.rows) if row.is_sampled]
        sampling = self._sampler.prepare([plan.rows[index].request for index in sampled_rows], plan.num_steps)
        prompt_scores: dict[int, list[TokenLogprobs]] = {}
        steps: list[Sampled] = []
        for step in range(plan.num_steps):
            if step:
                inputs = self._cache.increment_cache_lengths(inputs, batch.row_offsets)
                batch = _next_batch(batch, inputs[0].cache_lengths)
                input_ids = steps[-1].tokens.clamp(min=0)  # a row without a valid token ends after this launch
            hidden = self._forward.hidden(batch, input_ids, inputs[0])
            if step == 0:
                prompt_scores = self._score_prompts(plan, hidden)
            if sampled_rows:
                last = hidden[ends] if len(sampled_rows) == len(ends) else hidden[ends[sampled_rows]]
                steps.append(self._sampler.sample(self._forward.logits(last), sampling, step))
        return _spread(plan, steps, sampling, prompt_scores)

    def _score_prompts(self, plan: StepPlan, hidden: torch.Tensor) -> dict[int, list[TokenLogprobs]]:
        """By row: log-probabilities of the prompt's tokens that follow those of this step, where they are wanted."""
        scores: dict[int, list[TokenLogprobs]] = {}
        start = 0
        for index, row in enumerate(plan.rows):
            request = row.request
            if request.prompt_logprobs is not None and request.num_computed < request.num_prompt_tokens - 1:
                following = request.prompt_token_ids[request.num_computed + 1 :][: row.num_new_tokens]
                own = hidden[start : start + len(following)]
                scores[index] = score_tokens(own, following, request.prompt_logprobs, self._forward.logits)
            start += row.num_new_tokens
        return scores

    def _first_batch(self, plan: StepPlan) -> tuple[BatchMetadata, torch.Tensor]:
        """The batch of the plan's first step and its input token ids, int64 `[T]`."""
        requests = [row.request for row in plan.rows]
        num_new = tuple(row.num_new_tokens for row in plan.rows)
        num_cached = tuple(request.num_computed for request in requests)
        input_ids: list[int] = []
        for request, count in zip(requests, num_new, strict=True):
            input_ids += request.token_ids[request.num_computed : request.num_computed + count]
        offsets = torch.tensor([0, *accumulate(num_new)], dtype=torch.int32)
        # Position of a token: its place in the batch, less where its row starts, plus what the row holds already.
        shifts = torch.tensor(num_cached) - offsets[:-1]
        positions = torch.arange(len(input_ids)) + torch.repeat_interleave(shifts, torch.tensor(num_new))
        batch = BatchMetadata(
            row_offsets=offsets.to(self._device, non_blocking=True),
            positions=positions.to(self._device, non_blocking=True),
            slots=tuple(request.slot for request in requests if request.slot is not None),
            num_new_tokens=num_new,
            num_cached_tokens=num_cached,
            num_decode_rows=plan.num_decode_rows,
        )
        return batch, torch.tensor(input_ids).to(self._device, non_blocking=True)


def _next_batch(batch: BatchMetadata, cache_lengths: torch.Tensor) -> BatchMetadata:
    """One more token of every row of a batch that only decodes: its rows and offsets stay as they are."""
    return replace(
        batch,
        positions=cache_lengths.long(),
        num_cached_tokens=tuple(length + 1 for length in batch.num_cached_tokens),
    )


def _spread(
    plan: StepPlan, steps: list[Sampled], sampling: SamplingBatch, prompt_scores: dict[int, list[TokenLogprobs]]
) -> list[RowResult]:
    """Brings the tokens of all steps to the host at once, and gives each row its own."""
    tokens = iter(torch.stack([step.tokens for step in steps], dim=1).tolist() if steps else [])
    logprobs = iter(_logprobs_by_row(steps, sampling))
    results = []
    for index, row in enumerate(plan.rows):
        own = next(tokens) if row.is_sampled else []
        wants_logprobs = row.is_sampled and row.request.params.logprobs is not None
        results.append(
            RowResult(
                token_ids=list(takewhile(lambda token: token != INVALID_TOKEN, own)),
                logprobs=next(logprobs) if wants_logprobs else [],
                prompt_logprobs=prompt_scores.get(index, []),
                error=_NOT_A_NUMBER if INVALID_TOKEN in own else None,
            )
        )
    return results


def _logprobs_by_row(steps: list[Sampled], sampling: SamplingBatch) -> list[list[TokenLogprobs]]:
    """Of the rows that want them: one per step."""
    parts = [step.logprobs for step in steps if step.logprobs is not None]
    if not parts:
        return []
    num_rows = len(sampling.num_top_logprobs)
    positions = LogprobTensors.join(parts).to_host(sampling.num_top_logprobs * len(parts))
    return [positions[row::num_rows] for row in range(num_rows)]
