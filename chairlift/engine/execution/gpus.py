"""The GPUs of this machine, and their memory."""

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from chairlift.device import find_compile_obstacle, on_device

_AMPERE = (8, 0)  # compute capability of the first GPUs that multiply bfloat16


class GpuMemory(NamedTuple):
    """Bytes of a GPU's memory."""

    free: int
    total: int


class Gpu:
    """A CUDA device."""

    def __init__(self, index: int) -> None:
        self._index = index

    @classmethod
    def named(cls, device: str) -> "Gpu":
        """Finds the GPU of a device such as "cuda:0"."""
        return cls(torch.device(device).index or 0)

    @property
    def has_bfloat16(self) -> bool:
        """True if it multiplies bfloat16."""
        return self.capability() >= _AMPERE

    def capability(self) -> tuple[int, int]:
        """Reads its compute capability."""
        return torch.cuda.get_device_capability(self._index)

    def runs_compiled_kernels(self) -> bool:
        """True if Triton and a C compiler are there to make kernels for it."""
        return find_compile_obstacle(torch.device("cuda", self._index)) is None

    def memory(self) -> GpuMemory:
        """Reads how much memory there is, and how much of it no process has."""
        return GpuMemory(*torch.cuda.mem_get_info(self._index))

    def begin_measuring(self) -> int:
        """Counts the bytes that are allocated now, and those that will be at the peak, from here on."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._index)
        return torch.cuda.memory_allocated(self._index)

    def end_measuring(self) -> int:
        """Returns the bytes that were allocated at the peak, and frees what is cached."""
        num_bytes = torch.cuda.max_memory_allocated(self._index)
        torch.cuda.empty_cache()
        return num_bytes

    def current(self) -> AbstractContextManager[object]:
        """Makes it the device of what is launched within."""
        return on_device(torch.device("cuda", self._index))


def list_gpus() -> list[Gpu]:
    """Finds all of this machine's."""
    return [Gpu(index) for index in range(torch.cuda.device_count())]
