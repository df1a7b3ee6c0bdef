"""Reads parts of a file into tensors, by copying them.

A file may become shorter while it is read, for instance if another program writes it anew. With a mapping that would
end the process, without a message; here it is an error.
"""

import os
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from chairlift.errors import CheckpointError


class FileBytes:
    """A file that is open for reading. As a context manager, it closes itself."""

    def __init__(self, path: Path) -> None:
        """OSError if it cannot be opened."""
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def num_bytes(self) -> int:
        """Tells the file's size as it is now."""
        return os.fstat(self._descriptor).st_size

    def read(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Returns uint8 `[num_bytes]` from that place on. CheckpointError if the file has fewer."""
        content = torch.empty(num_bytes, dtype=torch.uint8)
        self.read_into(content, offset)
        return content

    def read_into(self, place: torch.Tensor, offset: int) -> None:
        """Fills uint8 `[n]` from that place of the file on. CheckpointError if the file has fewer."""
        left = place.numpy().data
        while left:
            num_read = os.preadv(self._descriptor, [left], offset)
            if not num_read:
                raise CheckpointError(f"{self._path} has become shorter while it was read; load it again")
            left, offset = left[num_read:], offset + num_read

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
