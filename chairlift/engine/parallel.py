"""One model over several processes: each rank has a part of it, and computes the plans of rank 0.

Rank 0 is the process that creates the engine; it starts the others (`follower`), and it alone has a scheduler. It sends
each plan to the others before it computes it, so that all compute the same plans in the same order, and during a step
only hidden states and logits are exchanged (`models/parallel.py`). All ranks sample, because the next step may need
tokens that are on the device only; what the host derives from tokens comes with the next plan.

When a rank is lost, rank 0 ends the others, so that none waits for it, and serves no more requests.
"""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from chairlift.config import EngineConfig
from chairlift.engine.execution.resolver import MachineFacts, resolve_divided
from chairlift.engine.execution.runner import Launch
from chairlift.engine.forks import finalize
from chairlift.engine.parts import StartProcess
from chairlift.engine.plan_pickling import PlanWriter
from chairlift.engine.rank_bytes import SpreadBytes, jobs_of_rank
from chairlift.engine.rank_processes import RankProcesses
from chairlift.engine.ranks import Computer, Ranks
from chairlift.errors import EngineDead
from chairlift.models import Checkpoint
from chairlift.models.parallel import CheckpointPart, Group, find_split_obstacle
from chairlift.plan import Job, SlotLoad, SlotRange, StepPlan

_NOTICE_S = 2.0  # between an error and the notice that a lost rank was its cause
_PROGRAM = "from chairlift.engine.follower import follow; follow({fd})"


class Divided(Ranks):
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


def _place(rank: int, config: EngineConfig, folder: str) -> tuple[int, EngineConfig, str]:
    """Returns what `Divided` is made of on another rank."""
    device = f"cuda:{rank}" if config.device != "cpu" else "cpu"
    return rank, config.model_copy(update={"device": device}), folder


class Leader(Divided):
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
