"""The memory behind the blocks of a cache, or of one group of its layers, which starts as zeros.

    blocks [slot, keys or values, layer, token, head, element]

All but the first three dimensions are dense: the tokens of a slot are `2 * num_layers` ranges of memory, one per plane.
`MappedMemory` reserves addresses for all slots in full, and a page takes memory when it is first written; freed pages
read as zeros again. `DenseMemory` allocates everything at once.
"""

import ctypes
import math
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from chairlift.errors import sized

_MAP_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python knows the name from 3.13 on
_SMAPS = Path("/proc/self/smaps")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def can_map(device: torch.device) -> bool:
    """Returns true if memory for blocks can be allocated as it is used."""
    return device.type == "cpu" and sys.platform == "linux"


class DenseMemory:
    """Allocates all memory at once and keeps it."""

    def __init__(self, shape: list[int], dtype: torch.dtype, device: torch.device) -> None:
        self.blocks = torch.zeros(shape, dtype=dtype, device=device)

    def clear(self, slot: int, start: int, end: int) -> None:
        """Zeroes the slot's tokens `[start, end)`. No token beyond them is valid."""
        self.blocks[slot, :, :, start:end].zero_()


class MappedMemory:
    """An anonymous private mapping on Linux, without reserved swap, that torch uses in place.

    A page with other flags lies on either side of it, so the kernel never merges this mapping with another one, and
    reports the resident memory of the blocks alone.
    """

    def __init__(self, shape: list[int], dtype: torch.dtype) -> None:
        num_elements = math.prod(shape)
        self._num_planes = shape[1] * shape[2]
        self._plane_bytes = math.prod(shape[3:]) * dtype.itemsize
        self._token_bytes = math.prod(shape[4:]) * dtype.itemsize
        size = _round_up(num_elements * dtype.itemsize)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            mapping = mmap.mmap(-1, size + 2 * mmap.PAGESIZE, flags=flags)
        except OSError as error:
            raise MemoryError(f"{sized(size)} of addresses cannot be reserved: {error}") from error
        # Tensors from a buffer keep a reference to it, so the mapping is freed with the last of them.
        self._bytes = torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=mmap.PAGESIZE)
        self.blocks = self._bytes.view(dtype)[:num_elements].view(shape)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._call("madvise", 0, size, mmap.MADV_DONTDUMP)  # core dumps must not contain users' texts
        if _HUGE_PAGES.exists():
            self._call("madvise", 0, size, mmap.MADV_NOHUGEPAGE)  # one token would take 2 MiB in every plane

    def clear(self, slot: int, start: int, end: int) -> None:  # noqa: ARG002 - what was never written costs nothing
        """As in `DenseMemory`. Whole pages are freed; parts of pages that hold something else, too, are overwritten."""
        first, last = (number * self._num_planes * self._plane_bytes for number in (slot, slot + 1))
        if start == 0:
            self._clear(first, last)
            return
        for plane in range(first, last, self._plane_bytes):
            self._clear(plane + start * self._token_bytes, plane + self._plane_bytes)

    def num_resident(self) -> int:
        """Bytes that are resident now. Takes milliseconds."""
        address = self._bytes.data_ptr()
        own = f"{address:x}-{address + self._bytes.nbytes:x} "
        with _SMAPS.open() as lines:  # most mappings belong to libraries, come after this one, and are not read
            assert any(line.startswith(own) for line in lines), "the blocks are no mapping of their own"
            resident = next(line for line in lines if line.startswith("Rss:"))
        return int(resident.split()[1]) * 1024

    def num_touched(self) -> int:
        """Bytes of pages that were written or read: at least the resident ones, and quicker to count."""
        pages = torch.empty(self._bytes.nbytes // mmap.PAGESIZE, dtype=torch.uint8)
        self._call("mincore", 0, self._bytes.nbytes, ctypes.c_void_p(pages.data_ptr()))
        return int((pages & 1).sum()) * mmap.PAGESIZE

    def most_resident(self, num_tokens: int) -> int:
        """The most bytes of pages that `num_tokens` tokens of a slot can occupy."""
        num_shared = mmap.PAGESIZE if self._plane_bytes % mmap.PAGESIZE else 0  # planes may begin and end within pages
        return self._num_planes * (_round_up(num_tokens * self._token_bytes) + num_shared)

    def _clear(self, begin: int, end: int) -> None:
        first_page, last_page = _round_up(begin), end // mmap.PAGESIZE * mmap.PAGESIZE
        if first_page >= last_page:
            self._bytes[begin:end].zero_()
            return
        if begin < first_page:
            self._bytes[begin:first_page].zero_()
        self._call("madvise", first_page, last_page - first_page, mmap.MADV_DONTNEED)
        if last_page < end:
            self._bytes[last_page:end].zero_()

    def _call(self, name: str, offset: int, size: int, last: object) -> None:
        """Calls a function of libc on a range. `mmap.madvise` would hold the GIL meanwhile."""
        address = ctypes.c_void_p(self._bytes.data_ptr() + offset)
        if self._libc[name](address, ctypes.c_size_t(size), last):
            number = ctypes.get_errno()
            raise OSError(number, f"{name}: {os.strerror(number)}")


def _round_up(num_bytes: int) -> int:
    """Rounds up to whole pages."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


AllocateBlocks = Callable[[list[int], torch.dtype, torch.device], DenseMemory | MappedMemory]
"""Allocates blocks of zeros of that shape."""


def allocate_blocks(shape: list[int], dtype: torch.dtype, device: torch.device) -> DenseMemory | MappedMemory:
    """Allocates blocks of zeros. Raises MemoryError, or RuntimeError as torch does, if there is no memory."""
    return MappedMemory(shape, dtype) if can_map(device) else DenseMemory(shape, dtype, device)
