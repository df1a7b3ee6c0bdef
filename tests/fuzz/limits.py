"""Limits of this process, and how much memory it had at most: Linux's."""

import os
import resource
from pathlib import Path


def limit_address_space(num_bytes: int) -> None:
    """Lets this process map so many bytes more than it has mapped."""
    resource.setrlimit(resource.RLIMIT_AS, (_statm(0) + num_bytes, resource.RLIM_INFINITY))


def limit_processor_time(seconds: int) -> None:
    """Ends this process by SIGXCPU if it takes so much from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def begin_peak() -> int:
    """Forgets the peak of resident memory. Returns the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _statm(1)


def peak() -> int:
    """Returns the most bytes that were resident at a time since `begin_peak`."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def _statm(index: int) -> int:
    """Bytes that are mapped (0) or resident (1)."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[index]) * os.sysconf("SC_PAGESIZE")
