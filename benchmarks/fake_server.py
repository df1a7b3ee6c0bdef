"""`chairlift serve` with a device that only sleeps: the real server, scheduler and host half of the runner, no model.

    python benchmarks/fake_server.py STEP_MS [flags of `chairlift serve`]

A launch takes STEP_MS for each of its steps, whatever is in it, beside the host as on a GPU: one launch is ahead. Every
row writes the letter Z until its length is reached. For each line on standard input a line of JSON goes to standard
output: what had been done by then (`Counters`).
"""

import json
import os
import sys
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from chairlift.cache import ContinuousBatchingKVCacheCollection
from chairlift.config import ResolvedConfig
from chairlift.engine import core
from chairlift.engine.execution import runner
from chairlift.models import Checkpoint
from chairlift.models.attention import BatchMetadata

LETTER = "Z"


@dataclass(frozen=True, slots=True)
class Counters:
    """Since the process began, in seconds; CPU time is that of one thread each, the process's that of all."""

    time: float
    busy: float  # of the device
    loop_cpu: float
    engine_cpu: float
    process_cpu: float
    workers_cpu: float  # of API workers


class Device:
    """Does its work in order, one launch after the other."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.busy_s = 0.0
        self.end = 0.0  # of all that was launched

    def launch_step(self) -> None:
        self.end = max(self.end, time.perf_counter()) + self._step_s
        self.busy_s += self._step_s

    def read_busy(self) -> float:
        """Without what is still to come."""
        return self.busy_s - max(0.0, self.end - time.perf_counter())


class _Arrival:
    """See `transfers.Arrival`; there is one device."""

    device: Device

    def __init__(self) -> None:
        self._time = self.device.end

    @classmethod
    def mark(cls, _: torch.device) -> "_Arrival":
        return cls()

    def wait(self) -> None:
        time.sleep(max(0.0, self._time - time.perf_counter()))


class _Forward:
    """See `forward.Forward`: hidden states of one element, and logits that are the same at every place."""

    def __init__(self, device: Device, vocab_size: int) -> None:
        self._device = device
        self._logits = torch.zeros(vocab_size)
        self._logits[ord(LETTER)] = 1.0  # the bundled tokenizer's tokens are bytes

    def hidden(
        self, batch: BatchMetadata, input_ids: torch.Tensor, cache: ContinuousBatchingKVCacheCollection
    ) -> torch.Tensor:
        del batch, cache
        self._device.launch_step()
        return torch.zeros(len(input_ids), 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits.repeat(len(hidden), 1)


def install(device: Device) -> None:
    """Every engine that this process makes from here on runs on the device."""

    def load(checkpoint: Checkpoint, _: ResolvedConfig) -> _Forward:
        return _Forward(device, checkpoint.config.vocab_size)

    _Arrival.device = device
    pacing = core.Pacing(num_launches_ahead=1)
    for owner, name, replacement in (
        (core, "load_forward", load),
        (core.Pacing, "of", lambda _: pacing),
        (runner, "Arrival", _Arrival),
    ):
        setattr(owner, name, replacement)


def _answer_questions(device: Device) -> None:
    """In a thread that sleeps until it is asked."""
    for _ in sys.stdin:
        print(json.dumps(asdict(_read(device))), flush=True)


def _read(device: Device) -> Counters:
    engine = next((each for each in threading.enumerate() if each.name == "chairlift-engine"), None)
    return Counters(
        time=time.perf_counter(),
        busy=device.read_busy(),
        loop_cpu=_cpu_of(threading.main_thread()),
        engine_cpu=0.0 if engine is None else _cpu_of(engine),
        process_cpu=time.process_time(),
        workers_cpu=sum(map(_cpu_of_process, _children_of(_children_of([os.getpid()])))),
    )


def _children_of(parents: Collection[int]) -> list[int]:
    """Processes that these have started, on Linux."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            pid = int(path.parent.name)
            if int(_stat_of(pid)[1]) in parents:
                found.append(pid)
    return found


def _stat_of(pid: int) -> list[str]:
    """The fields behind the program's name: state, parent, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _cpu_of_process(pid: int) -> float:
    user, system = _stat_of(pid)[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _cpu_of(thread: threading.Thread) -> float:
    assert thread.ident is not None, "it runs"
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def main() -> int:
    """Serves until a signal, as `chairlift serve` does."""
    from chairlift.__main__ import main as run

    device = Device(float(sys.argv[1]) / 1e3)
    install(device)
    threading.Thread(target=_answer_questions, args=[device], daemon=True).start()
    return run(["serve", *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
