"""How long a device has nothing to do, by torch's profiler."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

_LEAST_GAP_US = 5.0  # kernels of one graph follow each other sooner


@dataclass(frozen=True, slots=True)
class Idle:
    """Shares of the time from the first work's beginning to the last one's end."""

    total: float  # in which nothing ran
    between_steps: float  # of that, gaps too long to lie within a step


def profile_idle(run: Callable[[], None], device: torch.device) -> Idle:
    """Of the device, while `run` runs, which must wait for the device in the end."""
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        run()
    events = [event for event in profiler.events() or [] if event.device_type.name == activity.name]
    return measure_idle((event.time_range.start, event.time_range.end) for event in events)


def measure_idle(intervals: Iterable[tuple[float, float]]) -> Idle:
    """From the beginnings and ends of all work, microseconds. ValueError if there was none."""
    ordered = sorted(intervals)
    if not ordered:
        raise ValueError("the profiler saw no work on the device")
    start, busy_until = ordered[0][0], ordered[0][0]
    gaps = []
    for begin, end in ordered:
        if begin > busy_until:
            gaps.append(begin - busy_until)
        busy_until = max(busy_until, end)
    span = busy_until - start
    return Idle(sum(gaps) / span, sum(gap for gap in gaps if gap >= _LEAST_GAP_US) / span)
