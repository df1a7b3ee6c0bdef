"""Says what a device does: how fast it reads memory and multiplies matrices, and for how long it has nothing to do."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from comparison.ceiling import Rates
from torch.profiler import ProfilerActivity, profile

_NUM_TRIES = 5
_NUM_CALLS = 10  # in one try, so that launching counts for nothing


def measure_rates(device: torch.device, dtype: torch.dtype, cube: int, read_bytes: int) -> Rates:
    """Bytes of the better of a sum and a copy (which moves each byte twice), FLOPs of a product of cubes.

    Each the best of several tries, as a ceiling is asked for.
    """
    buffer = torch.zeros(read_bytes // 4, dtype=torch.float32, device=device)
    copied = torch.empty_like(buffer)
    left, right = (torch.randn(cube, cube, device=device).to(dtype) for _ in range(2))
    return Rates(
        bytes_per_second=max(
            read_bytes / _least_seconds(lambda: buffer.sum(), device),
            2 * read_bytes / _least_seconds(lambda: copied.copy_(buffer), device),
        ),
        flops_per_second=2 * cube**3 / _least_seconds(lambda: left @ right, device),
    )


def wait_for(device: torch.device) -> None:
    """Until everything launched is done; a CPU is never behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _least_seconds(work: Callable[[], object], device: torch.device) -> float:
    work()
    seconds = []
    for _ in range(_NUM_TRIES):
        wait_for(device)
        start = time.perf_counter()
        for _ in range(_NUM_CALLS):
            work()
        wait_for(device)
        seconds.append((time.perf_counter() - start) / _NUM_CALLS)
    return min(seconds)


_LEAST_GAP_US = 5.0  # kernels of one graph follow each other sooner


@dataclass(frozen=True, slots=True)
class Idle:
    """Shares of the time from the first work's beginning to the last one's end."""

    total: float  # in which nothing ran
    between_steps: float  # of that, gaps too long to lie within a step


def profile_idle(run: Callable[[], None], device: torch.device) -> Idle:
    """Returns how idle the device is while `run` runs, which must wait for the device at its end."""
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
