"""A device that only sleeps, and what another process may read of it. Standard library only, for peers' interpreters.

What it has done lies in a file that FAKE_DEVICE_FILE names. Times are `time.perf_counter()` seconds, which processes of
one Linux machine share.
"""

import mmap
import os
import struct
import threading
import time
from pathlib import Path
from typing import NamedTuple

FILE_VARIABLE, STEP_VARIABLE = "FAKE_DEVICE_FILE", "FAKE_DEVICE_STEP_S"
_LAYOUT = struct.Struct("ddqqq")


class Work(NamedTuple):
    """`busy_s`: all that was launched, of `num_tokens`, which ends at `end`; `pid` and `thread` launched it."""

    busy_s: float
    end: float
    num_tokens: int
    pid: int
    thread: int

    @classmethod
    def read(cls, file: Path) -> "Work":
        return cls._make(_LAYOUT.unpack(file.read_bytes()))

    def done_by(self, now: float) -> float:
        """Seconds that it was busy, without what is still to come."""
        return self.busy_s - max(0.0, self.end - now)


class Device:
    """Does its work in order, one launch after the other; each takes as long as the environment says."""

    def __init__(self) -> None:
        self._step_s = float(os.environ[STEP_VARIABLE])
        self._busy_s = self.end = 0.0
        self._num_tokens = 0
        file = Path(os.environ[FILE_VARIABLE])
        file.write_bytes(bytes(_LAYOUT.size))
        with file.open("r+b") as opened:
            self._told = mmap.mmap(opened.fileno(), _LAYOUT.size)

    def launch(self, num_tokens: int) -> None:
        """One step, which computes so many."""
        self.end = max(self.end, time.perf_counter()) + self._step_s
        self._busy_s += self._step_s
        self._num_tokens += num_tokens
        _LAYOUT.pack_into(
            self._told, 0, self._busy_s, self.end, self._num_tokens, os.getpid(), threading.get_native_id()
        )

    @staticmethod
    def wait_until(end: float) -> None:
        time.sleep(max(0.0, end - time.perf_counter()))
