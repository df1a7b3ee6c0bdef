"""Cores and memory of this machine, and what a container leaves of them."""

import os
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import psutil

_CGROUPS = "sys/fs/cgroup"  # of version 2; version 1 has a folder for each controller
_MEMORY_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
_OWN_CGROUPS = "proc/self/cgroup"  # lines of a number, controllers (none: version 2) and a path
_QUOTA_FILES = {"": ("cpu.max",), "cpu": ("cpu.cfs_quota_us", "cpu.cfs_period_us")}


class Host:
    """A machine as its operating system describes it."""

    def __init__(self, root: Path = Path("/")) -> None:
        """`root`: of the file system that has the descriptions of control groups."""
        self._cgroups, self._own_cgroups = root / _CGROUPS, root / _OWN_CGROUPS

    def free_bytes(self) -> int:
        """Counts bytes that this process may still allocate, on the machine or within its container's limit."""
        free = [self._available_bytes()]
        for files in _MEMORY_FILES:
            limit, usage = (self._cgroups / name for name in files)
            if limit.exists() and usage.exists() and limit.read_text().strip().isdecimal():
                free.append(max(0, int(limit.read_text()) - int(usage.read_text())))
        return min(free)

    def choose_num_threads(self) -> int:
        """Chooses a thread per physical core that this process may use, unless OMP_NUM_THREADS says otherwise."""
        wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        if wanted.isdecimal() and int(wanted):  # an earlier engine may have changed torch's own count
            return int(wanted)
        num_usable = self._num_usable()
        return max(1, min(self._num_physical() or num_usable, num_usable, self._cpu_quota()))

    def _available_bytes(self) -> int:
        return psutil.virtual_memory().available

    def _num_physical(self) -> int | None:
        """Counts physical cores; None if that is not known."""
        return psutil.cpu_count(logical=False)

    def _num_usable(self) -> int:
        """Counts the logical cores that this process may use."""
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def _cpu_quota(self) -> int:
        """Counts whole CPUs whose time this process may use; a large number without a quota. More threads would be
        throttled.

        Quotas of all enclosing groups apply. If a container sees its own group as the root, the path of its group may
        not exist there, and the root's quota applies.
        """
        quotas = [sys.maxsize]
        for line in self._own_cgroups.read_text().splitlines() if self._own_cgroups.exists() else ():
            _, controllers, path = line.split(":", 2)
            for controller in _QUOTA_FILES.keys() & controllers.split(","):
                root = self._cgroups / controller
                folders = [root, *(root / part for part in accumulate(Path(path).parts[1:], os.path.join))]
                quotas += filter(None, (_read_quota(folder, _QUOTA_FILES[controller]) for folder in folders))
        return min(quotas)


def _read_quota(folder: Path, names: Sequence[str]) -> int | None:
    """Reads the whole CPUs that a quota grants, at least 1. None: it is "max" or -1, or there is no such file."""
    words = " ".join((folder / name).read_text() for name in names if (folder / name).exists()).split()
    return max(1, int(words[0]) // int(words[1])) if len(words) == 2 and words[0].isdecimal() else None
