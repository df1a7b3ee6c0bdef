"""Steps computed operator by operator, which serves every plan."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from chairlift.cache import ContinuousBatchingKVCacheManager
from chairlift.device import send, to_device
from chairlift.engine.execution.last_tokens import LastTokens
from chairlift.engine.sampling import Places
from chairlift.models.attention import BatchMetadata, Forward
from chairlift.plan import ON_DEVICE, RowPlan, StepPlan


class OperatorSteps:
    """A launch whose operators the host launches one by one, as `Steps`."""

    def __init__(
        self,
        forward: Forward,
        cache: ContinuousBatchingKVCacheManager,
        last_tokens: LastTokens,
        plan: StepPlan,
        places: Places,
    ) -> None:
        assert plan.reservation is not None, "the books do not know of this plan"
        self._forward, self._cache, self._last_tokens = forward, cache, last_tokens
        device = cache.devices[0]
        self._inputs = cache.view(plan.reservation, plan.num_steps)
        self._batch = first_batch(plan, device)
        self.slots = self._inputs[0].lookup_table
        known, decoding = input_ids(plan.rows), slice(0, plan.num_decode_rows)
        self._input_ids = to_device(known, torch.int64, device)
        if ON_DEVICE in known[decoding]:
            self._input_ids[decoding] = last_tokens.fill_in(self._input_ids[decoding], self.slots[decoding])
        self._places: torch.Tensor | slice = slice(None)  # in the batch: the tokens after which one is sampled
        if not plan.is_decode:
            self._places = to_device(places.tokens, torch.int64, device)
            self.slots = self.slots[to_device(places.rows, torch.int64, device)]
        self._hidden: torch.Tensor | None = None

    @property
    def hidden(self) -> torch.Tensor | None:
        """The hidden states of the newest step, `[T, hidden]`."""
        return self._hidden

    def compute(self) -> None:
        """Launches the next step; after the first one, all rows decode."""
        if self._hidden is not None:
            self._inputs = self._cache.increment_cache_lengths(self._inputs, self._batch.row_offsets)
            self._batch = _next_batch(self._batch, self._inputs[0].cache_lengths)
            self._input_ids = self._last_tokens.fill_in(torch.full_like(self._input_ids, ON_DEVICE), self.slots)
        inputs = self._last_tokens.stop_states(self._inputs)[0]
        self._hidden = self._forward.hidden(self._batch, self._input_ids, inputs)

    def logits(self) -> torch.Tensor:
        """Computes the logits of the newest step at the places, `[N, vocab]`."""
        assert self._hidden is not None, "compute comes first"
        return self._forward.logits(self._hidden[self._places])


def input_ids(rows: Sequence[RowPlan]) -> list[int]:
    """The input tokens of a step, row by row; `ON_DEVICE` for those that the host does not know."""
    return [token for row in rows for token in row.input_ids]


def first_batch(plan: StepPlan, device: torch.device) -> BatchMetadata:
    """The batch of the plan's first step."""
    num_new, num_cached = tuple(plan.num_new_tokens), tuple(row.start for row in plan.rows)
    offsets = torch.tensor([0, *accumulate(num_new)], dtype=torch.int32)
    # A token's position: its index in the batch, less where its row starts, plus the row's cached tokens.
    shifts = torch.tensor(num_cached) - offsets[:-1]
    positions = torch.arange(sum(num_new)) + torch.repeat_interleave(shifts, torch.tensor(num_new))
    return BatchMetadata(
        row_offsets=send(offsets, device),
        positions=send(positions, device),
        slots=tuple(plan.slots),
        num_new_tokens=num_new,
        num_cached_tokens=num_cached,
        num_decode_rows=plan.num_decode_rows,
    )


def _next_batch(batch: BatchMetadata, cache_lengths: torch.Tensor) -> BatchMetadata:
    """The batch of the next step, if all rows decode: rows and offsets stay the same, positions advance by one."""
    return replace(
        batch,
        positions=cache_lengths.long(),
        num_cached_tokens=tuple(length + 1 for length in batch.num_cached_tokens),
    )
