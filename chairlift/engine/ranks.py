"""The ranks of a model, as the engine sees them: here there is one, and it agrees with itself.

With `tensor_parallel_size` above 1 there are several (`parallel`): the engine of rank 0 plans for all, and the others
compute its plans.
"""

from collections.abc import Sequence
from typing import Protocol

from chairlift.config import EngineConfig
from chairlift.disk.entry import Bytes
from chairlift.engine.execution.resolver import MachineFacts
from chairlift.engine.execution.runner import Launch
from chairlift.models import Checkpoint
from chairlift.plan import Job, SlotRange, StepPlan


class BytesToCome(Protocol):
    """Bytes on their way to the host."""

    def wait(self) -> Sequence[Bytes]:
        """Returns them once they are here. From any thread. OSError, or the device's RuntimeError, if they will not."""
        ...


class Computer(Protocol):
    """Computes plans in the order in which they come."""

    def launch(self, plan: StepPlan) -> Launch:
        """Starts a plan. See `ModelRunner`."""
        ...

    def perform(self, jobs: Sequence[Job]) -> None:
        """Performs copies and scrubs between two plans."""
        ...

    def count_bytes(self, num_tokens: int, *, has_state: bool = False) -> int:
        """Counts the bytes of so many tokens and, if asked for, of a recurrent state."""
        ...

    def copy_out(self, tokens: SlotRange) -> "BytesToCome":
        """Copies tokens of a slot to the host. Pending copies and scrubs must have been performed."""
        ...

    def record_missing(self) -> bool:
        """Records a graph that was missed. See `Recordings`."""
        ...


class Ranks:
    """A single rank."""

    failure: str | None = None
    """Says why the ranks no longer work, if that is known."""

    def __init__(self, config: EngineConfig) -> None:
        """`config`: with the device of this rank."""
        self.config = config

    def split(self, checkpoint: Checkpoint, machine: MachineFacts) -> tuple[Checkpoint, MachineFacts]:
        """Returns this rank's part of the model, and of the machine."""
        return checkpoint, machine

    def least(self, own: int) -> int:
        """Returns the least of all ranks' numbers, while the engine is created. EngineDead if a rank is lost."""
        return own

    def meet(self) -> None:
        """Waits until all ranks have arrived here; errors as in `least`."""
        self.least(0)

    def lead(self, own: Computer) -> Computer:
        """Returns what computes plans on all ranks; `own`: what computes on this one."""
        return own

    def give_up(self, error: BaseException) -> None:
        """Called when a step failed midway, so that the ranks may differ. EngineDead if a rank was lost."""

    def close(self) -> None:
        """Called when the engine is closed."""
