"""Products with float8 matrices: of few rows, of many, and of rows with the matrices of their experts.

Few rows are multiplied by our kernels. Many are rounded to float8, too, if a matrix has a scale for each row, or the
matrix is written out; cuBLAS with plain numbers stands beside both. The matrices of experts are multiplied by our
kernel, plain ones beside torch's.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

from chairlift.kernels import expert_rows
from chairlift.kernels.few_rows import MAX_ROWS, Tile, multiply
from chairlift.kernels.grouped import StoredMatrix
from chairlift.models.float8_products import round_rows
from chairlift.models.grouped import GroupedWeight, round_to_float8
from chairlift.models.products import Workspace
from on_gpu.kernel_bench import Bench, Work

_BLOCK = 128
_ONE_ROW = tuple(Tile(4, 2048, is_for_one_row=True, is_early=is_early) for is_early in (False, True))
_MORE_ROWS = tuple(Tile(32, 128, is_early=is_early) for is_early in (False, True))


def measure(bench: Bench, *, is_tiny: bool) -> None:
    """Matrices of 8 B that no cache holds, with a scale for each row and for each block, then those of 64 experts."""
    few, many = ((1, 3), (80,)) if is_tiny else ((1, 16, MAX_ROWS), (128, 512, 2048))
    shapes = {"tiny": (48, 256)} if is_tiny else {"8 B down": (4096, 14336), "8 B gate_up": (28672, 4096)}
    for name, (num_outputs, num_inputs) in shapes.items():
        weight = torch.randn(num_outputs, num_inputs, device=bench.device).mul_(num_inputs**-0.5)
        by_rows = round_to_float8(weight)
        by_blocks = GroupedWeight(8, by_rows.values, by_rows.scales.repeat(1, num_inputs // _BLOCK))
        for kind, matrix in (("rows", by_rows), ("blocks", by_blocks)):
            for num_rows in few:
                _measure_few(bench, f"{name}, scales of {kind}, {num_rows} rows", matrix, num_rows)
            for num_rows in many:
                _measure_many(bench, f"{name}, scales of {kind}, {num_rows} rows", matrix, num_rows)
    sizes = (3, 32, 64) if is_tiny else (64, 1024, 2048)
    for num_rows in (6,) if is_tiny else (8, 256, 8192):
        _measure_experts(bench, num_rows, *sizes)


def _is_on_gpu(bench: Bench) -> bool:
    return bench.device.type == "cuda"


def _kernel_dtype(bench: Bench) -> torch.dtype:
    """Triton's interpreter multiplies bits of bfloat16 as if they were integers."""
    return torch.bfloat16 if _is_on_gpu(bench) else torch.float16


def _always(work: Callable[[], torch.Tensor]) -> Work:
    return lambda _index: work()


def _measure_few(bench: Bench, case: str, matrix: GroupedWeight, num_rows: int) -> None:
    x = torch.randn(num_rows, matrix.num_inputs, device=bench.device).to(_kernel_dtype(bench))
    stored, wanted = StoredMatrix(8, matrix.values, matrix.scales), F.linear(x.float(), matrix.dequantize())
    for tile in _ONE_ROW if num_rows == 1 else _MORE_ROWS:
        if not tile.is_early or _is_on_gpu(bench):
            name = f"triton {tile.num_outputs} x {tile.num_inputs}{', early' if tile.is_early else ''}"
            bench.run(case, name, _always(partial(multiply, x, stored, tile)), wanted, matrix.num_bytes)


def _measure_many(bench: Bench, case: str, matrix: GroupedWeight, num_rows: int) -> None:
    x = torch.randn(num_rows, matrix.num_inputs, device=bench.device).bfloat16()
    exact = matrix.dequantize()
    plain, wanted = exact.bfloat16(), F.linear(x.float(), exact)
    bench.run(case, "cuBLAS", _always(partial(F.linear, x, plain)), wanted, plain.nbytes)
    if _is_on_gpu(bench):
        stored, workspace = StoredMatrix(8, matrix.values, matrix.scales), Workspace(plain.numel(), x.dtype, x.device)
        work = partial(workspace.multiply, x, stored, None)
        bench.run(case, "triton, written out", _always(work), wanted, matrix.num_bytes)
    if matrix.scales.shape[1] > 1:
        return
    rounded, scales = round_rows(x)
    bench.run(case, "rounding", lambda _index: round_rows(x)[1], scales, x.nbytes)
    of_rounded = F.linear(rounded.float() * scales, exact)
    for is_fast in (False, True) if _is_on_gpu(bench) else (False,):
        work = partial(
            torch._scaled_mm,
            rounded,
            matrix.values.t(),
            scale_a=scales,
            scale_b=matrix.scales.view(1, -1),
            out_dtype=x.dtype,
            use_fast_accum=is_fast,
        )
        name = "float8, fast sums" if is_fast else "float8"
        bench.run(case, name, _always(work), of_rounded, matrix.num_bytes)


def _measure_experts(bench: Bench, num_rows: int, num_experts: int, num_outputs: int, num_inputs: int) -> None:
    """Rows go to experts by chance."""
    case, dtype = f"{num_experts} experts, {num_rows} rows", _kernel_dtype(bench)
    weight = torch.randn(num_experts * num_outputs, num_inputs, device=bench.device).mul_(num_inputs**-0.5)
    x = torch.randn(num_rows, num_inputs, device=bench.device).to(dtype)
    counts = torch.bincount(torch.randint(num_experts, (num_rows,), device=bench.device), minlength=num_experts)
    ends = counts.cumsum(0).int()
    num_read = int((counts > 0).sum()) * num_outputs * num_inputs
    plain, rounded = weight.to(dtype), round_to_float8(weight)
    for name, stored, exact in (
        ("plain", StoredMatrix(16, plain), plain.float()),
        ("float8", StoredMatrix(8, rounded.values, rounded.scales), rounded.dequantize()),
    ):
        each = zip(torch.split(x.float(), counts.tolist()), exact.chunk(num_experts), strict=True)
        wanted = torch.cat([F.linear(rows, matrix) for rows, matrix in each])
        work = partial(expert_rows.multiply, x, stored, ends)
        bench.run(case, f"triton, {name}", _always(work), wanted, num_read * stored.values.itemsize)
        if name == "plain" and _is_on_gpu(bench):
            stacks = plain.view(num_experts, num_outputs, num_inputs).transpose(1, 2)
            work = partial(F.grouped_mm, x, stacks, offs=ends)
            bench.run(case, "torch's product of all", _always(work), wanted, num_read * plain.itemsize)
