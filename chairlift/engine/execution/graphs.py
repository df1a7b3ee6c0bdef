"""Decode steps that are recorded once and replayed: on a CUDA device, one graph replaces hundreds of kernel launches.

A graph reads and writes tensors at fixed addresses, in fixed sizes. So a batch is padded to the next of a few sizes,
its rows are copied into buffers that all graphs share, and padding rows use a scratch slot that no request has.

There is a graph per batch size and number of tokens that attention reads (unless its kernels learn that from the
device). It is one step, from the input tokens to the logits, which it writes to where sampling graphs read them. At its
end every row advances by one token, so that the next replay is the next step.
"""

import logging
import time
from dataclasses import dataclass

import torch

from chairlift.cache import ContinuousBatchingKVCacheCollection
from chairlift.config import ResolvedConfig
from chairlift.device import to_device
from chairlift.engine.execution.recorded_steps import GraphParts, state_counts
from chairlift.engine.execution.recorder import GraphTable, Replay
from chairlift.engine.execution.sampling_graphs import SampledRows
from chairlift.engine.sampling import Places
from chairlift.models.attention import AnyLength, BatchMetadata, Forward, view_length
from chairlift.plan import ON_DEVICE, StepPlan

logger = logging.getLogger(__name__)

_COMMON_LENGTHS = (256, 512, 1024)  # tokens that attention reads, recorded at start, as are all of a slot


class _Buffers:
    """Holds what graphs read beside the rows' slots, one entry per row. A batch takes the first entries of each."""

    def __init__(self, max_batch_size: int, device: torch.device) -> None:
        with torch.device(device):
            self.row_offsets = torch.arange(max_batch_size + 1, dtype=torch.int32)  # [B + 1]
            self.input_ids = torch.zeros(max_batch_size, dtype=torch.int64)
            self.lengths = torch.zeros(max_batch_size, dtype=torch.int32)  # tokens in the slot before the step
            self.counts = torch.zeros(2, max_batch_size, dtype=torch.int32)  # pending inputs: see `SlotStates.counts`

    def clear(self, start: int = 0) -> None:
        """Turns the rows from `start` on into padding: empty sequences."""
        self.input_ids[start:].zero_()
        self.lengths[start:].zero_()
        self.counts[:, start:].zero_()


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """A launch that decodes, as `Steps`. Its rows are in the buffers of sampling graphs."""

    rows: SampledRows
    compute: Replay
    hidden: None = None

    @property
    def slots(self) -> torch.Tensor:
        """The slots of the rows, int32 `[N]`."""
        return self.rows.slots

    def logits(self) -> torch.Tensor:
        """Returns the logits that the graph has computed, `[N, vocab]`."""
        return self.rows.logits


class DecodeGraphs:
    """Replays launches that only decode; see `RecordedSteps`."""

    def __init__(self, parts: GraphParts) -> None:
        self._forward, self._sampling = parts.forward, parts.sampling
        self._is_any_length = isinstance(self._forward, AnyLength) and self._forward.is_any_length
        self._blocks, self._places, self._states = parts.blocks, parts.places, parts.states
        self._last_tokens, self._recorder = parts.last_tokens, parts.recorder
        self._scratch = len(self._blocks) - 1
        self._buffers = _Buffers(self._scratch, self._blocks.device)
        self.graphs = GraphTable(self._record, "rows")  # by rows and tokens read

    @classmethod
    def find_obstacle(cls, _: Forward) -> str | None:
        """See `RecordedSteps`."""
        return None

    @classmethod
    def num_kept_tokens(cls, _: ResolvedConfig) -> int:
        """See `RecordedSteps`: a step of so few tokens takes little."""
        return 0

    @classmethod
    def num_scratch_tokens(cls, config: ResolvedConfig) -> int:
        """See `RecordedSteps`: padding grows by a token a step."""
        return min(config.max_steps_per_launch, config.slot_len)

    @torch.inference_mode()
    def record_common(self) -> None:
        """Records the graphs that most launches will need. torch.OutOfMemoryError if they do not fit."""
        start = time.monotonic()
        lengths = sorted({self._view_length(length) for length in (*_COMMON_LENGTHS, self._blocks.shape[3])})
        for size in reversed(self._sampling.common_sizes):  # the largest first: smaller ones fit into its memory
            for length in lengths:
                self.graphs.record(size, length)
            logger.info("graphs of %d rows recorded, %.1f s", size, time.monotonic() - start)

    def load(self, plan: StepPlan, _: Places) -> DecodeSteps | None:
        """Fills the buffers for a plan that only decodes; see `RecordedSteps`."""
        if not plan.is_decode:
            return None
        num_rows, buffers, device = len(plan.rows), self._buffers, self._blocks.device
        starts = [row.start for row in plan.rows]
        tokens = [token for row in plan.rows for token in row.input_ids]
        buffers.input_ids[:num_rows] = to_device(tokens, torch.int64, device)
        buffers.lengths[:num_rows] = to_device(starts, torch.int32, device)
        if self._states is not None:
            buffers.counts[:, :num_rows] = to_device(state_counts(plan), torch.int32, device)
        rows = self._sampling.place(to_device(plan.slots, torch.int32, device))
        buffers.clear(num_rows)
        reach = self._view_length(max(starts) + plan.num_steps)
        return DecodeSteps(rows, self.graphs.find(self._sampling.padded_size(num_rows), reach))

    def _view_length(self, longest: int) -> int:
        whole = self._blocks.shape[3]
        return whole if self._is_any_length else view_length(self._collection(1, longest))

    def _record(self, size: int, length: int) -> Replay:
        self._buffers.clear()  # recording may run it
        self._sampling.clear()
        return self._recorder.record(lambda: self._step(size, length))

    def _step(self, size: int, length: int) -> None:
        """The work of a graph."""
        buffers, cache = self._buffers, self._collection(size, length)
        batch = BatchMetadata(
            row_offsets=buffers.row_offsets[: size + 1],
            positions=cache.cache_lengths.long(),
            slots=(self._scratch,) * size,
            num_new_tokens=(1,) * size,
            num_cached_tokens=(length - 1,) * size,
            num_decode_rows=size,
        )
        has_ended = self._last_tokens.have_ended(cache.lookup_table)
        if has_ended is not None:
            buffers.counts[1, :size].masked_fill_(has_ended, 1)
        input_ids = self._last_tokens.fill_in(buffers.input_ids[:size], cache.lookup_table)
        logits = self._forward.logits(self._forward.hidden(batch, input_ids, cache))
        self._sampling.rows(size).logits[:] = logits
        buffers.lengths[:size] += 1
        buffers.counts[:, :size].zero_()
        buffers.input_ids[:size].fill_(ON_DEVICE)

    def _collection(self, size: int, longest: int) -> ContinuousBatchingKVCacheCollection:
        """The buffers as cache inputs, whose longest row has `longest` tokens after the step."""
        return ContinuousBatchingKVCacheCollection(
            blocks=self._blocks,
            cache_lengths=self._buffers.lengths[:size],
            lookup_table=self._sampling.rows(size).slots,
            is_cache_empty=False,
            max_seq_length=1,
            max_cache_length=longest,
            places=self._places,
            states=None if self._states is None else self._states.view_recorded(self._buffers.counts[:, :size]),
        )
