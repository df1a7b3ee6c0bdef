"""One model over several processes: each rank has a part of it, and all run the same engine on the same inputs.

Rank 0 is the process that creates the engine; it starts the others. It announces each call of the engine (`add`,
`abort`, `step`, ...) to the others before it executes it, so that all execute the same calls in the same order. Their
decisions depend on nothing that differs between processes: the time is that of rank 0's last message, the results of a
launch are those of rank 0, and memory is the least of all ranks. So schedulers, slots and lengths are the same
everywhere, and during a step only hidden states and logits are exchanged (`models/parallel.py`).

A rank ends at once when its link to rank 0 closes. When a rank is lost, rank 0 ends the others, so that none waits for
it, and serves no more requests.
"""

import functools
import logging
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from queue import SimpleQueue
from types import NoneType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from chairlift.config import EngineConfig
from chairlift.engine.execution.resolver import MachineFacts, resolve_divided
from chairlift.engine.forks import finalize
from chairlift.errors import ConfigurationError, EngineDead, QueueFull
from chairlift.models import Checkpoint
from chairlift.models.parallel import CheckpointPart, Group, find_split_obstacle
from chairlift.plan import Grammar
from chairlift.scheduler import Request

if TYPE_CHECKING:
    from chairlift.engine.core import EngineCore

logger = logging.getLogger(__name__)

_NOTICE_S = 2.0  # between an error and the notice that a lost rank was its cause
_END_S = 5.0  # for a process to end by itself
_REFUSALS: Mapping[str, tuple[type[Exception], ...]] = defaultdict(tuple, add=(QueueFull, ValueError))  # by method

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")


def on_every_rank(method: "Callable[Concatenate[EngineCore, _P], _R]") -> "Callable[Concatenate[EngineCore, _P], _R]":
    """Decorates a method of the engine that changes its state: when rank 0 calls it, all ranks do."""

    @functools.wraps(method)
    def call(core: "EngineCore", /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        core.ranks.announce(method.__name__, args, kwargs)
        try:
            return method(core, *args, **kwargs)
        except BaseException as error:  # also an interrupt
            if not isinstance(error, _REFUSALS[method.__name__]):  # every rank refuses alike
                core.ranks.give_up(error)
            raise

    return call


class Ranks:
    """The ranks of a model, as one of them sees them. In this class there is only one, which agrees with itself."""

    failure: str | None = None
    """Why the ranks no longer work, if that is known."""

    def __init__(self, config: EngineConfig) -> None:
        """`config`: with the device of this rank."""
        self.config = config

    def split(self, checkpoint: Checkpoint, machine: MachineFacts) -> tuple[Checkpoint, MachineFacts]:
        """This rank's part of the model, and of the machine."""
        return checkpoint, machine

    def least(self, own: int) -> int:
        """The least of all ranks' numbers, while the engine is created. EngineDead if a rank is lost."""
        return own

    def meet(self) -> None:
        """Waits until all ranks have arrived here; errors as in `least`."""
        self.least(0)

    def clock(self) -> float:
        """Seconds, for all decisions that depend on time."""
        return time.perf_counter()

    def agree(self, own: _T) -> _T:
        """Rank 0's value."""
        return own

    def share(self, request: Request) -> Request:
        """The request in a form that all ranks can run."""
        return request

    def announce(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Called before a method of the engine. EngineDead if it is `step` and a rank is lost."""

    def give_up(self, error: BaseException) -> None:
        """Called when a method failed midway, so that the ranks may differ. EngineDead if a rank was lost."""

    def close(self) -> None:
        """Called when the engine is closed."""


class _Divided(Ranks):
    """One of several ranks."""

    def __init__(self, rank: int, config: EngineConfig, folder: str) -> None:
        """`folder`: accessible to rank 0's user alone; the ranks find each other through it."""
        super().__init__(config)
        self._rank, self._now = rank, 0.0
        self._store = FileStore(str(Path(folder) / "ranks"), config.tensor_parallel_size)

    def split(self, checkpoint: Checkpoint, machine: MachineFacts) -> tuple[CheckpointPart, MachineFacts]:
        """See `Ranks`. On a CPU, the ranks share memory and cores."""
        size, timeout = self.config.tensor_parallel_size, timedelta(seconds=self.config.step_timeout)
        free_bytes = self.least(machine.free_bytes if machine.is_gpu else machine.free_bytes // size)
        machine = replace(machine, free_bytes=free_bytes, num_threads=max(1, machine.num_threads // size))
        group = Group(self._rank, size, self._store, torch.device(machine.device), timeout)
        return CheckpointPart.of(checkpoint, group), machine

    def clock(self) -> float:
        """Rank 0's `time.perf_counter()` in its last message."""
        return self._now

    def share(self, request: Request) -> Request:
        """The request, with a grammar that gets rank 0's answers on every rank."""
        if request.new_grammar is None:
            return request
        return replace(request, new_grammar=functools.partial(_SharedGrammar, self, request.new_grammar))


class Follower(_Divided):
    """A rank other than 0. Its process ends when a call fails, or when rank 0 ends."""

    def __init__(self, link: Connection) -> None:
        super().__init__(*link.recv())
        self._link = link

    def least(self, own: int) -> int:
        self._link.send(own)
        return self.agree(own)

    def agree(self, own: _T) -> _T:  # noqa: ARG002
        agreed: _T = self.receive()
        return agreed

    def receive(self) -> Any:
        """Rank 0's next message."""
        self._now, message = pickle.loads(self._link.recv_bytes())
        return message


class Leader(_Divided):
    """Rank 0. The others start when it is created, and end with it."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        """ConfigurationError if the model cannot be divided like this, or there are too few devices."""
        obstacle = find_split_obstacle(checkpoint, config.tensor_parallel_size)
        config = resolve_divided(config, obstacle, torch.cuda.device_count())
        folder = tempfile.mkdtemp(prefix="chairlift-")
        super().__init__(0, config, folder)
        self._removal = finalize(self, shutil.rmtree, folder, True)
        self._others = _Others(config, folder)
        self._end = finalize(self, self._others.end)

    @property
    def failure(self) -> str | None:  # type: ignore[override]
        return self._others.failure

    def split(self, checkpoint: Checkpoint, machine: MachineFacts) -> tuple[CheckpointPart, MachineFacts]:
        part, machine = super().split(checkpoint, machine)
        self._others.group = part.group
        return part, machine

    def least(self, own: int) -> int:
        return self.agree(min(own, *self._others.answers()))

    def agree(self, own: _T) -> _T:
        self._now = time.perf_counter()
        self._others.tell((self._now, own))
        return own

    def announce(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """See `Ranks`. Tells the others."""
        if name == "step" and self.failure is not None:
            raise EngineDead(self.failure)
        self.agree((name, [_without_grammar(each) for each in args], kwargs))

    def give_up(self, error: BaseException) -> None:
        """See `Ranks`. Ends the others."""
        if isinstance(error, Exception) and self._others.is_over.wait(_NOTICE_S):
            raise EngineDead(self.failure) from error
        self._others.fail(f"a step ended with {type(error).__name__}, so that the ranks no longer agree")

    def close(self) -> None:
        """See `Ranks`. Ends the others."""
        self._end()
        self._removal()


class _SharedGrammar:
    """A sequence's grammar. Rank 0 has the real one and sends its answers to the others. See `plan.Grammar`."""

    def __init__(self, ranks: Ranks, new: Callable[[], Grammar | None]) -> None:
        self._ranks = ranks
        self.own = self._attempt(new)

    @property
    def is_ready(self) -> bool:
        return self._ranks.agree(self.own is None or self.own.is_ready)

    def foresee(self) -> None:
        """Ranks do not guess."""

    def advance(self, token_id: int) -> bool:
        return self._ranks.agree(self._attempt(lambda: self.own is not None and self.own.advance(token_id)))

    def _attempt(self, act: Callable[[], _T]) -> _T:
        """Rank 0's result. If it fails there, all ranks raise RuntimeError."""
        result, problem = None, None
        try:
            result = act()
        except Exception as error:  # a grammar's: other requests continue
            problem = str(error)
        if (problem := self._ranks.agree(problem)) is not None:
            raise RuntimeError(problem)
        return cast("_T", result)


def _without_grammar(argument: object) -> object:
    """The argument as other ranks get it: a request without the function that makes its grammar."""
    if isinstance(argument, Request) and argument.new_grammar is not None:
        return replace(argument, new_grammar=cast("Any", NoneType))
    return argument


class _Others:
    """The processes of the other ranks. Has no reference to the engine, so that they end when that is collected."""

    def __init__(self, config: EngineConfig, folder: str) -> None:
        """`folder`: see `_Divided`."""
        self.failure: str | None = None
        self.is_over = threading.Event()
        self.group: Group | None = None
        self._is_ending = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[Connection] = []
        for rank in range(1, config.tensor_parallel_size):
            link, theirs = Pipe()
            with theirs:
                program = f"from chairlift.engine.parallel import follow; follow({theirs.fileno()})"
                self._processes.append(start_interpreter(program, theirs.fileno()))
            self._links.append(link)
            device = f"cuda:{rank}" if config.device != "cpu" else "cpu"
            link.send((rank, config.model_copy(update={"device": device}), folder))
        self._answers = [SimpleQueue[int | None]() for _ in self._links]
        self._thread = threading.Thread(target=self._listen, name="chairlift-ranks", daemon=True)
        self._thread.start()

    def answers(self) -> list[int]:
        """One answer of each rank. EngineDead if a rank is lost."""
        answers = [answer for queue in self._answers if (answer := queue.get()) is not None]
        if len(answers) < len(self._answers):
            raise EngineDead(self.failure)
        return answers

    def tell(self, message: object) -> None:
        """Sends a message to all. `_listen` notices a lost rank."""
        if not self.is_over.is_set():
            pickled = pickle.dumps(message)
            with suppress(OSError):
                for link in self._links:
                    link.send_bytes(pickled)

    def fail(self, reason: str) -> None:
        """Kills all of them at once."""
        if self.failure is None:
            self.failure = reason
            logger.critical("%s; all ranks end", reason)
        self._kill()
        self.is_over.set()
        for queue in self._answers:
            queue.put(None)
        if self.group is not None:
            self.group.abort()

    def end(self) -> None:
        """Asks them to end, and waits; kills those that take too long."""
        self._is_ending = True
        for link in self._links:
            os.set_blocking(link.fileno(), False)  # a rank that is stopped takes no more messages, and is killed below
        self.tell((0.0, None))
        deadline = time.monotonic() + _END_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._kill()
        if threading.current_thread() is not self._thread:  # which may also collect garbage and so call this
            self._thread.join()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _listen(self) -> None:
        """In a thread: receives their answers, until one of them is lost."""
        last_words: dict[int, str] = {}
        while True:
            ready = wait(self._links)
            for index in (index for index, link in enumerate(self._links) if link in ready):
                try:
                    said = self._links[index].recv()
                except (EOFError, OSError):
                    if not self._is_ending:
                        self.fail(_describe_end(index + 1, self._processes[index], last_words.get(index)))
                    return
                if isinstance(said, str):
                    last_words[index] = said
                else:
                    self._answers[index].put(said)


# --- processes


def start_interpreter(program: str, fd: int) -> "subprocess.Popen[bytes]":
    """Starts a process that runs a Python program and inherits a file descriptor. It finds modules where this process
    does, and runs nothing of the user's main program.
    """
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
    return subprocess.Popen([sys.executable, "-c", program], env=environment, stdin=subprocess.DEVNULL, pass_fds=[fd])


def _describe_end(rank: int, process: "subprocess.Popen[bytes]", last_words: str | None) -> str:
    """Why a rank has closed its link."""
    if last_words is not None:
        return f"rank {rank} failed: {last_words}"
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    code = process.returncode or 0
    return f"rank {rank} was killed by signal {-code}" if code < 0 else f"rank {rank} has ended"


def follow(fd: int) -> None:
    """The program of a rank other than 0; `fd` is its end of the link to rank 0. Ends the process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 handles these
        signal.signal(number, signal.SIG_IGN)
    logging.getLogger("chairlift").setLevel(logging.ERROR)  # rank 0 logs the rest as well
    threading.Thread(target=_end_with_link, args=(fd,), daemon=True).start()
    link, code = Connection(fd), 0
    try:
        _obey(Follower(link))
    except BaseException as error:
        code = 1
        if not isinstance(error, ConfigurationError):
            logger.critical("a rank failed", exc_info=error)
        with suppress(OSError):
            link.send(f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)  # without waiting for other threads


def _obey(ranks: Follower) -> None:
    from chairlift.engine.core import EngineCore  # which imports this module

    core = EngineCore(ranks.config, ranks=ranks)
    while (call := ranks.receive()) is not None:
        name, args, kwargs = call
        with suppress(*_REFUSALS[name]):  # rank 0 has refused as well
            getattr(core, name)(*args, **kwargs)


def _end_with_link(fd: int) -> None:
    """In a thread: ends this process when rank 0 is gone, even if its device waits for rank 0 for ever."""
    poll = select.poll()
    poll.register(fd, 0)  # a closed other end is reported in any case
    poll.poll()
    os._exit(1)
