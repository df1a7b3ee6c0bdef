"""Device functions that know no model: copies, synchronization, and kernels that torch compiles.

Copies between host and device are asynchronous, from and to pinned memory. An `Arrival` tells when a copy to the host
is complete. On a CPU nothing is copied: the tensor itself is returned.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
from torch.nn import functional as F

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Starts an asynchronous copy of a host tensor to the device. The tensor must not change afterwards."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers, or rows of numbers, as a tensor on the device."""
    return send(torch.tensor(values, dtype=dtype), device)


def bring(tensor: torch.Tensor) -> torch.Tensor:
    """Starts an asynchronous copy to the host. Reading it must wait for an `Arrival` that is marked afterwards."""
    return tensor.to("cpu", non_blocking=True)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which this thread runs compiled kernels on that GPU and pins memory for it; nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@dataclass(frozen=True, slots=True)
class Arrival:
    """The completion of all work launched before it."""

    event: torch.cuda.Event | None  # None: the work was complete when the launch returned

    @classmethod
    def mark(cls, device: torch.device) -> "Arrival":
        """Marks the current end of the device's work."""
        if device.type != "cuda":
            return cls(None)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # waiting sleeps instead of spinning
        event.record(torch.cuda.current_stream(device))
        return cls(event)

    def wait(self) -> None:
        """Waits until the work is complete. Raises the device's error, if any."""
        if self.event is not None:
            self.event.synchronize()


def compiled_on_gpu(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function of tensors that torch compiles when it is first called with one on a CUDA device.

    Torch's elementwise operators between the products of a layer take some thirty kernels of a few microseconds each;
    compiled, they take four.
    """

    @functools.cache
    def compiled(device: torch.device) -> Callable[_P, _R]:
        if (obstacle := find_compile_obstacle(device)) is not None:
            logger.warning("%s runs operator by operator, which is slower: %s", function.__name__, obstacle)
            return function
        return torch.compile(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        first = args[0]
        if isinstance(first, torch.Tensor) and first.is_cuda:
            return compiled(first.device)(*args, **kwargs)
        return function(*args, **kwargs)

    return call


@functools.cache
def find_compile_obstacle(device: torch.device) -> str | None:
    """Says why torch.compile cannot make kernels for that device; None if it can. It needs Triton and a C compiler."""
    try:
        torch.compile(F.silu)(torch.zeros(256, device=device))
    except Exception as error:  # of the compiler, or due to a missing program or library: all have the same effect
        return _reason(error)
    return None


def find_recording_obstacle(work: Callable[[], object], device: torch.device) -> str | None:
    """Says why that work cannot be done on the device, or on a GPU not be recorded by a graph; None if it can.

    It depends on the card and on torch, so it is tried.
    """
    try:
        with on_device(device):
            work()  # libraries load what they need, which no graph can
            if device.type == "cuda":
                _record(work)
    except Exception as error:  # of torch or of the capture: all have the same effect
        return _reason(error)
    return None


def _record(work: Callable[[], object]) -> None:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    graph.replay()
    torch.cuda.synchronize()


def _reason(error: Exception) -> str:
    """Returns the first line of what it says, or its type if it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)
