"""Samples from recorded graphs: from logits to the last token of each slot, which is the next step's input.

There is a graph per batch size and kind of sampling. A batch is padded to the next of a few sizes; its rows are copied
into buffers at fixed addresses, and padding rows use a scratch slot that no request has. A recorded step may write its
logits straight into these buffers.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from chairlift.device import send
from chairlift.engine.execution.last_tokens import LastTokens
from chairlift.engine.execution.recorder import GraphRecorder, GraphTable, Replay
from chairlift.engine.sampling.drawing import DrawKind, GraphSampling, greedy_table
from chairlift.engine.sampling.kernels import SampleRows
from chairlift.models.attention import Forward

_FIRST_SIZES = (1, 2, 4)
_SIZE_STEP = 8
_COMMON_SIZES = frozenset({1, 2, 4, 8, 16, 32, 64, 128, 256})  # recorded at start, as is the largest


def batch_sizes(max_batch_size: int) -> list[int]:
    """Sizes that batches are padded to: 1, 2, 4, 8, 16, 24, ... and the largest."""
    sizes = {*_FIRST_SIZES, *range(_SIZE_STEP, max_batch_size, _SIZE_STEP)}
    return [*sorted(size for size in sizes if size < max_batch_size), max_batch_size]


@runtime_checkable
class _Typed(Forward, Protocol):
    """A forward that tells the type of its logits."""

    @property
    def logits_dtype(self) -> torch.dtype: ...


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The first rows of the buffers."""

    slots: torch.Tensor  # int32 [N]
    logits: torch.Tensor  # [N, vocab]
    tokens: torch.Tensor  # int64 [N]


class SamplingGraphs:
    """Samples launches whose rows need no more than a graph offers: `load`, then `sample` once per step."""

    def __init__(
        self,
        forward: Forward,
        last_tokens: LastTokens,
        recorder: GraphRecorder,
        sample_rows: SampleRows,
        *,
        vocab_size: int,
        max_steps: int,
        scratch: int,
        device: torch.device,
        records_common: bool = True,
    ) -> None:
        """`max_steps`: of a launch. `scratch`: the slot of padding, after all others.

        `records_common`: graphs of common sizes are recorded at start, not only those of the largest.
        """
        self._last_tokens, self._recorder, self._sample_rows = last_tokens, recorder, sample_rows
        self._max_steps, self._scratch, self._device = max_steps, scratch, device
        self.sizes = batch_sizes(scratch)
        common = _COMMON_SIZES if records_common else frozenset()
        self.common_sizes = [size for size in self.sizes if size in common or size == self.sizes[-1]]
        logits_dtype = forward.logits_dtype if isinstance(forward, _Typed) else torch.float32
        with torch.device(device):
            self._step = torch.zeros(1, dtype=torch.int64)  # of the launch
            self._buffers = SampledRows(
                slots=torch.zeros(scratch, dtype=torch.int32),
                logits=torch.zeros(scratch, vocab_size, dtype=logits_dtype),
                tokens=torch.zeros(scratch, dtype=torch.int64),
            )
        self._table = greedy_table(max_steps, scratch).to(device)
        self._rows: dict[int, SampledRows] = {}
        self._replay: Replay | None = None
        self.graphs = GraphTable(self._record, "rows")  # by rows and `DrawKind`

    def rows(self, count: int) -> SampledRows:
        """Returns the first rows of the buffers, the same object each time."""
        if count not in self._rows:
            whole = self._buffers
            self._rows[count] = SampledRows(whole.slots[:count], whole.logits[:count], whole.tokens[:count])
        return self._rows[count]

    def padded_size(self, num_rows: int) -> int:
        """Returns the size that a batch of so many rows is padded to."""
        return self.sizes[bisect_left(self.sizes, num_rows)]

    def place(self, slots: torch.Tensor) -> SampledRows:
        """Makes these slots, int32 `[N]`, those of the first rows, and the scratch slot that of all others."""
        rows = self.rows(len(slots))
        rows.slots[:] = slots
        self.clear(len(slots))
        return rows

    def clear(self, start: int = 0) -> None:
        """Makes the scratch slot that of the rows from `start` on."""
        self._buffers.slots[start:].fill_(self._scratch)

    def load(self, slots: torch.Tensor, sampling: GraphSampling) -> None:
        """Chooses the graph for a launch whose rows have these slots, int32 `[N]`, possibly those of `place`."""
        num_rows = len(slots)
        if slots is not self.rows(num_rows).slots:
            self.place(slots)
        if sampling.table is not None:
            self._table[: len(sampling.table), :num_rows] = send(sampling.table, self._device)
            self._step.zero_()
        self._replay = self.graphs.find(self.padded_size(num_rows), sampling.kind)

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Samples the next step of the launch: `[N, vocab]` -> int64 `[N]`, INVALID_TOKEN where there is none."""
        assert self._replay is not None, "load comes first"
        rows = self.rows(len(logits))
        if logits is not rows.logits:  # a recorded step has written them there
            rows.logits[:] = logits
        self._replay()
        return rows.tokens.clone()

    @torch.inference_mode()
    def record_common(self) -> None:
        """Records the graphs that most launches will need. torch.OutOfMemoryError if they do not fit."""
        for size in reversed(self.common_sizes):  # the largest first, so that smaller ones fit into its memory
            for kind in DrawKind:
                self.graphs.record(size, kind)

    def _record(self, size: int, kind: int) -> Replay:
        self.clear()  # recording may run it
        return self._recorder.record(lambda: self._work(size, DrawKind(kind)))

    def _work(self, size: int, kind: DrawKind) -> None:
        """The work of a graph."""
        buffers = self._buffers
        tokens = self._sample_rows(buffers.logits[:size], kind, self._table[:, :size], self._step)
        buffers.tokens[:size] = tokens
        if kind is not DrawKind.GREEDY:
            self._step.add_(1).remainder_(self._max_steps)  # recording may exceed a launch's steps
        self._last_tokens.note(buffers.slots[:size], tokens)
