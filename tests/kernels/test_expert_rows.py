"""Products of rows with the matrices of their experts, beside the same expert by expert."""

import pytest
import torch

from chairlift.kernels.expert_rows import multiply
from chairlift.kernels.grouped import StoredMatrix
from chairlift.models.grouped import quantize, round_to_float8
from tests.support.gpu import needs_gpu
from tests.support.triton_compiler import Compilation, assert_fits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COUNTS = {
    "even": [5, 5, 5, 5],
    "few of many": [0, 0, 1, 0, 0, 0, 2, 0, 1],
    "one has all": [0, 37, 0],
    "whole tiles": [16, 0, 32],
    "large tiles": [70, 3, 64],
    "none": [0, 0],
}


def both(counts: list[int], num_inputs: int, num_outputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's result, and that of products in float64."""
    generator = torch.Generator().manual_seed(len(counts))
    x = torch.randn(sum(counts), num_inputs, generator=generator).to(dtype)
    weights = (torch.randn(len(counts), num_outputs, num_inputs, generator=generator) / num_inputs**0.5).to(dtype)
    ends = torch.tensor(counts).cumsum(0).int()
    matrices = StoredMatrix(16, weights.flatten(0, 1).to(DEVICE))
    got = multiply(x.to(DEVICE), matrices, ends.to(DEVICE)).cpu()
    parts = zip(torch.split(x.double(), counts), weights.double(), strict=True)
    return got.double(), torch.cat([rows @ matrix.T for rows, matrix in parts])


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_each_row_is_multiplied_by_its_expert(counts: list[int], dtype: torch.dtype) -> None:
    got, wanted = both(counts, 72, 24, dtype)  # neither is a multiple of a tile
    assert got.shape == (sum(counts), 24)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5 if dtype is torch.float32 else 4e-3)


@pytest.mark.parametrize("kind", ["4 bits, offsets", "8 bits", "float8, whole rows"])
@pytest.mark.parametrize("counts", [COUNTS["few of many"], COUNTS["large tiles"]], ids=["few", "many"])
def test_matrices_may_be_in_groups(kind: str, counts: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(len(counts) * 24, 160, generator=generator) / 12
    quantized = round_to_float8(plain) if "float8" in kind else quantize(plain, int(kind[0]))
    offsets = None if quantized.offsets is None else quantized.offsets.to(DEVICE)
    values, scales = quantized.values.to(DEVICE), quantized.scales.to(DEVICE)
    stored = StoredMatrix(quantized.num_bits, values, scales, offsets)
    x = torch.randn(sum(counts), 160, generator=generator).half()
    got = multiply(x.to(DEVICE), stored, torch.tensor(counts, device=DEVICE).cumsum(0).int()).cpu()
    matrices = quantized.dequantize(torch.float64).chunk(len(counts))
    wanted = torch.cat([rows @ each.T for rows, each in zip(torch.split(x.double(), counts), matrices, strict=True)])
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=6e-3)


@needs_gpu
@pytest.mark.parametrize("num_rows", [1, 24, 4096])
def test_so_is_each_of_a_real_model(num_rows: int) -> None:
    counts = torch.bincount(torch.randint(128, (8 * num_rows,)), minlength=128).tolist()
    got, wanted = both(counts, 2048, 768, torch.bfloat16)
    torch.testing.assert_close(got, wanted, rtol=0, atol=3e-2)


@needs_gpu
def test_a_recorded_product_serves_other_choices_of_experts() -> None:
    x, weights = torch.randn(24, 64, device=DEVICE), torch.randn(4, 32, 64, device=DEVICE)
    matrices = StoredMatrix(16, weights.flatten(0, 1))
    ends = torch.tensor([6, 12, 18, 24], dtype=torch.int32, device=DEVICE)
    multiply(x, matrices, ends)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = multiply(x, matrices, ends)
    ends.copy_(torch.tensor([0, 23, 23, 24]))
    graph.replay()
    torch.testing.assert_close(output[:23], x[:23] @ weights[1].T, rtol=0, atol=1e-3)
    torch.testing.assert_close(output[23:], x[23:] @ weights[3].T, rtol=0, atol=1e-3)


def compilation(
    name: str, kind: str, num_rows: int, num_inputs: int, num_bits: int = 16, values: str = "", group: int = 32
) -> Compilation:
    pointers = ("x", "values", "scales", "offsets", "output")
    types = dict.fromkeys(pointers, f"*{kind}") | {"ends": "*i32", "N_ALL": "i32", "K": "i32"}
    if num_bits < 16:
        types |= {"values": values, "scales": "*fp32", "offsets": "*fp32"}
    constants = {"EXPERTS": 128, "PADDED": 128, "M": num_rows, "N": 64 if num_bits == 16 else 32, "KB": num_inputs}
    constants |= {"BITS": num_bits, "GROUP": group, "HAS_OFFSETS": num_bits == 4}
    aligned = (*pointers, "ends", "N_ALL", "K")
    module = "chairlift.kernels.expert_rows"
    options, most = {"num_warps": 4, "num_stages": 3}, 176 if kind == "fp32" else 128
    return Compilation(name, module, "_multiply", types, constants, aligned, options, max_registers=most)


COMPILATIONS = (
    compilation("few rows", "bf16", 16, 64),
    compilation("many rows", "fp16", 64, 64),
    compilation("float32", "fp32", 64, 32),
    compilation("4 bits", "bf16", 16, 128, 4, "*u8"),
    compilation("8 bits", "bf16", 64, 128, 8, "*i8", 128),
    compilation("float8", "bf16", 64, 128, 8, "*fp8e4nv", 0),
    compilation("float8, groups", "bf16", 16, 128, 8, "*fp8e4nv", 32),
)


@pytest.mark.parametrize("case", COMPILATIONS, ids=lambda case: case.name)
def test_a_kernel_compiles_for_a_gpu_without_spills(case: Compilation) -> None:
    assert_fits(case, __name__)
