"""Products of rows with the matrices of their experts, all in one launch.

Rows lie in the order of their experts, and a tile of them belongs to one expert. How many tiles there may be follows
from the numbers of rows and experts alone, so a graph can record the launch; which rows are whose is read on the
device, and tiles that are not needed do nothing.
"""

# mypy: disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl

_FEW_ROWS, _MANY_ROWS = 16, 64  # of a tile
_OUTPUTS = 64
_INPUT_BYTES = 128  # of a tile's row


def multiply(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """`[N, in]`, `[experts, out, in]` -> `[N, out]`, of one floating dtype. All are dense.

    `ends`: int32 `[experts]`, where each expert's rows end.
    """
    num_rows, (num_experts, num_outputs, num_inputs) = len(x), weights.shape
    output = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if not num_rows:
        return output
    size = _MANY_ROWS if num_rows > _FEW_ROWS * num_experts else _FEW_ROWS
    most = min(num_rows, num_experts + num_rows // size)  # every expert may have a tile that is not full
    _multiply[(triton.cdiv(num_outputs, _OUTPUTS), most)](
        x,
        weights,
        ends,
        output,
        num_outputs,
        num_inputs,
        num_experts,
        triton.next_power_of_2(num_experts),
        size,
        _OUTPUTS,
        _INPUT_BYTES // x.dtype.itemsize,
        num_warps=4,
        num_stages=3,
    )
    return output


@triton.jit
def _multiply(
    x: tl.tensor, weights: tl.tensor, ends: tl.tensor, output: tl.tensor, N_ALL: tl.tensor, K: tl.tensor,
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
        is_row, is_output = rows[:, None] < stop, outputs[:, None] < N_ALL
        own = weights + expert * N_ALL * K + outputs[:, None].to(tl.int64) * K
        sums = tl.zeros([M, N], tl.float32)
        for start in range(0, K, KB):
            at = start + tl.arange(0, KB)[None, :]
            inputs = tl.load(x + rows[:, None] * K + at, mask=is_row & (at < K), other=0.0)
            matrix = tl.load(own + at, mask=is_output & (at < K), other=0.0)
            sums += tl.dot(inputs, tl.trans(matrix), input_precision="ieee").to(tl.float32)
        places = rows[:, None] * N_ALL + outputs[None, :]
        tl.store(output + places, sums.to(output.dtype.element_ty), mask=is_row & (outputs[None, :] < N_ALL))
