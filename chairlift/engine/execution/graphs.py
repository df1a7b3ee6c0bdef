"""Decode steps that are recorded once and replayed: on a CUDA device, one graph replaces hundreds of kernel launches.

A graph reads and writes tensors at fixed addresses, in fixed sizes. So a batch is padded to the next of a few sizes,
its rows are copied into buffers that all graphs share, and padding rows use a scratch slot that no request has. There
are two kinds:

- a forward graph, per batch size and number of tokens that attention reads (unless its kernels learn that from the
  device): one step, from the input tokens to the logits; at its end every row advances by one token, so that the next
  replay is the next step;
- a sampling graph, per batch size and kind of sampling: from the logits to the last token of each slot, which is the
  next step's input.

Recording one takes as long as dozens of steps, during which all requests would stall. So a launch only uses graphs that
have been recorded: the common ones are recorded at start, and missing ones when the engine is idle.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from chairlift.cache import ContinuousBatchingKVCacheCollection
from chairlift.cache.layout import Place
from chairlift.cache.states import StateMemory
from chairlift.device import send, to_device
from chairlift.engine.execution.last_tokens import LastTokens
from chairlift.engine.execution.recorder import GraphRecorder, GraphTable, Replay
from chairlift.engine.sampling.drawing import DrawKind, GraphSampling, greedy_table
from chairlift.engine.sampling.kernels import SampleRows
from chairlift.models.attention import AnyLength, BatchMetadata, Forward, view_length
from chairlift.plan import ON_DEVICE

logger = logging.getLogger(__name__)

_FIRST_SIZES = (1, 2, 4)
_SIZE_STEP = 8
COMMON_SIZES = frozenset({1, 2, 4, 8, 16, 32, 64, 128, 256})  # recorded at start, as is the largest
_COMMON_LENGTHS = (256, 512, 1024)  # tokens that attention reads; likewise


def batch_sizes(max_batch_size: int) -> list[int]:
    """Sizes that batches are padded to: 1, 2, 4, 8, 16, 24, ... and the largest."""
    sizes = {*_FIRST_SIZES, *range(_SIZE_STEP, max_batch_size, _SIZE_STEP)}
    return [*sorted(size for size in sizes if size < max_batch_size), max_batch_size]


@runtime_checkable
class _Typed(Forward, Protocol):
    """A forward that tells the type of its logits."""

    @property
    def logits_dtype(self) -> torch.dtype: ...


class _Buffers:
    """Holds what graphs read and write, one entry per row. A batch of `size` rows takes the first `size` of each."""

    def __init__(
        self,
        max_batch_size: int,
        max_steps: int,
        vocab_size: int,
        scratch: int,
        device: torch.device,
        logits_dtype: torch.dtype,
    ) -> None:
        with torch.device(device):
            self.row_offsets = torch.arange(max_batch_size + 1, dtype=torch.int32)  # [B + 1]
            self.input_ids = torch.zeros(max_batch_size, dtype=torch.int64)
            self.slots = torch.zeros(max_batch_size, dtype=torch.int32)
            self.lengths = torch.zeros(max_batch_size, dtype=torch.int32)  # tokens in the slot before the step
            self.logits = torch.zeros(max_batch_size, vocab_size, dtype=logits_dtype)
            self.counts = torch.zeros(2, max_batch_size, dtype=torch.int32)  # pending inputs: see `SlotStates.counts`
            self.step = torch.zeros(1, dtype=torch.int64)  # of the launch
            self.tokens = torch.zeros(max_batch_size, dtype=torch.int64)
        self.sampling = greedy_table(max_steps, max_batch_size).to(device)
        self._scratch = scratch

    def clear(self, start: int = 0) -> None:
        """Turns the rows from `start` on into padding: empty sequences in the scratch slot."""
        self.slots[start:].fill_(self._scratch)
        self.input_ids[start:].zero_()
        self.lengths[start:].zero_()
        self.counts[:, start:].zero_()


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The launch that the buffers are filled for."""

    num_rows: int
    forward: Replay
    sample: Replay | None


class DecodeGraphs:
    """Runs decode launches: `load`, then `next_tokens` (or `next_logits`) once per step."""

    def __init__(
        self,
        forward: Forward,
        blocks: torch.Tensor,
        last_tokens: LastTokens,
        recorder: GraphRecorder,
        vocab_size: int,
        max_steps: int,
        sample_rows: SampleRows,
        places: tuple[Place | None, ...] | None = None,
        states: StateMemory | None = None,
    ) -> None:
        """`blocks`, `places` and `states`: the cache's; the last slot is the scratch slot. `max_steps`: of a launch."""
        self._forward = forward
        self._is_any_length = isinstance(forward, AnyLength) and forward.is_any_length
        self._blocks = blocks
        self._places = places
        self._states = states
        self._last_tokens = last_tokens
        self._recorder = recorder
        self._scratch = len(blocks) - 1
        self._max_steps = max_steps
        self._sample_rows = sample_rows
        self._sizes = batch_sizes(self._scratch)
        logits_dtype = forward.logits_dtype if isinstance(forward, _Typed) else torch.float32
        self._buffers = _Buffers(self._sizes[-1], max_steps, vocab_size, self._scratch, blocks.device, logits_dtype)
        self.forwards = GraphTable(lambda *key: self._record(lambda: self._forward_step(*key)))  # by tokens read
        self.samplings = GraphTable(lambda *key: self._record(lambda: self._sampling_step(*key)))  # by `DrawKind`
        self._loaded: _Loaded | None = None

    @torch.inference_mode()
    def record_common(self, sizes: Set[int] = COMMON_SIZES) -> None:
        """Records the graphs that most launches will need: for batches of these sizes, and of the largest."""
        start = time.monotonic()
        lengths = sorted({self._view_length(length) for length in (*_COMMON_LENGTHS, self._blocks.shape[3])})
        common = [size for size in self._sizes if size in sizes or size == self._sizes[-1]]
        for size in reversed(common):  # the largest first, so that smaller ones fit into its memory
            for length in lengths:
                self.forwards.record(size, length)
            for kind in DrawKind:
                self.samplings.record(size, kind)
            logger.info("graphs of %d rows recorded, %.1f s", size, time.monotonic() - start)

    @torch.inference_mode()
    def record_missing(self) -> bool:
        """Records one of the graphs that launches missed, and returns True if there are more of these.

        No launch may be in flight.
        """
        table = next((each for each in (self.forwards, self.samplings) if each.missing), None)
        if table is None:
            return False
        refused = table.record_missing()
        if refused is not None:
            logger.warning("there is no memory left for a graph of %d rows, which larger ones stand in for", refused[0])
        return bool(self.forwards.missing or self.samplings.missing)

    def load(
        self,
        input_ids: Sequence[int],
        cache: ContinuousBatchingKVCacheCollection,
        num_steps: int,
        sampling: GraphSampling | None,
    ) -> None:
        """Fills the buffers for a launch: the rows of a fetch, and the input token of each, or `ON_DEVICE`.

        `sampling`: how the rows are sampled; None if the caller samples them.
        """
        num_rows, buffers = len(input_ids), self._buffers
        reach = self._view_length(cache.max_cache_length + num_steps - 1)
        buffers.input_ids[:num_rows] = to_device(input_ids, torch.int64, self._blocks.device)
        buffers.lengths[:num_rows] = cache.cache_lengths
        if (states := cache.states) is not None:
            counts = states.num_replayed, states.num_tentative
            buffers.counts[:, :num_rows] = to_device(counts, torch.int32, self._blocks.device)
        sample = self._load_rows(cache.lookup_table, sampling)
        self._loaded = _Loaded(num_rows, self.forwards.find(self._size_of(num_rows), reach), sample)

    def sample(self, logits: torch.Tensor, slots: torch.Tensor, sampling: GraphSampling) -> torch.Tensor:
        """Samples logits not computed by a graph, `[N, vocab]`, for slots, int32 `[N]`; see `next_tokens`."""
        replay = self._load_rows(slots, sampling)
        assert replay is not None, "sampling was given"
        self._buffers.logits[: len(logits)] = logits
        replay()
        return self._buffers.tokens[: len(logits)].clone()

    def _load_rows(self, slots: torch.Tensor, sampling: GraphSampling | None) -> Replay | None:
        """Sets the rows' slots and sampling parameters, pads the other rows, and returns the sampling graph."""
        num_rows, buffers = len(slots), self._buffers
        buffers.slots[:num_rows] = slots
        buffers.clear(num_rows)
        if sampling is None:
            return None
        if sampling.table is not None:
            buffers.sampling[: len(sampling.table), :num_rows] = send(sampling.table, self._blocks.device)
            buffers.step.zero_()
        return self.samplings.find(self._size_of(num_rows), sampling.kind)

    def _size_of(self, num_rows: int) -> int:
        return self._sizes[bisect_left(self._sizes, num_rows)]

    def next_logits(self) -> torch.Tensor:
        """Runs one step: logits `[num_rows, vocab]`, valid until the next. The caller records what it samples."""
        assert self._loaded is not None, "load comes first"
        self._loaded.forward()
        return self._buffers.logits[: self._loaded.num_rows]

    def next_tokens(self) -> torch.Tensor:
        """Runs and samples one step: int64 `[num_rows]`, INVALID_TOKEN where there is none."""
        num_rows = len(self.next_logits())
        sample = self._loaded.sample if self._loaded is not None else None
        assert sample is not None, "a launch that its caller samples"
        sample()
        return self._buffers.tokens[:num_rows].clone()

    def _view_length(self, longest: int) -> int:
        whole = self._blocks.shape[3]
        return whole if self._is_any_length else view_length(self._collection(1, longest))

    def _record(self, work: Callable[[], None]) -> Replay:
        self._buffers.clear()  # recording may run it
        return self._recorder.record(work)

    def _forward_step(self, size: int, length: int) -> None:
        """The work of a forward graph."""
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
        buffers.logits[:size] = self._forward.logits(self._forward.hidden(batch, input_ids, cache))
        buffers.lengths[:size] += 1
        buffers.counts[:, :size].zero_()
        buffers.input_ids[:size].fill_(ON_DEVICE)

    def _sampling_step(self, size: int, reach: int) -> None:
        """The work of a sampling graph."""
        buffers, kind = self._buffers, DrawKind(reach)
        tokens = self._sample_rows(buffers.logits[:size], kind, buffers.sampling[:, :size], buffers.step)
        buffers.tokens[:size] = tokens
        if kind is not DrawKind.GREEDY:
            buffers.step.add_(1).remainder_(self._max_steps)  # recording may exceed a launch's steps
        self._last_tokens.note(buffers.slots[:size], tokens)

    def _collection(self, size: int, longest: int) -> ContinuousBatchingKVCacheCollection:
        """The buffers as cache inputs, whose longest row has `longest` tokens after the step."""
        return ContinuousBatchingKVCacheCollection(
            blocks=self._blocks,
            cache_lengths=self._buffers.lengths[:size],
            lookup_table=self._buffers.slots[:size],
            is_cache_empty=False,
            max_seq_length=1,
            max_cache_length=longest,
            places=self._places,
            states=None if self._states is None else self._states.view_recorded(self._buffers.counts[:, :size]),
        )
