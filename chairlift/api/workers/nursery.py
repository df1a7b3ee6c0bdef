"""The nursery: the process that forks API workers, and the processes that it has forked."""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn, Self

from chairlift.api.workers.worker import work
from chairlift.engine.interpreter import start_interpreter
from chairlift.errors import ConfigurationError
from chairlift.models.families import preload

IS_POSSIBLE = hasattr(os, "fork") and hasattr(socket, "SO_REUSEPORT")

FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that the engine's process handles, and forwards to workers."""

_LOAD_S = 300.0  # for the nursery to import its modules, from a slow disk
_ORPHANS_S = 10.0  # that workers have to end by themselves when the engine's process is gone
_POLL_S = 0.05
_PID = struct.Struct("<I")


class WorkerProcess:
    """A forked process, to be killed if need be. Another one that gets its id later is in no danger on Linux."""

    def __init__(self, pid: int) -> None:
        """`pid`: of a process that the nursery has not reaped."""
        self.pid = pid
        self._descriptor: int | None = None
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # some containers forbid it
                self._descriptor = os.pidfd_open(pid)

    def kill(self) -> None:
        """Ends it at once, even if it is stopped. Does nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self._descriptor is None:
                os.kill(self.pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def close(self) -> None:
        """Gives up the means to kill it."""
        if self._descriptor is not None:
            os.close(self._descriptor)


@dataclass(frozen=True, slots=True)
class Newborn:
    """A worker that has just been forked."""

    process: WorkerProcess
    socket: socket.socket  # closes when the worker ends


class Nursery:
    """The process that forks workers. It ends when its socket closes, so also if this process is killed."""

    def __init__(self, program: str) -> None:
        """`program`: Python that calls `nurse`, with `{}` in place of the number of its socket.

        `ConfigurationError` if this system has no fork.
        """
        if not IS_POSSIBLE:
            raise ConfigurationError("api_workers: this system has no fork; leave it out, or set it to 1")
        self._program = program
        self._turn = asyncio.Lock()  # answers come in the order of the questions
        self._is_loaded = self._is_over = False
        self._start()

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = start_interpreter(self._program.format(theirs.fileno()), theirs.fileno())

    async def bear(self, timeout_s: float) -> Newborn:
        """Starts a worker. OSError if the nursery dies meanwhile, or does not answer once it has loaded its modules;
        the next call starts another one.
        """
        async with self._turn:
            if self._is_over or self._process.poll() is not None:
                self._renew()
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    socket.send_fds(self._socket, [b"\0"], [theirs.fileno()])
                pid = await asyncio.wait_for(self._read_pid(), timeout_s if self._is_loaded else _LOAD_S)
            except BaseException as error:
                ours.close()
                self._end()
                if isinstance(error, TimeoutError):
                    raise ChildProcessError("the process that starts them did not answer") from error
                raise
            self._is_loaded = True
            return Newborn(WorkerProcess(pid), ours)

    async def _read_pid(self) -> int:
        self._socket.setblocking(False)
        answer = await asyncio.get_running_loop().sock_recv(self._socket, _PID.size)
        if len(answer) < _PID.size:
            raise ChildProcessError("the process that starts them has died")
        (pid,) = _PID.unpack(answer)
        return int(pid)

    def _renew(self) -> None:
        if not self._is_over:
            self._end()
        self._start()
        self._is_loaded = self._is_over = False

    def _end(self) -> None:
        """Ends the nursery, even if it is stopped."""
        self._is_over = True
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_over:
            self._end()


def nurse(fd: int, run: Callable[[Coroutine[Any, Any, int]], int]) -> NoReturn:
    """The nursery's program. `run` runs a worker's loop."""
    for number in FORWARDED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    preload()
    gc.collect()
    gc.freeze()  # otherwise a collection in a worker would write to, and so copy, all shared memory
    children: set[int] = set()
    with socket.socket(fileno=fd) as parent:
        while True:
            _, fds, _, _ = socket.recv_fds(parent, 1, 1)
            _reap(children)
            if not fds:
                _outlive(children)
            if not (pid := os.fork()):
                break
            children.add(pid)
            os.close(fds[0])
            with contextlib.suppress(OSError):  # the parent is gone, which the next read will say
                parent.sendall(_PID.pack(pid))
    work(socket.socket(fileno=fds[0]), run)


def _reap(children: set[int]) -> None:
    """Removes those that have ended."""
    with contextlib.suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            children.discard(pid)


def _outlive(children: set[int]) -> NoReturn:
    """Ends this process after its children, which end by themselves unless they are stopped."""
    deadline = time.monotonic() + _ORPHANS_S
    while children and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        _reap(children)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)
