"""A checked build of the kernels stops where its own code is wrong, and Python refuses kernels of another version."""

import ctypes
import signal
import subprocess
from pathlib import Path
from typing import Any

from chairlift.models.cpu import structures
from chairlift.models.cpu.build import TOOLCHAIN
from tests.models.cpu.standalone import need

STAGES = """
#include "rows.h"
#include "team.h"
int main(int argc, char**) {
    static Counter counters[2];
    Barrier barrier;
    Team team{0, 1, counters, barrier, counters + 2};
    int64_t sum = 0;
    for (int stage = 0; stage <= argc; stage++) team.share(3, [&](int64_t unit) { sum += unit; });
    return int(sum);
}
"""


def exit_code(tmp_path: Path, *flags: str, num_stages: int) -> int:
    """The program's, whose team has counters for two stages: the sum 3 of each stage's units."""
    source, program = tmp_path / "stages.cpp", tmp_path / "program"
    source.write_text(STAGES)
    way = ["-DCHAIRLIFT_OWN_THREADS", "-pthread", f"-I{TOOLCHAIN.sources}", *flags]
    command = ["g++", *TOOLCHAIN.flags, *way, str(source)]
    subprocess.run([*command, "-o", str(program)], check=True)
    return subprocess.run([str(program), *["more"] * (num_stages - 2)], check=False).returncode


def test_a_stage_beyond_the_counters_stops_a_checked_build(tmp_path: Path) -> None:
    need("g++")
    assert exit_code(tmp_path, "-DCHAIRLIFT_CHECKED", num_stages=2) == 6
    assert exit_code(tmp_path, "-DCHAIRLIFT_CHECKED", num_stages=3) in (-signal.SIGILL, -signal.SIGTRAP)


class Library(ctypes.CDLL):
    """One whose structures have these sizes."""

    def __init__(self, sizes: list[int], code: int) -> None:
        self._sizes, self._code = sizes, code

    def chairlift_start(self, told: Any) -> int:
        told[:] = self._sizes
        return self._code


SIZES = [ctypes.sizeof(each) for each in structures.STRUCTURES]


def test_kernels_with_other_structures_are_refused() -> None:
    assert structures.start(Library(SIZES, 0)) is None
    others = [*SIZES[:-1], 8]
    problem = structures.start(Library(others, 0))
    assert problem is not None
    assert problem.startswith(f"its structures have {others} bytes, and those of this version {SIZES}")
    assert structures.start(Library(SIZES, 1)) == "the system does not let this process use these instructions"
