"""Engines of several ranks for tests, whose other ranks are forked where that is possible."""

import os
import threading
from dataclasses import replace

from chairlift.engine.core import EngineCore
from chairlift.engine.interpreter import start_interpreter
from chairlift.engine.parallel import Leader
from chairlift.engine.parts import Process
from tests.support import fork_server
from tests.support.engines import HOOKED
from tests.support.fork_server import ForkedProcess


class ForkedRank(ForkedProcess):
    """A rank whose process has imported Chairlift already. As with `subprocess.Popen`, any thread may wait for it."""

    def __init__(self, program: str, fd: int) -> None:
        self._lock = threading.Lock()
        link = f"import os; os.dup2(2, {fd}); os.dup2(os.open(os.devnull, os.O_WRONLY), 2)"
        super().__init__(f"{link}; {program}", [], os.environ, stderr=fd)

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            return super().wait(timeout)


def start_rank(program: str, fd: int) -> Process:
    """Only the ranks of a server are fresh interpreters."""
    if not fork_server.is_possible():
        return start_interpreter(program, fd)
    fork_server.ensure_started()
    return ForkedRank(program, fd)


PARTS = replace(HOOKED, start_rank=start_rank)


def pids_of_ranks(core: EngineCore) -> list[int]:
    """The processes of all but the first."""
    assert isinstance(core.ranks, Leader)
    return core.ranks.pids
