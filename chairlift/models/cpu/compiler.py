"""How `csrc/` is compiled: by instruction set, with g++ or what $CXX names.

It imports nothing but the standard library, since building a wheel takes it as well, where torch is not installed.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

COMPILER_VARIABLE = "CXX"

_SOURCES = Path(__file__).parent / "csrc"
_COMPILE_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fno-exceptions", "-Wno-psabi"),
    *("-fno-math-errno", "-ffp-contract=off"),
)
# Linked to the C library alone: a process should have one OpenMP runtime, which `build` loads first, and the compiler's
# own libraries may be newer than those of the machine where the kernels run.
_LINK_FLAGS = ("-shared", "-nodefaultlibs")
_COMPILE_TIMEOUT = 300.0


class CpuKernelsUnavailable(Exception):
    """The kernels do not work on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """A way to compile: the processor features it takes, as `build` finds them, and the compiler's flags.

    `slow_on`: the vendor whose processors compute faster with the sets that follow, as /proc/cpuinfo names it.
    """

    name: str
    features: tuple[str, ...]
    flags: tuple[str, ...]
    slow_on: str | None = None


PLAIN = "plain"  # any processor
_AVX2 = ("avx2", "fma3", "f16c")
_AVX512 = ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq")
_VNNI = (*_AVX512, "avx512_vnni")
_BF16 = (*_VNNI, "avx512_bf16")
_AMX = (*_BF16, "amx_tile", "amx_bf16")
_AVX512_FLAGS = ("-march=x86-64-v4",)
_VNNI_FLAGS = (*_AVX512_FLAGS, "-mavx512vnni")
_BF16_FLAGS = (*_VNNI_FLAGS, "-mavx512bf16")
_PLAIN_SET = InstructionSet(PLAIN, (), ())

_BY_MACHINE = {  # the best first
    "x86_64": (
        InstructionSet("amx", _AMX, (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16")),
        # Intel's take a vdpbf16ps every second cycle, and two products in float32 in each.
        InstructionSet("avx512_bf16", _BF16, _BF16_FLAGS, slow_on="GenuineIntel"),
        InstructionSet("avx512_vnni", _VNNI, _VNNI_FLAGS),
        InstructionSet("avx512", _AVX512, _AVX512_FLAGS),
        InstructionSet("avx2_vnni", (*_AVX2, "avx_vnni"), ("-march=x86-64-v3", "-mavxvnni")),
        InstructionSet("avx2", _AVX2, ("-march=x86-64-v3",)),
        _PLAIN_SET,
    ),
    "aarch64": (
        InstructionSet("neon_bf16", ("asimd", "asimddp", "i8mm", "bf16"), ("-march=armv8.2-a+dotprod+i8mm+bf16",)),
        InstructionSet("neon_dotprod", ("asimd", "asimddp"), ("-march=armv8.2-a+dotprod",)),
        # Atomics that are chosen at run time are in the compiler's own library.
        InstructionSet("neon", ("asimd",), ("-march=armv8-a", "-mno-outline-atomics")),
    ),
}


def instruction_sets(machine: str) -> tuple[InstructionSet, ...]:
    """Those of a kind of machine, as `platform.machine` names it; the best first."""
    return _BY_MACHINE.get(machine, (_PLAIN_SET,))


def file_name(instruction_set: InstructionSet) -> str:
    """Of the library. It tells all that the library depends on but the compiler, so other sources have another name."""
    flags = (instruction_set, _COMPILE_FLAGS, _LINK_FLAGS, platform.machine())
    digest = hashlib.sha256(repr(flags).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return f"kernels-{instruction_set.name}-{digest.hexdigest()[:16]}.so"


def find_compiler() -> list[str]:
    """The command, as a list. CpuKernelsUnavailable if it is not there."""
    try:
        command = shlex.split(os.environ.get(COMPILER_VARIABLE, "g++"))
    except ValueError as error:
        raise CpuKernelsUnavailable(f"${COMPILER_VARIABLE} is not a command: {error}") from error
    if not command or shutil.which(command[0]) is None:
        raise CpuKernelsUnavailable(
            f"there is no C++ compiler {' '.join(command)!r}; install g++, or name one in ${COMPILER_VARIABLE}"
        )
    return command


def compile_library(compiler: list[str], instruction_set: InstructionSet, path: Path) -> None:
    """Writes the library. CpuKernelsUnavailable if that fails. `compiler`: see `find_compiler`."""
    try:
        with tempfile.TemporaryDirectory() as scratch:
            objects = str(Path(scratch) / "decoder.o")
            source = str(_SOURCES / "decoder.cpp")
            _run([*compiler, *_COMPILE_FLAGS, *instruction_set.flags, "-c", source, "-o", objects])
            _run([*compiler, *_LINK_FLAGS, objects, "-lc", "-o", str(path)])
    except OSError as error:
        raise CpuKernelsUnavailable(f"compiling CPU kernels failed: {error}") from error


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise CpuKernelsUnavailable(f"compiling CPU kernels took more than {_COMPILE_TIMEOUT:.0f} s") from error
    if done.returncode:
        complaint = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()
        raise CpuKernelsUnavailable(f"compiling CPU kernels failed: {' / '.join(complaint[:3])}")
