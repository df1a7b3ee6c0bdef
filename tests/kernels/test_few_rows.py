"""Products of a few rows with matrices as they are stored, beside the same in float32 operators."""

import pytest
import torch
from torch.nn import functional as F

from chairlift.kernels.few_rows import Norm, Tile, multiply
from chairlift.kernels.grouped import StoredMatrix, dequantize
from chairlift.models.grouped import GroupedWeight
from tests.support.gpu import needs_gpu
from tests.support.triton_compiler import Compilation, assert_fits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter multiplies bfloat16's bits
LIMIT = 1e-2 if HALF is torch.bfloat16 else 4e-3  # of relative errors
CORES, ALONE = Tile(16, 128), Tile(8, 128, is_for_one_row=True)
STORED = {
    "plain": (16, 0),
    "8 bits": (8, 32),
    "8 bits, offsets": (8, -64),
    "4 bits": (4, 128),
    "4 bits, offsets": (4, -32),
    "float8": (8, 64),
    "float8, whole rows": (8, 0),
    "bytes of float8": (8, 128),
    "bytes of float8, whole rows": (8, 0),
}
SHAPE = 24, 320  # neither is a multiple of a tile


def stored(kind: str, num_outputs: int, num_inputs: int) -> tuple[StoredMatrix, torch.Tensor]:
    """A matrix, and its numbers in float32. Bits, and size of groups: below zero, with offsets; zero: of rows."""
    num_bits, size = STORED[kind]
    if num_bits == 16:
        plain = (torch.randn(num_outputs, num_inputs) / num_inputs**0.5).to(HALF)
        return StoredMatrix(16, plain.to(DEVICE)), plain.float()
    if "float8" in kind:
        return stored_float8(num_outputs, num_inputs, size, as_bytes=kind.startswith("bytes"))
    width, limits, dtype = (1, (-127, 128), torch.int8) if num_bits == 8 else (2, (0, 256), torch.uint8)
    values = torch.randint(*limits, (num_outputs, num_inputs // width), dtype=dtype)
    groups = num_outputs, num_inputs // abs(size)
    scales = torch.rand(groups).to(HALF) / 128
    offsets = -8 * scales * torch.rand(groups).to(HALF) if size < 0 else None
    exact = GroupedWeight(num_bits, values, scales, offsets).dequantize()
    parts = None if offsets is None else offsets.to(DEVICE)
    return StoredMatrix(num_bits, values.to(DEVICE), scales.to(DEVICE), parts), exact


def stored_float8(num_outputs: int, num_inputs: int, size: int, *, as_bytes: bool) -> tuple[StoredMatrix, torch.Tensor]:
    values = torch.randint(0, 256, (num_outputs, num_inputs), dtype=torch.uint8)  # all numbers, but for NaN
    values[(values & 127) == 127] = 1
    numbers = values.view(torch.float8_e4m3fn)
    scales = torch.rand(num_outputs, num_inputs // size if size else 1) / 128
    exact = GroupedWeight(8, numbers, scales).dequantize()
    return StoredMatrix(8, (values if as_bytes else numbers).to(DEVICE), scales.to(DEVICE)), exact


def rms_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    factors = norm.factors.float().cpu() + norm.is_offset
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * factors


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float().cpu() - wanted).norm() / wanted.norm())


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(HALF).to(DEVICE)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize(("num_rows", "tile"), [(1, ALONE), (5, CORES)])
def test_a_product_is_that_with_the_stored_numbers(kind: str, num_rows: int, tile: Tile) -> None:
    num_inputs = SHAPE[1] if SHAPE[1] % max(1, STORED[kind][1]) == 0 else 384
    matrix, exact = stored(kind, SHAPE[0], num_inputs)
    x = random(num_rows, num_inputs)
    assert error(multiply(x, matrix, tile), F.linear(x.float().cpu(), exact)) < LIMIT


@pytest.mark.parametrize("kind", ["plain", "8 bits", "4 bits, offsets", "float8, whole rows"])
@pytest.mark.parametrize(("num_rows", "tile"), [(1, ALONE), (3, CORES)])
def test_norm_bias_and_residual_are_folded_in(kind: str, num_rows: int, tile: Tile) -> None:
    matrix, exact = stored(kind, *SHAPE)
    x, bias, addend = random(num_rows, SHAPE[1]), random(SHAPE[0]), random(num_rows, SHAPE[0])
    norm = Norm(random(SHAPE[1]), 1e-5, is_offset=num_rows == 1)
    product = F.linear(rms_norm(x.float().cpu(), norm), exact, bias.float().cpu())
    got = multiply(x, matrix, tile, norm=norm, bias=bias, addend=addend)
    assert error(got, product + addend.float().cpu()) < LIMIT
    assert error(multiply(x, matrix, tile, norm=norm, bias=bias), product) < LIMIT


@pytest.mark.parametrize("num_rows", [17, 33])
def test_up_to_64_rows_are_one_tile(num_rows: int) -> None:
    matrix, exact = stored("4 bits, offsets", *SHAPE)
    x = random(num_rows, SHAPE[1])
    assert error(multiply(x, matrix, CORES), F.linear(x.float().cpu(), exact)) < LIMIT


def test_rows_need_not_be_neighbours() -> None:
    matrix, exact = stored("plain", *SHAPE)
    x = random(3, 2 * SHAPE[1])[:, : SHAPE[1]]
    assert error(multiply(x, matrix, CORES), F.linear(x.float().cpu(), exact)) < LIMIT


@pytest.mark.parametrize("kind", [each for each in STORED if each != "plain"])
def test_groups_become_the_numbers_that_they_stand_for(kind: str) -> None:
    matrix, exact = stored(kind, 40, 384)
    output = torch.empty(40, 384, device=DEVICE)
    dequantize(matrix, output)
    assert error(output, exact) < 1e-6
    part = torch.empty(8, 384, device=DEVICE)
    dequantize(matrix.rows(slice(3, 11)), part)
    assert torch.equal(part, output[3:11])


@needs_gpu
@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize(("num_rows", "tile"), [(1, Tile(4, 1024, is_for_one_row=True)), (1, CORES), (16, CORES)])
@pytest.mark.parametrize("is_early", [False, True])
def test_products_of_a_real_model_are_right(kind: str, num_rows: int, tile: Tile, is_early: bool) -> None:
    matrix, exact = stored(kind, 4096, 4096)
    x, norm, addend = random(num_rows, 4096), Norm(random(4096), 1e-5), random(num_rows, 4096)
    early = Tile(tile.num_outputs, tile.num_inputs, 4, 4, tile.is_for_one_row, is_early)
    got = multiply(x, matrix, early, norm=norm, addend=addend)
    assert error(got, F.linear(rms_norm(x.float().cpu(), norm), exact) + addend.float().cpu()) < 1e-2


# Compiled for an H100

_POINTERS = ("x", "factors", "values", "scales", "offsets", "bias", "addend", "output")
_FLAGS = ("HAS_OFFSETS", "NORM", "IS_OFFSET", "HAS_BIAS", "ADDS", "IS_EARLY")


def compilation(
    name: str, num_bits: int, tile: Tile, num_rows: int, *flags: str, values: str = "", group: int = 128
) -> Compilation:
    types = (
        dict.fromkeys(_POINTERS, "*bf16")
        | dict.fromkeys(("N_ALL", "K", "num_rows", "x_stride"), "i32")
        | {"eps": "fp32"}
    )
    types |= {"values": values or {16: "*bf16", 8: "*i8", 4: "*u8"}[num_bits]}
    if num_bits < 16:
        types |= {"scales": "*fp32", "offsets": "*fp32"}
    constants = {
        "BITS": num_bits,
        "GROUP": 32 if num_bits == 16 else group,
        "N": tile.num_outputs,
        "KB": tile.num_inputs,
    }
    constants |= {flag: flag in flags for flag in _FLAGS}
    aligned: tuple[str, ...] = (*_POINTERS, "N_ALL", "K")
    if not tile.is_for_one_row:
        constants["M"] = num_rows
        aligned = (*aligned, "x_stride")
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if tile.is_early:
        options["launch_pdl"] = True
    kernel = "_one_row" if tile.is_for_one_row else "_few_rows"
    return Compilation(
        name,
        "chairlift.kernels.few_rows",
        kernel,
        types,
        constants,
        aligned,
        options,
        max_registers=200 if num_rows == 64 else 128,
        stack_bytes=8 if name == "plain, normed" else 0,  # a pointer
    )


def writing(name: str, num_bits: int, values: str, group: int) -> Compilation:
    types = {"values": values, "scales": "*fp32", "offsets": "*fp32", "output": "*bf16", "N_ALL": "i32", "K": "i32"}
    constants = {"BITS": num_bits, "GROUP": group, "HAS_OFFSETS": num_bits == 4, "N": 16, "KB": 256}
    return Compilation(name, "chairlift.kernels.grouped", "_dequantize", types, constants, tuple(types))


COMPILATIONS = (
    compilation("plain", 16, Tile(16, 256), 16, "ADDS"),
    compilation("plain, normed", 16, Tile(32, 256), 16, "NORM"),
    compilation("plain, early", 16, Tile(32, 128, is_early=True), 16, "NORM", "IS_EARLY"),
    compilation("plain, one row", 16, Tile(2, 2048, is_for_one_row=True), 1, "NORM"),
    compilation("8 bits", 8, Tile(32, 128), 16, "NORM"),
    compilation("4 bits", 4, Tile(16, 128), 16, "NORM", "HAS_OFFSETS"),
    compilation("4 bits, 64 rows", 4, Tile(32, 128), 64, "NORM", "HAS_OFFSETS"),
    compilation("8 bits, one row", 8, Tile(4, 1024, is_for_one_row=True), 1, "NORM"),
    compilation("4 bits, one row", 4, Tile(4, 2048, is_for_one_row=True), 1, "NORM", "HAS_OFFSETS"),
    compilation("float8", 8, Tile(32, 128), 16, "NORM", values="*fp8e4nv"),
    compilation("float8, one row", 8, Tile(4, 1024, is_for_one_row=True), 1, "NORM", values="*fp8e4nv", group=0),
    compilation("bytes of float8", 8, Tile(32, 128), 16, "NORM", values="*u8", group=0),
    compilation("bytes of float8, one row", 8, Tile(4, 2048, is_for_one_row=True), 1, "NORM", values="*u8"),
    compilation("float8, groups of 32, 64 rows", 8, Tile(32, 128), 64, "NORM", "ADDS", values="*fp8e4nv", group=32),
    compilation("float8, early", 8, Tile(32, 128, is_early=True), 64, "ADDS", "IS_EARLY", values="*fp8e4nv", group=0),
    compilation("4 bits, early", 4, Tile(4, 2048, is_for_one_row=True, is_early=True), 1, "ADDS", "IS_EARLY"),
    writing("4 bits, written out", 4, "*u8", 32),
    writing("float8, written out", 8, "*fp8e4nv", 0),
    writing("bytes of float8, written out", 8, "*u8", 128),
)


@pytest.mark.parametrize("case", COMPILATIONS, ids=lambda case: case.name)
def test_a_kernel_compiles_for_a_gpu_without_spills(case: Compilation) -> None:
    assert_fits(case, __name__)
