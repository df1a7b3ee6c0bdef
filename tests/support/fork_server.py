"""A process that has imported Chairlift and forks: a server in a child is up in a fraction of the 5 s of an import.

Each connection to its socket asks for one child and is told the child's pid and, when it ends, its exit code. The
process ends with its standard input, so that none outlives the tests.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from types import CodeType
from typing import NoReturn

PRELOADED = (
    *("chairlift.__main__", "chairlift.loadtest.command", "chairlift.api.server", "uvloop"),
    "transformers.models.llama.configuration_llama",  # which opening a checkpoint imports: 2 s
)
ROOT = Path(__file__).parents[2]
_ADDRESS = "CHAIRLIFT_TESTS_FORK_SERVER"
_held = contextlib.ExitStack()  # the fork server that this process started


class ForkedProcess:
    """Holds what tests use of `subprocess.Popen`, for a child of the fork server."""

    def __init__(self, code: str, arguments: Sequence[str], environment: Mapping[str, str], stderr: int) -> None:
        """Runs Python code as `python -c code arguments` does; `stderr` is a file descriptor."""
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(os.environ[_ADDRESS])
        job = {"code": code, "arguments": list(arguments), "environment": dict(environment)}
        socket.send_fds(self._connection, [b"\0"], [stderr])
        self._connection.sendall(json.dumps(job).encode())
        self._connection.shutdown(socket.SHUT_WR)
        self._news = self._connection.makefile()
        pid = self._news.readline()
        assert pid, "the fork server has ended"
        self.pid = int(pid)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not connection.wait([self._connection], timeout):
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            self.returncode = int(self._news.readline())
            self._news.close()
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def is_possible() -> bool:
    """On Linux, unless a container forbids the system call."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def ensure_started() -> None:
    """Starts the fork server unless there is one, and does not wait for it. Processes started from now on share it."""
    if _ADDRESS not in os.environ:
        os.environ[_ADDRESS] = _held.enter_context(_started())


def stop() -> None:
    """Stops what `ensure_started` has started in this process."""
    _held.close()


@contextmanager
def _started() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="chairlift-fork-") as directory:
        address = str(Path(directory, "socket"))
        command = [sys.executable, "-m", "tests.support.fork_server", address]  # whose socket is there when it is ready
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe) as popen:  # leaving it closes its input
            assert popen.stdout is not None
            assert popen.stdout.readline() == b"ready\n", "the fork server did not start"
            yield address
            del os.environ[_ADDRESS]


@dataclass(frozen=True)
class _Job:
    code: CodeType
    arguments: list[str]
    environment: dict[str, str]
    stderr: int

    @classmethod
    def read(cls, asking: socket.socket) -> "_Job":
        _, (stderr, *_), _, _ = socket.recv_fds(asking, 1, 1)
        with asking.makefile() as request:
            job = json.load(request)
        return cls(compile(job.pop("code"), "<string>", "exec"), **job, stderr=stderr)

    def run(self) -> NoReturn:
        """Ends the process as Python does, but for its last garbage collection, which takes a second."""
        code = 1
        try:
            os.dup2(self.stderr, 2)
            os.close(self.stderr)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ.clear()
            os.environ.update(self.environment)
            sys.argv = ["-c", *self.arguments]
            exec(self.code, {"__name__": "__main__"})
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            threading._shutdown()  # type: ignore[attr-defined] # waits for threads
            atexit._run_exitfuncs()
            sys.stderr.flush()
            os._exit(code)


def _next_job(listening: socket.socket) -> _Job:
    """Forks for each connection. Returns in the children only."""
    children: dict[int, tuple[int, socket.socket]] = {}  # file descriptor of the process -> pid, who asked for it
    while True:
        ready = connection.wait([listening, 0, *children])  # 0: standard input
        if 0 in ready:
            os._exit(0)
        for child in children.keys() & set(ready):
            os.close(child)
            pid, asking = children.pop(child)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with asking, contextlib.suppress(OSError):  # who asked may be gone
                asking.sendall(b"%d\n" % code)
        if listening in ready:
            asking, _ = listening.accept()
            job = _Job.read(asking)
            pid = os.fork()
            if not pid:
                for child, (_, other) in children.items():
                    os.close(child)
                    other.close()
                asking.close()
                return job
            os.close(job.stderr)
            children[os.pidfd_open(pid)] = pid, asking
            asking.sendall(b"%d\n" % pid)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for those who started it
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(sys.argv[1])
        listening.listen()
        print("ready", flush=True)  # noqa: T201 - who connects waits for the imports
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what children print is for nobody
        for name in PRELOADED:
            importlib.import_module(name)
        gc.freeze()  # a collection in a child would write to, and so copy, all that it shares with this process
        num_threads = len(os.listdir("/proc/self/task"))
        assert num_threads == 1, f"{num_threads} threads: forks would lack all but one"
        job = _next_job(listening)
    job.run()


if __name__ == "__main__":
    main()
