"""No compiler warns of the kernels, what clang makes of them is right, and sanitizers find nothing."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from chairlift.models.cpu import build, decoder
from chairlift.models.cpu.build import InstructionSet, instruction_sets
from chairlift.models.cpu.processor import usable_instruction_sets
from tests.models.cpu import support
from tests.models.cpu.standalone import ARM_COMPILER, compile_sanitized, kernels_of, level_of, need, warnings_of
from tests.models.cpu.test_experts import SPARSE
from tests.support.forward_bench import Bench, Row, in_pieces

pytestmark = pytest.mark.slow

X86, ARM = instruction_sets("x86_64"), instruction_sets("aarch64")
GCC = ("g++", "g++-11", "g++-12", "g++-13", "g++-14")
CLANG_FOR_ARM = "clang++ --target=aarch64-linux-gnu"
CLANG_FOR_MACOS = "clang++ --target=arm64-apple-macos12 -nostdinc++ -U__nonnull"
# Every format, odd sizes, heads of 32 to 512 and of 80, windows and soft caps, depths that are cut into parts.
CASES = (
    ("like Granite, Phi and SmolLM", support.BFLOAT16),
    ("layers that differ", support.BFLOAT16_INT8),
    ("like Gemma 4", support.BFLOAT16_INT8),
    ("five heads to one", support.BFLOAT16_INT4),
    ("heads as wide as any", support.FLOAT32_INT8),
    ("one head to one", support.FLOAT32),
    ("deep products", support.BFLOAT16),
    ("latent vectors", support.BFLOAT16_INT4),
)
MIXTURES = (support.BFLOAT16, support.FLOAT32_INT8, support.BFLOAT16_INT4)
NUM_THREADS = 2
STEPS = (
    [Row(1, [3, 5, 7]), Row(2, list(range(140)))],
    [Row(1, [9]), Row(2, [11])],
    [Row(1, [4])],  # alone: the threads share its keys
    [Row(slot, list(range(195))) for slot in (3, 4)],  # so many rows that each thread has its own
    [Row(slot, [slot]) for slot in range(9)],
)
# Those of gcc are for `make compilers`: the g++ that is installed also makes wheels and programs for Arm, in tests that
# fail if it warns.
WAYS = [
    *(pytest.param(compiler, each, marks=pytest.mark.compilers) for compiler in GCC for each in X86),
    *(pytest.param(ARM_COMPILER, each, marks=pytest.mark.compilers) for each in ARM),
    *(("clang++", each) for each in X86),
    *((compiler, each) for compiler in (CLANG_FOR_ARM, CLANG_FOR_MACOS) for each in ARM),
]


def computed(isa: str | None = None) -> list[torch.Tensor]:
    """The logits of rows of one token, of a few and of many, of rows with a common prefix, and of layers in pieces."""
    benches = [support.cpu_bench(support.SHAPES[name], number_format, isa) for name, number_format in CASES]
    benches += [support.cpu_bench(SPARSE, number_format, isa) for number_format in MIXTURES]
    with support.threads(NUM_THREADS):
        logits = [torch.cat(bench.run(rows)) for bench in benches for rows in STEPS]
        for bench in benches:
            bench.cache.copy_prefix(2, 7, 135)
            bench.cache.settle()
            logits += bench.run([Row(2, [8]), Row(7, [3])])
        config, number_format = support.SHAPES["like Gemma 4"], support.BFLOAT16_INT4
        pieces = in_pieces(support.cpu_forward(config, number_format, isa), (1, 2, 1))
        logits += Bench(config, number_format.dtype, pieces).run(STEPS[0])
        for number_format in (support.FLOAT32, support.BFLOAT16_INT8):
            logits += computed_with_states(support.cpu_bench(support.RECURRENT, number_format, isa))
    return logits


def computed_with_states(bench: Bench) -> list[torch.Tensor]:
    """The logits of rows whose states move, of guesses that are taken back in part, and of what follows these."""
    logits = [torch.cat(bench.run(rows)) for rows in STEPS]
    guessing = [Row(slot, [5, 6, 7, 8]) for slot in (1, 2)]
    logits += bench.guess(guessing, num_guessed=3, num_wrong=2)
    return logits + bench.run([Row(1, [9]), Row(2, [4, 4, 4])])


def is_default(compiler: str) -> bool:
    """True if that is what g++ is."""
    default, own = shutil.which("g++"), shutil.which(compiler)
    return default is not None and own is not None and os.path.samefile(default, own)


def arm_headers() -> list[str]:
    """Directories of the headers that the compiler for Arm takes, but for its own intrinsics."""
    command = [ARM_COMPILER, "-xc++", "-E", "-v", "/dev/null"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    found = [Path(line.strip()).resolve() for line in lines if line.startswith(" /") and Path(line.strip()).is_dir()]
    return [str(path) for path in found if "gcc-cross" not in path.parts]


@pytest.mark.parametrize(("compiler", "instruction_set"), WAYS, ids=lambda each: getattr(each, "name", each))
def test_no_compiler_warns(tmp_path: Path, compiler: str, instruction_set: InstructionSet) -> None:
    """Compiles, and not with `-fsyntax-only`: what optimisation finds out it warns of as well.

    But for macOS, with the headers of Linux, as there are no others: clang reads them, and has no code for their types.
    """
    command = compiler.split()
    need(command[0])
    if compiler.startswith("g++-") and is_default(compiler):
        pytest.skip(f"{compiler} is g++")
    if "clang++ " in compiler:
        need(ARM_COMPILER)  # whose headers it takes
    way = ["-O1", "-c", "-o", str(tmp_path / "object")]
    if compiler == CLANG_FOR_MACOS:
        way = ["-fsyntax-only"]
        command += [f"-isystem{path}" for path in arm_headers()]
    flags = (*build.TOOLCHAIN.flags, *instruction_set.flags, *warnings_of(compiler), *way)
    command += [*flags, str(build.TOOLCHAIN.sources / "decoder.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stderr, done.returncode) == ("", 0)


def test_what_clang_compiles_gives_the_bits_of_gcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("clang++")
    build.compile_library(["clang++"], level_of("avx2"), tmp_path / "library.so")
    expected = computed("avx2")
    library = ctypes.CDLL(str(tmp_path / "library.so"))
    monkeypatch.setattr(decoder, "load_library", lambda _isa: library)
    assert all(map(torch.equal, computed(), expected))


# With AVX2, test_hostile_weights.py has the program of the first. Of AVX-512's levels it has the one with the most
# instructions: each program takes the better part of a minute to compile and to run.
WIDEST = next((each for each in ("avx512_bf16", "avx512_vnni") if each in usable_instruction_sets()), "avx512")
SANITIZERS = (("address,undefined", WIDEST), ("thread", "avx2"))


@pytest.mark.parametrize(("sanitizers", "isa"), SANITIZERS)
def test_sanitizers_and_checks_find_nothing(tmp_path: Path, sanitizers: str, isa: str) -> None:
    """In a program with threads of its own: a sanitizer does not see what OpenMP's wait for."""
    need("g++")
    compile_sanitized(sanitizers, isa, tmp_path / "program")
    expected = computed(isa)
    with kernels_of(str(tmp_path / "program")):
        assert all(map(torch.equal, computed(), expected))
