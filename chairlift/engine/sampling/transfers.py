"""Copies between host and device that do not wait for the device.

A copy to the device leaves from pinned memory; one to the host lands in it, and an `Arrival` says when it is there. On
a CPU a tensor is its own copy, and is there at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from chairlift.cache.memory import send


def to_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers, or rows of numbers, as a tensor on the device."""
    return send(torch.tensor(values, dtype=dtype), device)


def bring(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on its way to the host: not to be read before an `Arrival` marked after it."""
    return tensor.to("cpu", non_blocking=True)


@dataclass(frozen=True, slots=True)
class Arrival:
    """The end of all that was launched before it."""

    event: torch.cuda.Event | None  # None: it was over when the launch returned

    @classmethod
    def mark(cls, device: torch.device) -> "Arrival":
        """Marks this place in the device's order of work."""
        if device.type == "cpu":
            return cls(None)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # its waiter sleeps
        event.record(torch.cuda.current_stream(device))
        return cls(event)

    def wait(self) -> None:
        """Returns when the device has got there. Raises what went wrong on it."""
        if self.event is not None:
            self.event.synchronize()
