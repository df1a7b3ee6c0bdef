"""Records work on a device as graphs, and keeps them by what they suffice for.

A CUDA graph repeats the kernels that were launched while it was recorded, on the same addresses.
"""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

import torch

logger = logging.getLogger(__name__)

Replay = Callable[[], None]
"""Repeats the recorded work on the buffers' current contents."""

_NUM_WARM_UPS = 2
_INVALIDATED = "previous error during capture"  # as CUDA words cudaErrorStreamCaptureInvalidated
_EXHAUSTED = "CUDA error: out of memory"  # as torch words it where CUDA itself finds none, not the allocator
_EMPTY = "The CUDA Graph is empty"  # as torch begins its warning


class GraphRecorder(Protocol):
    """Records graphs."""

    def record(self, work: Callable[[], None]) -> Replay:
        """Records what `work` launches. May also run it, more than once. torch.OutOfMemoryError if it does not fit."""
        ...


class CudaRecorder:
    """Records CUDA graphs, which share their memory, since only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> Replay:
        """See `GraphRecorder`."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    for _ in range(_NUM_WARM_UPS):  # libraries first allocate and choose kernels, which no graph can
                        work()
            finally:
                current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile, without any effect on this graph.
            capture = torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")
            try:
                with (
                    torch.cuda.stream(current),
                    as_out_of_memory(),
                    ended_quietly_by_errors(capture),
                ):  # a broken capture leaves its own stream on
                    work()
            except torch.OutOfMemoryError:
                self._pool = torch.cuda.graph_pool_handle()  # torch takes the pool of a broken capture for busy
                raise
        return graph.replay


@contextmanager
def as_out_of_memory() -> Iterator[None]:
    """Raises torch.OutOfMemoryError where a capture was broken off because its memory did not suffice.

    When the allocator finds none, it frees what it has cached. That invalidates a capture, and whatever comes next in
    it fails with an error that does not speak of memory. CUDA itself also needs memory, for what a graph consists of,
    and says so in an error that is not the allocator's.
    """
    try:
        yield
    except torch.AcceleratorError as error:
        if not _is_lack_of_memory(error):
            raise
        first = error.__context__  # the one in the midst of the capture, if its end raised another
        if first is not None and not isinstance(first, torch.OutOfMemoryError) and not _is_lack_of_memory(first):
            raise
        raise torch.OutOfMemoryError(f"a graph could not be recorded: {error}") from error


@contextmanager
def ended_quietly_by_errors(capture: AbstractContextManager[object]) -> Iterator[None]:
    """Enters a capture. When an error ends it, torch does not warn that the graph is empty.

    That is so if the error came before anything was launched, and the warning would blame the device or the stream.
    """
    capture.__enter__()
    try:
        yield
    except BaseException:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _EMPTY, UserWarning)
            capture.__exit__(*sys.exc_info())
        raise
    capture.__exit__(None, None, None)


def _is_lack_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.AcceleratorError) and any(each in str(error) for each in (_INVALIDATED, _EXHAUSTED))


class GraphKey(NamedTuple):
    """Tells what a graph suffices for."""

    size: int  # of the batch
    reach: int  # in a second respect, which the table's owner chooses


class GraphTable:
    """Graphs by size and reach. One of a larger size or with a longer reach also works, but takes longer."""

    def __init__(self, record: Callable[[int, int], Replay], unit: str) -> None:
        """`unit`: of sizes, in the log."""
        self._record = record
        self._unit = unit
        self._replays: dict[GraphKey, Replay] = {}
        self._refused: set[GraphKey] = set()  # there was no memory for these
        self.missing: list[GraphKey] = []  # launches would have used these

    @property
    def recorded(self) -> set[GraphKey]:
        return set(self._replays)

    def find_key(self, size: int, reach: int) -> GraphKey | None:
        """Finds the smallest graph that suffices; None if none does. One that would fit better is noted as missing."""
        wanted = GraphKey(size, reach)
        if wanted in self._replays:
            return wanted
        if wanted not in self.missing and wanted not in self._refused:
            self.missing.append(wanted)
        return min((key for key in self._replays if key.size >= size and key.reach >= reach), default=None)

    def find(self, size: int, reach: int) -> Replay:
        """Returns the smallest graph that suffices. The largest of all must have been recorded."""
        key = self.find_key(size, reach)
        assert key is not None, "the largest graph suffices for every launch"
        return self._replays[key]

    def replay_of(self, key: GraphKey) -> Replay:
        """Returns a graph that has been recorded."""
        return self._replays[key]

    def record(self, size: int, reach: int) -> None:
        """Records a graph. torch.OutOfMemoryError if it does not fit."""
        self._replays[GraphKey(size, reach)] = self._record(size, reach)

    def try_to_record(self, size: int, reach: int) -> bool:
        """Records a graph. Returns false if there is no memory for it; then it never counts as missing again."""
        try:
            self.record(size, reach)
        except torch.OutOfMemoryError:
            logger.warning(
                "there is no memory left for a graph of %d %s; larger ones stand in for it, or operators",
                *(size, self._unit),
            )
            self._refused.add(GraphKey(size, reach))
            return False
        return True

    def record_missing(self) -> GraphKey | None:
        """Records one of the missing graphs. Returns its key if there is no memory for it."""
        key = self.missing.pop(0)
        return None if self.try_to_record(*key) else key
