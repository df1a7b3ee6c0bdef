"""Runs a kernel once beside a reference, then times it: microseconds on the device, and bytes a second."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from machine import format_table

from chairlift.kernels.timing import measure

_NUM_CALLS = 8  # in one graph, on other data each time, so that no cache has it
_NUM_REPLAYS = 15
_MAX_ERROR = 1e-2  # of numbers in bfloat16

Work = Callable[[int], torch.Tensor]
"""Launches the kernel on the i-th of its inputs. The first call's result is compared."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Holds what came of one kernel. `num_bytes`: that it must move at least; `failure`: why there is no figure."""

    case: str
    kernel: str
    error: float | None = None  # norm of the difference over that of the reference
    microseconds: float | None = None
    num_bytes: int = 0
    failure: str = ""

    @property
    def bytes_per_second(self) -> float | None:
        return None if not self.microseconds else 1e6 * self.num_bytes / self.microseconds


@dataclass(frozen=True, slots=True)
class Bench:
    """Collects findings. `is_timed`: without times, kernels are only compiled and compared."""

    device: torch.device
    is_timed: bool = True
    findings: list[Finding] = field(default_factory=list)

    def run(
        self, case: str, kernel: str, work: Work, wanted: torch.Tensor, num_bytes: int = 0, rows: slice = slice(None)
    ) -> None:
        """Adds a finding. `wanted`: those rows of the result. Whatever the kernel raises becomes its failure, so that
        the others still run."""
        try:
            error = _error(work(0)[rows], wanted)
            if not error < _MAX_ERROR:  # NaN is not
                finding = Finding(case, kernel, error, failure="wrong")
            else:
                microseconds = self._microseconds(work) if self.is_timed else None
                finding = Finding(case, kernel, error, microseconds, num_bytes)
        except Exception as failure:  # of Triton's compiler, a library's checks, or CUDA
            (line, *_) = [*str(failure).splitlines(), ""]
            finding = Finding(case, kernel, failure=f"{type(failure).__name__}: {line}"[:120])
        self.findings.append(finding)

    def _microseconds(self, work: Work) -> float:
        """Measures one call: the median of replays of a graph of some. On a CPU, what the interpreter takes."""
        if self.device.type != "cuda":
            start = perf_counter()
            work(0)
            return 1e6 * (perf_counter() - start)
        return measure(lambda: [work(index) for index in range(_NUM_CALLS)], _NUM_REPLAYS) / _NUM_CALLS


def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def table(findings: Sequence[Finding]) -> str:
    """A line for each."""
    return format_table([["", "", "error", "us", "TB/s"], *map(_row, findings)])


def _row(finding: Finding) -> list[str]:
    error = "" if finding.error is None else f"{finding.error:.1e}"
    rate = finding.bytes_per_second
    times = "" if finding.microseconds is None else f"{finding.microseconds:.1f}"
    return [finding.case, finding.kernel, error, times, f"{rate / 1e12:.2f}" if rate else "", finding.failure]
