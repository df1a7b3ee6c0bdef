"""No compiler warns of the kernels, what clang makes of them is right, and sanitizers find nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from chairlift.models.cpu.build import usable_instruction_sets
from chairlift.models.cpu.compiler import _COMPILE_FLAGS, _SOURCES, InstructionSet, instruction_sets
from tests.models.cpu.standalone import ARM_COMPILER, compile_program, kernels_of, need
from tests.models.cpu.support import BFLOAT16, BFLOAT16_INT4, BFLOAT16_INT8, SHAPES, cpu_bench, threads
from tests.support.forward_bench import Row

pytestmark = pytest.mark.slow

X86, ARM = instruction_sets("x86_64"), instruction_sets("aarch64")
COMPILERS = ("g++", "g++-11", "g++-12", "g++-13", "g++-14", "clang++")
WARNINGS = ("-Wall", "-Wextra", "-Werror")
CLANG_FOR_ARM = "clang++ --target=aarch64-linux-gnu"
CLANG_FOR_MACOS = "clang++ --target=arm64-apple-macos12 -nostdinc++ -U__nonnull"
SHAPE = SHAPES["like OLMo 2"]
STEPS = ([Row(1, [3, 5, 7]), Row(2, list(range(140)))], [Row(1, [9]), Row(2, [11])], [Row(1, [4])])
WAYS = [
    *((compiler, each) for compiler in COMPILERS for each in X86),
    *((compiler, each) for compiler in (ARM_COMPILER, CLANG_FOR_ARM, CLANG_FOR_MACOS) for each in ARM),
]

# Rows of one token, of a few and of many, in bfloat16 and in integers, on two threads.
COMPUTING = """
import torch
from tests.models.cpu.support import BFLOAT16, BFLOAT16_INT4, BFLOAT16_INT8, SHAPES
from tests.models.cpu.support import cpu_bench, in_float32, make_model, quantized, torch_bench
from tests.support.forward_bench import Row

torch.set_num_threads(2)
shape = SHAPES["three heads to one"]
steps = ([Row(1, [3, 5, 7]), Row(2, list(range(140)))], [Row(1, [9]), Row(2, [11])], [Row(1, [4]), Row(3, [1] * 40)])
for number_format in (BFLOAT16, BFLOAT16_INT8, BFLOAT16_INT4):
    model = in_float32(make_model(shape, torch.bfloat16))
    if number_format.quantization:
        model = quantized(model, number_format.quantization)
    ours, exact = cpu_bench(shape, number_format), torch_bench(model)
    for rows in steps:
        expected = torch.cat(exact.run(rows))
        error = (torch.cat(ours.run(rows)) - expected).norm() / expected.norm()
        assert error < 0.04, (number_format, error)
print("computed")
"""


def compute(tmp_path: Path, isa: str, **environment: str) -> None:
    """In a process of its own, with a library of its own."""
    if isa not in usable_instruction_sets():
        pytest.skip(f"this processor does not have {isa}")
    own = {"CHAIRLIFT_CACHE_DIR": str(tmp_path / "cache"), "CHAIRLIFT_CPU_LEVEL": isa}
    done = subprocess.run(
        [sys.executable, "-c", COMPUTING],
        env={**os.environ, **own, **environment},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("computed\n", 0), done.stderr[-3000:]


def arm_headers() -> list[str]:
    """Directories of the headers that the compiler for Arm takes, but for its own intrinsics."""
    command = [ARM_COMPILER, "-xc++", "-E", "-v", "/dev/null"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    found = [Path(line.strip()).resolve() for line in lines if line.startswith(" /") and Path(line.strip()).is_dir()]
    return [str(path) for path in found if "gcc-cross" not in path.parts]


@pytest.mark.parametrize(("compiler", "instruction_set"), WAYS, ids=lambda each: getattr(each, "name", each))
def test_no_compiler_warns(compiler: str, instruction_set: InstructionSet) -> None:
    """For macOS with the headers of Linux, as there are no others: it shows that the sources fit the compiler."""
    command = compiler.split()
    need(command[0])
    if "clang++ " in compiler:
        need(ARM_COMPILER)  # whose headers it takes
    if compiler == CLANG_FOR_MACOS:
        command += [f"-isystem{path}" for path in arm_headers()]
    flags = (*_COMPILE_FLAGS, *instruction_set.flags, *WARNINGS, "-fsyntax-only")
    done = subprocess.run(
        [*command, *flags, str(_SOURCES / "decoder.cpp")], capture_output=True, text=True, check=False
    )
    assert (done.stderr, done.returncode) == ("", 0)


def test_what_clang_compiles_computes_the_same(tmp_path: Path) -> None:
    need("clang++")
    compute(tmp_path, "avx2", CXX="clang++")


@pytest.mark.parametrize(
    ("isa", "sanitizer"),
    [("avx2", "address"), ("avx512", "undefined"), ("avx2", "thread")],
)
def test_sanitizers_find_nothing(tmp_path: Path, isa: str, sanitizer: str) -> None:
    """In a program with threads of its own: a sanitizer does not see what OpenMP's wait for."""
    need("g++")
    if isa not in usable_instruction_sets():
        pytest.skip(f"this processor does not have {isa}")
    (level,) = (each for each in X86 if each.name == isa)
    flags = (*level.flags, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-O1")
    compile_program("g++", flags, tmp_path / "program")
    for number_format in (BFLOAT16, BFLOAT16_INT8, BFLOAT16_INT4):
        expected = cpu_bench(SHAPE, number_format, isa)
        with kernels_of(str(tmp_path / "program")), threads(3):
            found = cpu_bench(SHAPE, number_format)
            for rows in STEPS:
                assert torch.equal(torch.cat(found.run(rows)), torch.cat(expected.run(rows)))
