"""Products of rows with the matrices of their experts as they are stored, all in one launch.

Rows lie in the order of their experts, and a tile of them belongs to one expert. How many tiles there may be follows
from the numbers of rows and experts alone, so a graph can record the launch; which rows are whose is read on the
device, and tiles that are not needed do nothing.
"""

# mypy: disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl

from chairlift.kernels.grouped import StoredMatrix, read_tile, row_scales

_FEW_ROWS, _MANY_ROWS = 16, 64  # of a tile
_OUTPUTS = {16: 64, 8: 32, 4: 32}  # of a tile, by bits
_INPUT_BYTES = 128  # of a tile's row of plain numbers
_INPUTS = 128  # of a tile in groups


def multiply(x: torch.Tensor, matrices: StoredMatrix, ends: torch.Tensor) -> torch.Tensor:
    """`[N, in]`, `[experts * out, in]` -> `[N, out]`, in the dtype of `x`, which is dense and that of plain numbers.

    `ends`: int32 `[experts]`, where each expert's rows end.
    """
    num_rows, num_experts, num_inputs = len(x), len(ends), matrices.num_inputs
    num_outputs = matrices.num_outputs // num_experts
    output = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if not num_rows:
        return output
    size = _MANY_ROWS if num_rows > _FEW_ROWS * num_experts else _FEW_ROWS
    most = min(num_rows, num_experts + num_rows // size)  # every expert may have a tile that is not full
    scales = matrices.values if matrices.scales is None else matrices.scales
    width = _OUTPUTS[matrices.num_bits]
    _multiply[(triton.cdiv(num_outputs, width), most)](
        x,
        matrices.values,
        scales,
        scales if matrices.offsets is None else matrices.offsets,
        ends,
        output,
        num_outputs,
        num_inputs,
        matrices.num_bits,
        matrices.group_constant,
        matrices.offsets is not None,
        num_experts,
        triton.next_power_of_2(num_experts),
        size,
        width,
        _INPUT_BYTES // x.dtype.itemsize if matrices.scales is None else _INPUTS,
        num_warps=4,
        num_stages=3,
    )
    return output


@triton.jit
def _multiply(
    x: tl.tensor, values: tl.tensor, scales: tl.tensor, offsets: tl.tensor, ends: tl.tensor, output: tl.tensor,
    N_ALL: tl.tensor, K: tl.tensor, BITS: tl.constexpr, GROUP: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, KB: tl.constexpr,
) -> None:  # fmt: skip
    tile, each = tl.program_id(1), tl.arange(0, PADDED)
    stops = tl.load(ends + each, mask=each < EXPERTS, other=0)
    starts = tl.load(ends + each - 1, mask=(each > 0) & (each < EXPERTS), other=0)
    num_tiles = tl.where(each < EXPERTS, (stops - starts + M - 1) // M, 0)
    before = tl.cumsum(num_tiles, 0) - num_tiles
    is_own = (before <= tile) & (tile < before + num_tiles)  # of one expert, if of any
    if tl.sum(is_own.to(tl.int32), 0) > 0:
        expert = tl.sum(tl.where(is_own, each, 0), 0).to(tl.int64)
        first = tl.sum(tl.where(is_own, starts + (tile - before) * M, 0), 0)
        stop = tl.sum(tl.where(is_own, stops, 0), 0)
        rows, outputs = first.to(tl.int64) + tl.arange(0, M), tl.program_id(0) * N + tl.arange(0, N)
        is_row, is_output = rows[:, None] < stop, outputs < N_ALL
        own = expert * N_ALL + outputs  # of the outputs of all experts
        sums = tl.zeros([M, N], tl.float32)
        for start in range(0, K, KB):
            at = start + tl.arange(0, KB)[None, :]
            inputs = tl.load(x + rows[:, None] * K + at, mask=is_row & (at < K), other=0.0)
            matrix = read_tile(
                values, scales, offsets, own, is_output, start, K, BITS, GROUP, HAS_OFFSETS, N, KB, x.dtype.element_ty
            )
            sums += tl.dot(inputs, tl.trans(matrix), input_precision="ieee").to(tl.float32)
        if GROUP == 0:
            sums *= row_scales(scales, own, is_output)[None, :]
        places = rows[:, None] * N_ALL + outputs[None, :]
        tl.store(output + places, sums.to(output.dtype.element_ty), mask=is_row & is_output[None, :])
