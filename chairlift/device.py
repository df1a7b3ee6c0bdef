"""What concerns a device and no model: copies, waiting for it, and kernels that torch compiles for it.

Copies between host and device do not wait for the device. One to the device leaves from pinned memory; one to the host
lands in it, and an `Arrival` says when it is there. On a CPU a tensor is its own copy, and is there at once.
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
    """Starts a copy of the host's tensor to the device and does not wait; the tensor must not change any more."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers, or rows of numbers, as a tensor on the device."""
    return send(torch.tensor(values, dtype=dtype), device)


def bring(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on its way to the host: not to be read before an `Arrival` marked after it."""
    return tensor.to("cpu", non_blocking=True)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the one on which compiled kernels run, and for which memory is pinned; in this thread, meanwhile."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@dataclass(frozen=True, slots=True)
class Arrival:
    """The end of all that was launched before it."""

    event: torch.cuda.Event | None  # None: it was over when the launch returned

    @classmethod
    def mark(cls, device: torch.device) -> "Arrival":
        """Marks this place in the device's order of work."""
        if device.type != "cuda":
            return cls(None)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # its waiter sleeps
        event.record(torch.cuda.current_stream(device))
        return cls(event)

    def wait(self) -> None:
        """Returns when the device has got there. Raises what went wrong on it."""
        if self.event is not None:
            self.event.synchronize()


def compiled_on_gpu(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function of tensors that torch compiles when it is first called with one on a CUDA device.

    Torch's elementwise operators between the products of a layer are some thirty kernels of a few microseconds each;
    compiled, they are four.
    """

    @functools.cache
    def compiled(device: torch.device) -> Callable[_P, _R]:
        if (obstacle := _find_compile_obstacle(device)) is not None:
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
def _find_compile_obstacle(device: torch.device) -> str | None:
    """Why torch.compile cannot make kernels for that device; None if it can. It needs Triton and a C compiler."""
    try:
        torch.compile(F.silu)(torch.zeros(256, device=device))
    except Exception as error:  # the compiler's own, a missing program's or library's: each means the same here
        return next(iter(str(error).splitlines()), type(error).__name__)
    return None
