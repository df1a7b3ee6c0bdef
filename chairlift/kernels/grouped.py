"""Matrices as they are stored, plainly or as small values in groups: tiles of them, and the whole as numbers.

An element of a group is `scale * value + offset`. With 4 bits a byte holds two neighbours, the first in its low half.
Values of 8 bits are integers, or float8 numbers (e4m3). GPUs without instructions for these get them as bytes, whose
bits are moved to their places in a float16.
"""

# mypy: disable-error-code="untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

GROUP_SIZES = (32, 64, 128)  # that tiles are made of
_WHOLE_ROW = 0  # in place of a group's size
_OUTPUTS, _INPUTS = 16, 256  # of a tile that is written as numbers


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix `[out, in]` on a CUDA device; its tensors are dense.

    With 16 bits `values` are its numbers, float16 or bfloat16 (float32 is taken too). With 8 bits they are int8, or
    float8 (e4m3) or the bytes of such as uint8, `[out, in]`; with 4 uint8 `[out, in / 2]`. Then scales, and offsets if
    there are any, are `[out, in / group]` of any floating dtype, for groups of one of `GROUP_SIZES`. Values of 8 bits
    without offsets may have one scale for a whole row, `[out, 1]`.
    """

    num_bits: int
    values: torch.Tensor
    scales: torch.Tensor | None = None
    offsets: torch.Tensor | None = None

    @property
    def num_outputs(self) -> int:
        return self.values.shape[0]

    @property
    def num_inputs(self) -> int:
        return self.values.shape[1] * (2 if self.num_bits == 4 else 1)

    @property
    def group_size(self) -> int:
        """Elements that share a scale; 32 where they have none."""
        return GROUP_SIZES[0] if self.scales is None else self.num_inputs // self.scales.shape[1]

    @property
    def group_constant(self) -> int:
        """Returns what kernels get as the size of a group: 0 for a whole row."""
        if self.group_size in GROUP_SIZES:
            return self.group_size
        assert self.num_bits == 8, "groups of other values have a size that tiles are made of"
        assert self.scales is not None, "it is no group, then"
        assert self.scales.shape[1] == 1, "other groups than a row have a size that tiles are made of"
        assert self.offsets is None, "so have values with offsets"
        return _WHOLE_ROW

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in (self.values, self.scales, self.offsets) if each is not None)

    def rows(self, some: slice) -> "StoredMatrix":
        """Shows some outputs of it."""
        scales, offsets = (None if each is None else each[some] for each in (self.scales, self.offsets))
        return StoredMatrix(self.num_bits, self.values[some], scales, offsets)


@triton.jit
def read_tile(
    values: tl.tensor, scales: tl.tensor, offsets: tl.tensor, outputs: tl.tensor, is_output: tl.tensor,
    first: tl.tensor, K: tl.tensor, BITS: tl.constexpr, GROUP: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    N: tl.constexpr, KB: tl.constexpr, DTYPE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The elements `[N, KB]` in DTYPE of those outputs, int64 `[N]`, from that input on; zero beyond the matrix.

    GROUP of 0: a scale is of a whole row, and is left to the caller.
    """
    if BITS == 16:
        at = first + tl.arange(0, KB)
        mask = is_output[:, None] & (at[None, :] < K)
        return tl.load(values + outputs[:, None] * K + at[None, :], mask=mask, other=0.0).to(DTYPE)
    else:  # noqa: RET505
        at = first * BITS // 8 + tl.arange(0, KB * BITS // 8)
        mask = is_output[:, None] & (at[None, :] < K * BITS // 8)
        packed = tl.load(values + outputs[:, None] * (K * BITS // 8) + at[None, :], mask=mask, other=0.0)
        if BITS == 4:
            numbers = tl.interleave((packed & 15).to(tl.float32), (packed >> 4).to(tl.float32))
        else:
            numbers = eight_bits(packed)
        if GROUP == 0:
            return numbers.to(DTYPE)
        else:  # noqa: RET505
            group = first // GROUP + tl.arange(0, KB // GROUP)
            is_group = is_output[:, None] & (group[None, :] < K // GROUP)
            places = outputs[:, None] * (K // GROUP) + group[None, :]
            scale = tl.load(scales + places, mask=is_group, other=0.0).to(tl.float32)
            exact = tl.reshape(numbers, (N, KB // GROUP, GROUP)) * scale[:, :, None]
            if HAS_OFFSETS:
                exact += tl.load(offsets + places, mask=is_group, other=0.0).to(tl.float32)[:, :, None]
            return tl.reshape(exact, (N, KB)).to(DTYPE)


@triton.jit
def eight_bits(packed: tl.tensor) -> tl.tensor:
    """Values of 8 bits in float32: integers, float8 numbers, or bytes of these.

    A float16 has a bit more of exponent, whose bias is 8 larger, and seven bits more of fraction.
    """
    if packed.dtype == tl.uint8:
        wide = packed.to(tl.uint16)
        halves = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return tl.where((wide & 0x7F) == 0x7F, float("nan"), halves.to(tl.float32) * 256.0)
    else:  # noqa: RET505
        return packed.to(tl.float32)


@triton.jit
def row_scales(scales: tl.tensor, outputs: tl.tensor, is_output: tl.tensor) -> tl.tensor:
    """float32 `[N]`: scales of whole rows."""
    return tl.load(scales + outputs, mask=is_output, other=0.0).to(tl.float32)


@triton.jit
def _dequantize(
    values: tl.tensor, scales: tl.tensor, offsets: tl.tensor, output: tl.tensor, N_ALL: tl.tensor, K: tl.tensor,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_OFFSETS: tl.constexpr, N: tl.constexpr, KB: tl.constexpr,
) -> None:  # fmt: skip
    outputs = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    first = tl.program_id(1) * KB
    is_output = outputs < N_ALL
    tile = read_tile(
        values, scales, offsets, outputs, is_output, first, K, BITS, GROUP, HAS_OFFSETS, N, KB, output.dtype.element_ty
    )
    if GROUP == 0:
        tile = (tile.to(tl.float32) * row_scales(scales, outputs, is_output)[:, None]).to(output.dtype.element_ty)
    at = first + tl.arange(0, KB)
    tl.store(output + outputs[:, None] * K + at[None, :], tile, mask=is_output[:, None] & (at[None, :] < K))


def dequantize(matrix: StoredMatrix, output: torch.Tensor) -> None:
    """Writes the numbers of a matrix in groups to a dense `[out, in]`: computed in float32, then rounded once."""
    assert matrix.scales is not None, "it has groups"
    grid = triton.cdiv(matrix.num_outputs, _OUTPUTS), triton.cdiv(matrix.num_inputs, _INPUTS)
    _dequantize[grid](
        matrix.values,
        matrix.scales,
        matrix.scales if matrix.offsets is None else matrix.offsets,
        output,
        matrix.num_outputs,
        matrix.num_inputs,
        matrix.num_bits,
        matrix.group_constant,
        matrix.offsets is not None,
        _OUTPUTS,
        _INPUTS,
        num_warps=4,
    )
