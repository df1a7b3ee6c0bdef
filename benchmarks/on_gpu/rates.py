"""The two ceilings of a device: how fast it reads memory, and how fast it multiplies matrices."""

import time
from collections.abc import Callable

import torch
from comparison.ceiling import Rates

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
