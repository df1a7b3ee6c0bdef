"""Guards engines against forks: in the child the threads, helper processes and other ranks of an engine are not there.

An engine that was made before a fork refuses to work in the child, and nothing in the child ends what is the parent's.
A new engine can be made there, because OpenMP's threads are ended before a fork, and start again when they are needed.
"""

import ctypes
import os
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

from chairlift.errors import EngineClosed

_PAUSE_HARD = 2  # omp_pause_hard: ends the threads of the calling thread's pool


class Home:
    """The process in which something was made."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """False in a process that was forked from it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """`EngineClosed` in a process that was forked from it."""
        if not self.is_here:
            raise EngineClosed(
                f"this engine was made in process {self._pid}, and process {os.getpid()} was forked from that; make an"
                " engine after the fork, or start processes with multiprocessing's method spawn"
            )


def finalize(owner: object, function: Callable[..., object], *args: Any) -> "weakref.finalize[..., Any]":
    """As `weakref.finalize`, for a function that does nothing in processes that were forked from this one."""
    return weakref.finalize(owner, _call_at_home, Home(), function, *args)


def _call_at_home(home: Home, function: Callable[..., object], *args: Any) -> None:
    if home.is_here:
        function(*args)


@cache
def prepare_for_forks() -> None:
    """Has GNU's OpenMP end its threads before each fork from here on: it would wait for them in the child for ever.

    Other OpenMP runtimes see to that themselves.
    """
    symbols = ctypes.CDLL(None)
    is_gnus = hasattr(symbols, "GOMP_parallel") and not hasattr(symbols, "__kmpc_fork_call")
    if is_gnus and hasattr(symbols, "omp_pause_resource_all") and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lambda: symbols.omp_pause_resource_all(_PAUSE_HARD))
