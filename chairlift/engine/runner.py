"""Plan -> tensors -> tokens: the only place where a step plan meets the model.

One launch may hold several decode steps. Each feeds its sampled tokens to the next on the device, and the tokens of
all steps come to the host in one copy at the end.
"""

from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from chairlift.cache import ContinuousBatchingKVCacheCollection, ContinuousBatchingKVCacheManager
from chairlift.cache.ledger import Reservation
from chairlift.engine.sampling import Sampler
from chairlift.models.attention import Backend, BatchMetadata
from chairlift.models.llama import Llama
from chairlift.scheduler import StepPlan

_Inputs = list[ContinuousBatchingKVCacheCollection]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens per row, `num_steps` of each row that was sampled, and the reservation to commit."""

    token_ids: list[list[int]]
    reservation: Reservation


class ModelRunner:
    """Executes step plans on one device."""

    def __init__(
        self, model: Llama, cache: ContinuousBatchingKVCacheManager, attention: Backend, sampler: Sampler
    ) -> None:
        self._model = model
        self._cache = cache
        self._attention = attention
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
    ) -> list[list[int]]:
        """The steps one after the other on the device; then all their tokens, by row."""
        is_sampled = [row.is_sampled for row in plan.rows]
        ends = zip(accumulate(batch.num_new_tokens), is_sampled, strict=True)
        last_tokens = torch.tensor([end - 1 for end, flag in ends if flag], dtype=torch.int64, device=self._device)
        sampling = self._sampler.prepare([row.request for row in plan.rows if row.is_sampled], plan.num_steps)
        steps: list[torch.Tensor] = []
        for step in range(plan.num_steps):
            if step:
                inputs = self._cache.increment_cache_lengths(inputs, batch.row_offsets)
                batch, input_ids = _next_batch(batch, inputs[0].cache_lengths), steps[-1]
                last_tokens = batch.row_offsets[:-1]
            attend = self._attention.prepare(batch, inputs[0])
            hidden = self._model(input_ids, batch.positions, attend)
            if any(is_sampled):
                steps.append(self._sampler.sample(self._model.logits(hidden[last_tokens]), sampling, step))
        return _spread(steps, is_sampled)

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


def _spread(steps: list[torch.Tensor], is_sampled: list[bool]) -> list[list[int]]:
    """Brings the tokens of all steps to the host at once; rows that were not sampled get none."""
    if not steps:
        return [[] for _ in is_sampled]
    sampled = iter(torch.stack(steps, dim=1).tolist())
    return [next(sampled) if flag else [] for flag in is_sampled]
