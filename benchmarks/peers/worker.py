"""A worker seen from the driver: a process that answers one JSON line with another, and can be stopped in between."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

_LOG_TAIL_LINES = 8


class WorkerError(Exception):
    """A worker did not do what it was asked. The message is for the table: one line."""


class WorkerDied(WorkerError):
    """Its process is gone, or has been killed because it could not go on."""


class Worker:
    """A session of its own. It runs within `turn()` only, so that it does not disturb the others.

    `log` receives what its libraries print. Always `kill` it: a stopped process does not notice that its driver left.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        self.started_at = time.monotonic()
        with log.open("ab") as log_file:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                start_new_session=True,
            )
        self._is_killed = False
        self._signal(signal.SIGSTOP)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """The time in which it runs."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def ask(self, message: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Its answer, which must come in time. Raises `WorkerDied`, and `WorkerError` if it answers with an error."""
        asked_at = time.monotonic()
        limit = threading.Timer(limit_s, self._signal, [signal.SIGKILL])  # which ends reading and writing too
        limit.start()
        try:
            line = self._exchange(json.dumps(message).encode() + b"\n")
        finally:
            limit.cancel()
        if not line.endswith(b"\n"):
            is_late = time.monotonic() - asked_at >= limit_s
            raise self._given_up(f"no answer within {limit_s:g} s" if is_late else self._end())
        try:
            answer = json.loads(line)
        except ValueError:
            raise self._given_up(f"it answered {line[:80]!r}, which is no JSON") from None
        if not isinstance(answer, dict):
            raise self._given_up(f"it answered {line[:80]!r}, which is no JSON object")
        if "error" in answer:
            raise WorkerError(str(answer["error"]))
        return answer

    def peak_bytes(self) -> int:
        """Resident memory at its highest, summed over its processes (pages that they share count more than once)."""
        return sum(_peak_bytes(pid) for pid in self._pids())

    def kill(self) -> None:
        """Ends all its processes, stopped or not. It may be called again."""
        if self._is_killed:
            return
        self._is_killed = True
        self._signal(signal.SIGKILL)  # which also ends what is stopped
        self._process.wait()
        self._signal(signal.SIGKILL)  # what was being started meanwhile
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if stream is not None:
                    stream.close()

    @staticmethod
    def tail_of(log: Path) -> str:
        """The last lines that a worker has printed."""
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(line for line in lines[-_LOG_TAIL_LINES:] if line.strip())

    def _exchange(self, line: bytes) -> bytes:
        """The line that answers; without an end if the process is gone."""
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        try:
            pipe_in.write(line)
            pipe_in.flush()
        except BrokenPipeError:
            return b""
        return pipe_out.readline()

    def _end(self) -> str:
        """Returns how the process ended, its pipes being closed."""
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "it closed its pipes"
        return f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"

    def _given_up(self, reason: str) -> WorkerDied:
        self.kill()
        return WorkerDied(reason)

    def _pids(self) -> list[int]:
        """The processes of its session: its own and those it has started, whoever their parent is now."""
        pids = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                if os.getsid(pid) == self._process.pid:
                    pids.append(pid)
        return pids

    def _signal(self, number: signal.Signals) -> None:
        """To each process of its session: an engine may have put its own into groups of their own."""
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _peak_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    kilobytes = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")]
    return sum(kilobytes) * 1024
