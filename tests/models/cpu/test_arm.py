"""Tests that code compiled for Arm gives torch's numbers and AVX2's bits, in an emulator. How fast it is nobody has
measured.

There the kernels are a program of their own (see `standalone.py`), as Python and torch are not there.
"""

import functools
import platform
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from chairlift.models.cpu.build import instruction_sets
from chairlift.models.cpu.processor import Processor, arm_features, find_drawback, usable_instruction_sets
from hatch_build import KernelsHook
from tests.models.cpu import support, test_products
from tests.models.cpu.standalone import ARM_COMPILER, compile_program, kernels_of, need, warnings_of
from tests.models.cpu.support import BFLOAT16, BFLOAT16_INT8, FLOAT32, FLOAT32_INT8, Format, cpu_bench, threads
from tests.support.forward_bench import Bench, Row

pytestmark = pytest.mark.slow

EMULATOR = "qemu-aarch64-static"
PROCESSORS = {"neon_bf16": "max", "neon_dotprod": "cortex-a76", "neon": "cortex-a53"}  # the oldest that have it
SHAPE = support.SHAPES["like Gemma"]
STEPS = (
    [Row(1, [3, 5, 7]), Row(2, list(range(140)))],
    [Row(1, [9]), Row(2, [11])],
    [Row(1, [4]), Row(3, [1] * 40)],
)  # rows of one token, of a few and of many
TOLERANCES = {FLOAT32: 1e-5}  # where nothing is rounded on the way


@pytest.fixture(scope="module", params=instruction_sets("aarch64"), ids=lambda each: each.name)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of the kernels on a processor that has that instruction set and no better one."""
    need(ARM_COMPILER)
    need(EMULATOR)
    path = tmp_path_factory.mktemp("arm") / "program"
    compile_program(ARM_COMPILER, [*request.param.flags, *warnings_of(ARM_COMPILER), "-static", "-O1"], path)
    return [EMULATOR, "-cpu", PROCESSORS[request.param.name], str(path)]


@pytest.fixture
def avx2() -> str:
    if "avx2" not in usable_instruction_sets():
        pytest.skip("this processor does not have avx2")
    return "avx2"


def logits_of(bench: Bench) -> torch.Tensor:
    return torch.cat([logits for rows in STEPS for logits in bench.run(rows)])


@functools.cache
def exact_logits(number_format: Format) -> torch.Tensor:
    """The same weights in torch, computed with in float32."""
    model = support.in_float32(support.make_model(SHAPE, number_format.dtype))
    return logits_of(support.torch_bench(support.quantized(model, number_format.widths)))


def test_a_pass_gives_torchs_numbers_and_avx2s_bits(program: list[str], number_format: Format, avx2: str) -> None:
    with kernels_of(*program), threads(2):
        ours = cpu_bench(SHAPE, number_format)
        logits = logits_of(ours)
    exact = exact_logits(number_format)
    assert float((logits - exact).norm() / exact.norm()) < TOLERANCES.get(number_format, 0.03)
    if number_format == FLOAT32_INT8:
        support.assert_equal_but_for_rounded_factors(logits, exact)
    if "max" in program and number_format.dtype is torch.bfloat16:
        return  # bfdot rounds in its own way
    reference = cpu_bench(SHAPE, number_format, avx2)
    assert torch.equal(logits, logits_of(reference))
    assert torch.equal(ours.blocks, reference.blocks)


@pytest.mark.parametrize("number_format", [BFLOAT16, BFLOAT16_INT8], ids=str)
def test_chunks_company_and_threads_make_no_difference(program: list[str], number_format: Format) -> None:
    sequence = [7 * i % 250 for i in range(150)]
    with kernels_of(*program):
        whole, parts = (cpu_bench(SHAPE, number_format) for _ in range(2))
        with threads(1):
            (expected,) = whole.run([Row(4, sequence)])
        with threads(3):
            first, _ = parts.run([Row(1, sequence[:127]), Row(2, [5] * 30)])
            second, _ = parts.run([Row(1, sequence[127:149]), Row(2, [6] * 3)])
            _, last = parts.run([Row(2, [9]), Row(1, sequence[149:])])
    assert torch.equal(torch.cat((first, second, last)), expected)
    assert torch.equal(parts.blocks[1, :, :, :150], whole.blocks[4, :, :, :150])


@pytest.mark.parametrize("name", test_products.FORMATS)
def test_products_of_integers_are_exact_and_give_avx2s_bits(program: list[str], name: str, avx2: str) -> None:
    weight = test_products.random_weight(name, 192)
    rows = test_products.random_rows(13, 192, torch.float32)
    reference = test_products.decoder(weight, torch.float32, avx2).logits(rows)
    exact = rows @ weight.dequantize().T
    with kernels_of(*program):
        forward = test_products.decoder(weight, torch.float32)
        assert torch.equal(forward.logits(rows), reference)
        assert torch.equal(forward.logits(rows[:1]), reference[:1])
    assert float((reference - exact).norm() / exact.norm()) < 0.01


def test_a_processor_is_given_what_it_has(program: list[str]) -> None:
    done = subprocess.run([*program, "hwcap"], capture_output=True, text=True, check=True)
    first, second = map(int, done.stdout.split())
    found = Processor("Linux", "aarch64", arm_features(first | second << 64))
    (number,) = (number for number, processor in enumerate(PROCESSORS.values()) if processor in program)
    assert usable_instruction_sets(found) == list(PROCESSORS)[number:]
    assert find_drawback(found) is None


def test_a_wheel_for_arm_needs_libc_and_openmp_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need(ARM_COMPILER)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setenv("CXX", " ".join((ARM_COMPILER, *warnings_of(ARM_COMPILER))))
    monkeypatch.setenv("CHAIRLIFT_WHEEL_KERNELS", "neon")
    build_data: dict[str, object] = {"force_include": {}}
    root = Path(__file__).parents[3]
    KernelsHook(str(root), {}, None, cast(Any, None), str(tmp_path), "wheel").initialize("standard", build_data)
    assert build_data["tag"] == "py3-none-manylinux_2_17_aarch64"
    assert not build_data["pure_python"]
    (library,) = tmp_path.glob("libraries/kernels-neon-*.so")
    assert build_data["force_include"] == {str(library): f"chairlift/models/cpu/libraries/{library.name}"}
    assert library.read_bytes()[18:20] == b"\xb7\x00"  # AArch64, in the header of the format
    command = [ARM_COMPILER.replace("g++", "nm"), "--dynamic", "--undefined-only", str(library)]
    undefined = subprocess.run(command, capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in undefined.stdout.splitlines() if line.split()[-2] == "U"}
    openmp = {"GOMP_parallel", "omp_get_num_threads", "omp_get_thread_num"}
    assert names == {*openmp, "memcpy@GLIBC_2.17", "memset@GLIBC_2.17", "syscall@GLIBC_2.17"}
