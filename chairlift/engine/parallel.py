"""One model over several processes: each rank has a part of it, and computes the plans of rank 0.

Rank 0 is the process that creates the engine; it starts the others, and it alone has a scheduler. It sends each plan to
the others before it computes it, so that all compute the same plans in the same order, and during a step only hidden
states and logits are exchanged (`models/parallel.py`). All ranks sample, because the next step may need tokens that are
on the device only; what the host derives from tokens comes with the next plan.

A rank ends at once when its link to rank 0 closes. When a rank is lost, rank 0 ends the others, so that none waits for
it, and serves no more requests.
"""

import logging
import os
import pickle
import select
import shutil
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from chairlift.config import EngineConfig
from chairlift.engine.execution.resolver import MachineFacts, resolve_divided
from chairlift.engine.execution.runner import Launch
from chairlift.engine.executor import Executor, open_model
from chairlift.engine.forks import finalize
from chairlift.engine.parts import StartProcess
from chairlift.engine.plan_pickling import PlanReader, PlanWriter
from chairlift.engine.rank_bytes import RankReplies, SpreadBytes, jobs_of_rank
from chairlift.engine.rank_processes import Question, RankProcesses, Reply
from chairlift.engine.ranks import Computer, Ranks
from chairlift.errors import ConfigurationError, EngineDead
from chairlift.models import Checkpoint
from chairlift.models.parallel import CheckpointPart, Group, find_split_obstacle
from chairlift.plan import Job, SlotLoad, SlotRange, StepPlan

logger = logging.getLogger(__name__)

_NOTICE_S = 2.0  # between an error and the notice that a lost rank was its cause
_PROGRAM = "from chairlift.engine.parallel import follow; follow({fd})"


class _Divided(Ranks):
    """One of several ranks."""

    def __init__(self, rank: int, config: EngineConfig, folder: str) -> None:
        """`folder`: accessible to rank 0's user alone; the ranks find each other through it."""
        super().__init__(config)
        self._rank = rank
        self._store = FileStore(str(Path(folder) / "ranks"), config.tensor_parallel_size)

    def split(self, checkpoint: Checkpoint, machine: MachineFacts) -> tuple[CheckpointPart, MachineFacts]:
        """See `Ranks`. On a CPU, the ranks share memory and cores."""
        size, timeout = self.config.tensor_parallel_size, timedelta(seconds=self.config.step_timeout)
        free_bytes = self.least(machine.free_bytes if machine.is_gpu else machine.free_bytes // size)
        machine = replace(machine, free_bytes=free_bytes, num_threads=max(1, machine.num_threads // size))
        group = Group(self._rank, size, self._store, torch.device(machine.device), timeout)
        return CheckpointPart.of(checkpoint, group), machine


class _Link(Connection):
    """A rank's end of its link to rank 0. Several threads may send."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._lock = threading.Lock()

    def send(self, obj: object) -> None:
        """Sends one message. OSError if rank 0 is gone."""
        with self._lock:
            super().send(obj)


class Follower(_Divided):
    """A rank other than 0. Its process ends when a plan fails, or when rank 0 ends."""

    def __init__(self, link: _Link) -> None:
        super().__init__(*link.recv())
        self._link = link
        self._reader = PlanReader()

    def least(self, own: int) -> int:
        self._link.send(own)
        least: int = self._link.recv()
        return least

    def reply(self, reply: Reply) -> None:
        """Sends a reply to rank 0. From any thread."""
        self._link.send(reply)

    def receive(self) -> StepPlan | Sequence[Job] | Question | None:
        """Waits for the next plan, for copies and scrubs alone, or for a question. None: the end."""
        message: bytes | Sequence[Job] | Question | None = pickle.loads(self._link.recv_bytes())
        return self._reader.read(message) if isinstance(message, bytes) else message


def _place(rank: int, config: EngineConfig, folder: str) -> tuple[int, EngineConfig, str]:
    """Returns what `_Divided` is made of on another rank."""
    device = f"cuda:{rank}" if config.device != "cpu" else "cpu"
    return rank, config.model_copy(update={"device": device}), folder


class Leader(_Divided):
    """Rank 0. The others start when it is created, and end with it."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, start: StartProcess) -> None:
        """ConfigurationError if the model cannot be divided like this, or there are too few devices."""
        obstacle = find_split_obstacle(checkpoint, config.tensor_parallel_size)
        config = resolve_divided(config, obstacle, torch.cuda.device_count())
        folder = tempfile.mkdtemp(prefix="chairlift-")
        super().__init__(0, config, folder)
        self._removal = finalize(self, shutil.rmtree, folder, True)
        places = [_place(rank, config, folder) for rank in range(1, config.tensor_parallel_size)]
        self._others = RankProcesses(places, _PROGRAM, start)
        self._end = finalize(self, self._others.end)

    @property
    def pids(self) -> list[int]:
        """The processes of the other ranks."""
        return self._others.pids

    @property
    def failure(self) -> str | None:  # type: ignore[override]
        return self._others.failure

    def split(self, checkpoint: Checkpoint, machine: MachineFacts) -> tuple[CheckpointPart, MachineFacts]:
        part, machine = super().split(checkpoint, machine)
        self._others.when_lost = part.group.abort
        return part, machine

    def least(self, own: int) -> int:
        least = min(own, *self._others.answers())
        self._others.tell(least)
        return least

    def lead(self, own: Computer) -> Computer:
        return _Led(own, self._others)

    def give_up(self, error: BaseException) -> None:
        """See `Ranks`. Ends the others."""
        if isinstance(error, Exception) and self._others.is_over.wait(_NOTICE_S):
            raise EngineDead(self.failure) from error
        self._others.fail(f"a step ended with {type(error).__name__}, so that the ranks no longer agree")

    def close(self) -> None:
        """See `Ranks`. Ends the others."""
        self._end()
        self._removal()


class _Led:
    """Has all ranks compute: the others first, so that none waits longer than it must. See `Computer`."""

    def __init__(self, own: Computer, others: RankProcesses) -> None:
        self._own, self._others = own, others
        self._num_ranks = 1 + len(others.pids)
        self._writer = PlanWriter()

    def launch(self, plan: StepPlan) -> Launch:
        """EngineDead if a rank is lost."""
        if self._others.failure is not None:
            raise EngineDead(self._others.failure)
        if any(isinstance(job, SlotLoad) for job in plan.jobs):
            self.perform(plan.jobs)
            plan = replace(plan, jobs=())
        self._others.tell(self._writer.write(plan))
        return self._own.launch(plan)

    def perform(self, jobs: Sequence[Job]) -> None:
        own, *others = (jobs_of_rank(jobs, rank, self._num_ranks) for rank in range(self._num_ranks))
        self._others.tell_each(others)
        self._own.perform(own)

    def count_bytes(self, num_tokens: int, *, has_state: bool = False) -> int:
        """Counts those of all ranks, which have parts of equal size."""
        return self._num_ranks * self._own.count_bytes(num_tokens, has_state=has_state)

    def copy_out(self, tokens: SlotRange) -> SpreadBytes:
        """Has all ranks copy their parts."""
        others = self._others.ask(tokens)
        return SpreadBytes(self._own.copy_out(tokens), others)

    def record_missing(self) -> bool:
        """One of the ranks might lack memory for a graph, and the others would wait for it."""
        return False


def follow(fd: int) -> None:
    """The program of a rank other than 0; `fd` is its end of the link to rank 0. Ends the process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 handles these
        signal.signal(number, signal.SIG_IGN)
    logging.getLogger("chairlift").setLevel(logging.ERROR)  # rank 0 logs the rest as well
    threading.Thread(target=_end_with_link, args=(fd,), daemon=True).start()
    link, code = _Link(fd), 0
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
    executor = Executor(open_model(ranks.config), ranks)
    ranks.meet()  # the engine is ready
    launches: deque[Launch] = deque()
    replies = RankReplies(ranks.reply)
    while (message := ranks.receive()) is not None:
        if isinstance(message, Question):
            assert isinstance(message.content, SlotRange), "rank 0 asks for nothing else"
            replies.put(message.number, executor.runner.copy_out(message.content))
            continue
        if not isinstance(message, StepPlan):
            executor.runner.perform(message)
            continue
        launches.append(executor.runner.launch(message))
        if len(launches) > executor.pacing.num_launches_ahead:
            launches.popleft().arrival.wait()  # raises the device's error, if there is one


def _end_with_link(fd: int) -> None:
    """In a thread: ends this process when rank 0 is gone, even if its device waits for rank 0 for ever."""
    poll = select.poll()
    poll.register(fd, 0)  # a closed other end is reported in any case
    poll.poll()
    os._exit(1)
