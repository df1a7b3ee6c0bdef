"""Runs cases in forks of this process, so that one that crashes, hangs or takes too much memory ends alone."""

import faulthandler
import json
import os
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.fuzz.cases import Case, laid_out
from tests.fuzz.limits import begin_peak, limit_address_space, limit_processor_time, peak

_CASES_OF_A_FORK = 200
_PROCESSOR_S = 10  # of one case
_WALL_S = 120.0  # of one case, for one that waits and computes nothing
_ADDRESS_SPACE = 2**30  # bytes beyond what is mapped before the first case: threads and caches of libraries are in it
_MOST_MEMORY = 64 * 2**20  # bytes beyond twice the checkpoint's size
_MOST_OF_TRACE = 3000  # characters


Attempt = Callable[[Path], str | None]
"""Serves a checkpoint. Returns None, or why it is refused. Defect for what no file may lead to."""


class Defect(Exception):
    """An outcome that no file may have. The message says which."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Holds what came of a case: served if both messages are None."""

    case: Case
    refusal: str | None = None
    defect: str | None = None


def run(cases: Sequence[Case], attempt: Attempt) -> Iterator[Outcome]:
    """Runs cases in order. Must be called while this process has a single thread."""
    left = list(cases)
    while left:
        for outcome in _Fork(left[:_CASES_OF_A_FORK], attempt).outcomes():
            yield outcome
            left.pop(0)


class _Fork:
    """A process that runs cases until one ends it."""

    def __init__(self, cases: Sequence[Case], attempt: Attempt) -> None:
        self._cases = cases
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed with the outcomes
        self._reader, writer = os.pipe()
        sys.stdout.flush()
        self._child = os.fork()
        if not self._child:
            os.close(self._reader)
            _run_all(cases, attempt, writer, self._errors)
        os.close(writer)

    def outcomes(self) -> Iterator[Outcome]:
        """Yields what the process says; at its end, the case that ended it, unless it has run them all."""
        num_ended, is_late = 0, False
        with open(self._reader, encoding="utf-8") as lines:
            while not (is_late := not select.select([lines], [], [], _WALL_S)[0]) and (line := lines.readline()):
                yield Outcome(self._cases[num_ended], *json.loads(line))
                num_ended += 1
            if is_late:
                os.kill(self._child, signal.SIGKILL)
        _, status = os.waitpid(self._child, 0)
        if num_ended < len(self._cases):
            yield Outcome(self._cases[num_ended], defect=self._reason(status, is_late))
        self._errors.close()

    def _reason(self, status: int, is_late: bool) -> str:
        if is_late:
            return f"hung for {_WALL_S:.0f} s"
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGXCPU:
            return f"took more than {_PROCESSOR_S} s of processor time"
        self._errors.seek(0)
        ending = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return f"{ending}\n{self._errors.read()[-_MOST_OF_TRACE:]}"


def _run_all(cases: Sequence[Case], attempt: Attempt, writer: int, errors: IO[str]) -> None:
    """Runs them in a process of their own, and ends it. Writes a line for each: its refusal and its defect."""
    code = 1
    try:
        for stream in (1, 2):
            os.dup2(errors.fileno(), stream)
        faulthandler.enable()
        limit_address_space(_ADDRESS_SPACE)
        for case in cases:
            errors.seek(0)
            errors.truncate()
            limit_processor_time(_PROCESSOR_S)
            os.write(writer, (json.dumps(_run_one(case, attempt)) + "\n").encode())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _run_one(case: Case, attempt: Attempt) -> tuple[str | None, str | None]:
    """Returns the refusal, and the defect."""
    try:
        with laid_out(case.file, case.content()) as path:
            refusal = _attempt_within(_most_memory(path), attempt, path)
            return refusal and refusal.replace(str(path), "PATH"), None
    except Exception as error:
        what = str(error) if isinstance(error, Defect) else f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))[-_MOST_OF_TRACE:]
        return None, f"{what}\n{trace}"


def _attempt_within(num_bytes: int, attempt: Attempt, path: Path) -> str | None:
    """Defect if it takes more memory."""
    before = begin_peak()
    refusal = attempt(path)
    if (growth := peak() - before) > num_bytes:
        raise Defect(f"took {growth >> 20} MiB of memory, and at most {num_bytes >> 20} MiB is right ({refusal})")
    return refusal


def _most_memory(path: Path) -> int:
    """The bytes that serving the checkpoint may take."""
    files = path.iterdir() if path.is_dir() else [path]
    return 2 * sum(each.stat().st_size for each in files) + _MOST_MEMORY
