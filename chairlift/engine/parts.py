"""The parts of an engine that its configuration does not name. The defaults are those of this machine.

Tests and benchmarks give their own: `LLM.of(EngineCore(config, parts))` is an engine that is made of them, and so is
`AsyncLLM.of(LocalEngine(EngineCore(config, parts)))`. The ranks of a divided model are all made of the defaults, but
for the first.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from chairlift.config import ResolvedConfig
from chairlift.engine.execution.recorder import CudaRecorder, GraphRecorder
from chairlift.engine.execution.resolver import MachineFacts
from chairlift.engine.execution.runner import ModelRunner
from chairlift.engine.interpreter import start_interpreter
from chairlift.engine.sampling.sampler import Sampler
from chairlift.models import Checkpoint, load_forward
from chairlift.models.attention import Forward
from chairlift.scheduler.fair_queue import FairQueue
from chairlift.scheduler.request_queue import RequestQueue


@dataclass(frozen=True, slots=True)
class Pacing:
    """Says how far the host runs ahead of the device."""

    num_launches_ahead: int = 0  # begun before the tokens of an earlier one are taken
    recorder: GraphRecorder | None = None  # of graphs of steps; None: they are launched operator by operator
    records_common: bool = True  # the common sizes are recorded at start; False: only the largest

    @classmethod
    def of(cls, device: torch.device) -> "Pacing":
        """Returns the device's default. A CPU computes during the launch, so the host cannot run ahead of it."""
        return cls() if device.type == "cpu" else cls(1, CudaRecorder(device))


class Process(Protocol):
    """A started process; see `subprocess.Popen`. Any thread may wait for it."""

    pid: int

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int:
        """Returns its exit code, which is negative after a signal. `subprocess.TimeoutExpired` if it has not ended."""
        ...


StartProcess = Callable[[str, int], Process]
"""Starts a process that runs a program in Python and inherits a file descriptor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Holds what an engine is made of."""

    machine: MachineFacts | None = None
    """None: the device that the configuration names is inspected."""

    pacing: Pacing | None = None
    """None: the device's default."""

    load_forward: Callable[[Checkpoint, ResolvedConfig], Forward] = load_forward
    """Loads what runs the model, and with it the attention backend."""

    make_sampler: Callable[[int, int, torch.device], Sampler] = Sampler
    make_runner: Callable[..., ModelRunner] = ModelRunner

    new_queue: Callable[[], RequestQueue] = FairQueue
    """Makes the queue of requests, which decides who is next."""

    clock: Callable[[], float] = time.perf_counter
    """Seconds, by which requests expire."""

    idle_after: float = 30.0
    """Seconds without work, after which unused memory is freed."""

    start_rank: StartProcess = start_interpreter
    """Starts a rank other than the first."""


DEFAULT_PARTS = Parts()
