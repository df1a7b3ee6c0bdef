"""Products of a few rows with a matrix as it is stored: their time is that of reading it.

What stands beside a product in a layer is folded in: the RMS norm of the input, the bias and the residual. (Not SwiGLU:
a program with two matrices took longer than two kernels more.) A program computes some outputs over all inputs. With
the norm, the inputs are multiplied by its factors on the way, and the sums by 1 / rms of the row in the end, whose
squares have been added up meanwhile.
"""

# mypy: disable-error-code="untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from chairlift.kernels.grouped import StoredMatrix, eight_bits, read_tile, row_scales

MAX_ROWS = 64
_LEAST_ROWS = 16  # of a tensor core's tile; the rest of it are zeros


@dataclass(frozen=True, slots=True)
class Tile:
    """Chooses a kernel, and how it divides the matrix: outputs and inputs are powers of two, inputs 128 or more.

    `is_for_one_row`: in float32 numbers, without tensor cores. `is_early`: launched before the kernel before it has
    ended (programmatic dependent launch, on Hopper and later).
    """

    num_outputs: int
    num_inputs: int
    num_warps: int = 4
    num_stages: int = 4
    is_for_one_row: bool = False
    is_early: bool = False


@dataclass(frozen=True, slots=True)
class Norm:
    """The RMS norm of the input: factors `[in]`, or 1 + these if `is_offset`."""

    factors: torch.Tensor
    eps: float
    is_offset: bool = False


def multiply(
    x: torch.Tensor,
    matrix: StoredMatrix,
    tile: Tile,
    *,
    norm: Norm | None = None,
    bias: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
) -> torch.Tensor:
    """`norm(x) W^T + bias + addend`, all in one kernel.

    `x` is `[T, in]` with dense rows, T up to `MAX_ROWS`; the result `[T, out]`, in the dtype of `x`.
    `bias` is `[out]`, `addend` like the result and dense.
    """
    num_rows = len(x)
    assert num_rows <= (1 if tile.is_for_one_row else MAX_ROWS), "a tile holds all rows"
    num_outputs = matrix.num_outputs
    output = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    options = {"launch_pdl": True} if tile.is_early else {}
    scales = matrix.values if matrix.scales is None else matrix.scales
    arguments = (
        x,
        x if norm is None else norm.factors,
        matrix.values,
        scales,
        scales if matrix.offsets is None else matrix.offsets,
        x if bias is None else bias,
        x if addend is None else addend,
        output,
        num_outputs,
        matrix.num_inputs,
        0.0 if norm is None else norm.eps,
    )
    constants = {
        "BITS": matrix.num_bits,
        "GROUP": matrix.group_constant,
        "HAS_OFFSETS": matrix.offsets is not None,
        "NORM": norm is not None,
        "IS_OFFSET": norm is not None and norm.is_offset,
        "HAS_BIAS": bias is not None,
        "ADDS": addend is not None,
        "N": tile.num_outputs,
        "KB": tile.num_inputs,
        "IS_EARLY": tile.is_early,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **options,
    }
    grid = (triton.cdiv(num_outputs, tile.num_outputs),)
    if tile.is_for_one_row:
        _one_row[grid](*arguments, **constants)
    else:
        padded = max(_LEAST_ROWS, triton.next_power_of_2(num_rows))
        _few_rows[grid](*arguments, num_rows, x.stride(0), M=padded, **constants)
    return output


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows(
    x: tl.tensor, factors: tl.tensor, values: tl.tensor, scales: tl.tensor, offsets: tl.tensor, bias: tl.tensor,
    addend: tl.tensor, output: tl.tensor, N_ALL: tl.tensor, K: tl.tensor, eps: tl.tensor, num_rows: tl.tensor,
    x_stride: tl.tensor, BITS: tl.constexpr, GROUP: tl.constexpr, HAS_OFFSETS: tl.constexpr, NORM: tl.constexpr,
    IS_OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, KB: tl.constexpr, IS_EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """On tensor cores: M rows, of which the last are zeros."""
    rows, outputs = tl.arange(0, M), tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    is_row, is_output = rows[:, None] < num_rows, outputs < N_ALL
    sums = tl.zeros([M, N], tl.float32)
    squares = tl.zeros([M], tl.float32)
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for first in range(0, K, KB):
        at = first + tl.arange(0, KB)
        tile = tl.load(x + rows[:, None] * x_stride + at[None, :], mask=is_row & (at[None, :] < K), other=0.0)
        if NORM:
            wide = tile.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            tile = (wide * _gain(factors + at, at < K, IS_OFFSET)[None, :]).to(x.dtype.element_ty)
        weight = read_tile(
            values, scales, offsets, outputs, is_output, first, K, BITS, GROUP, HAS_OFFSETS, N, KB, x.dtype.element_ty
        )
        sums += tl.dot(tile, tl.trans(weight), input_precision="ieee").to(tl.float32)
    if GROUP == 0:
        sums *= row_scales(scales, outputs, is_output)[None, :]
    if NORM:
        sums *= tl.rsqrt(squares / K + eps)[:, None]
    sums = _add_bias(sums, bias + outputs[None, :], is_output[None, :], HAS_BIAS)
    places, is_in = rows[:, None] * N_ALL + outputs[None, :], is_row & is_output[None, :]
    if ADDS:
        sums += tl.load(addend + places, mask=is_in, other=0.0).to(tl.float32)
    tl.store(output + places, sums.to(output.dtype.element_ty), mask=is_in)


@triton.jit
def _one_row(
    x: tl.tensor, factors: tl.tensor, values: tl.tensor, scales: tl.tensor, offsets: tl.tensor, bias: tl.tensor,
    addend: tl.tensor, output: tl.tensor, N_ALL: tl.tensor, K: tl.tensor, eps: tl.tensor, BITS: tl.constexpr,
    GROUP: tl.constexpr, HAS_OFFSETS: tl.constexpr, NORM: tl.constexpr, IS_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, N: tl.constexpr, KB: tl.constexpr, IS_EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """In float32: partial sums stay with the threads that read the matrix, and come together in the end."""
    outputs = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    is_output = outputs < N_ALL
    IS_ALONE: tl.constexpr = BITS == 16 or GROUP == 0  # every product stands by itself
    WIDTH: tl.constexpr = KB if IS_ALONE else KB // GROUP
    STEP: tl.constexpr = 2 if BITS == 4 else 1  # inputs of a byte
    sums = tl.zeros([N, WIDTH], tl.float32)
    squares = tl.zeros([KB // STEP], tl.float32)
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for first in range(0, K, KB):
        at = first + STEP * tl.arange(0, KB // STEP)
        even = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
        odd = even
        if BITS == 4:
            odd = tl.load(x + at + 1, mask=at < K, other=0.0).to(tl.float32)
        if NORM:
            squares += even * even
            even *= _gain(factors + at, at < K, IS_OFFSET)
            if BITS == 4:
                squares += odd * odd
                odd *= _gain(factors + at + 1, at < K, IS_OFFSET)
        sums += _partial_sums(
            even, odd, values, scales, offsets, outputs, is_output, first, K, BITS, GROUP, HAS_OFFSETS, N, KB
        )
    result = tl.sum(sums, 1)
    if GROUP == 0:
        result *= row_scales(scales, outputs, is_output)
    if NORM:
        result *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
    result = _add_bias(result, bias + outputs, is_output, HAS_BIAS)
    if ADDS:
        result += tl.load(addend + outputs, mask=is_output, other=0.0).to(tl.float32)
    tl.store(output + outputs, result.to(output.dtype.element_ty), mask=is_output)


@triton.jit
def _gain(places: tl.tensor, is_in: tl.tensor, IS_OFFSET: tl.constexpr) -> tl.tensor:
    gain = tl.load(places, mask=is_in, other=0.0).to(tl.float32)
    if IS_OFFSET:
        gain += 1.0
    return gain


@triton.jit
def _add_bias(
    sums: tl.tensor, places: tl.tensor, is_in: tl.tensor, HAS_BIAS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    if HAS_BIAS:
        sums += tl.load(places, mask=is_in, other=0.0).to(tl.float32)
    return sums


@triton.jit
def _partial_sums(
    even: tl.tensor, odd: tl.tensor, values: tl.tensor, scales: tl.tensor, offsets: tl.tensor, outputs: tl.tensor,
    is_output: tl.tensor, first: tl.tensor, K: tl.tensor, BITS: tl.constexpr, GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, N: tl.constexpr, KB: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """float32 `[N, KB]` products, or in groups `[N, KB / GROUP]` sums of the products of each; GROUP of 0: products.

    `even` are the inputs that go with the values; with 4 bits, those of the low halves, and `odd` of the high ones. A
    byte is low + 16 high, so low * even + high * odd = low * (even - odd / 16) + byte * odd / 16: no shift.
    """
    if BITS == 16:
        at = first + tl.arange(0, KB)
        mask = is_output[:, None] & (at[None, :] < K)
        weight = tl.load(values + outputs[:, None] * K + at[None, :], mask=mask, other=0.0)
        return weight.to(tl.float32) * even[None, :]
    else:  # noqa: RET505
        WIDTH: tl.constexpr = KB * BITS // 8  # bytes of a tile's output
        at = first * BITS // 8 + tl.arange(0, WIDTH)
        mask = is_output[:, None] & (at[None, :] < K * BITS // 8)
        packed = tl.load(values + outputs[:, None] * (K * BITS // 8) + at[None, :], mask=mask, other=0.0)
        if BITS == 4:
            low = (packed & 15).to(tl.float32)
            products = low * (even - odd * 0.0625)[None, :] + packed.to(tl.float32) * (odd * 0.0625)[None, :]
            inputs = even + odd
        else:
            products = eight_bits(packed) * even[None, :]
            inputs = even
        if GROUP == 0:
            return products
        else:  # noqa: RET505
            SHARE: tl.constexpr = GROUP * BITS // 8  # bytes of a group
            group = first // GROUP + tl.arange(0, KB // GROUP)
            is_group = is_output[:, None] & (group[None, :] < K // GROUP)
            places = outputs[:, None] * (K // GROUP) + group[None, :]
            scale = tl.load(scales + places, mask=is_group, other=0.0).to(tl.float32)
            result = tl.sum(tl.reshape(products, (N, KB // GROUP, SHARE)), 2) * scale
            if HAS_OFFSETS:
                offset = tl.load(offsets + places, mask=is_group, other=0.0).to(tl.float32)
                result += offset * tl.sum(tl.reshape(inputs, (KB // GROUP, SHARE)), 1)[None, :]
            return result
