"""Matrices as they are stored, plainly or as small integers in groups: tiles of them, and the whole as numbers.

An element of a group is `scale * value + offset`. With 4 bits a byte holds two neighbours, the first in its low half.
"""

# mypy: disable-error-code="untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

GROUP_SIZES = (32, 64, 128)  # that tiles are made of
_OUTPUTS, _INPUTS = 16, 256  # of a tile that is written as numbers


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix `[out, in]` on a CUDA device; its tensors are dense.

    With 16 bits `values` are its numbers, float16 or bfloat16 (float32 is taken too). With 8 bits they are int8
    `[out, in]`, with 4 uint8 `[out, in / 2]`; then scales, and offsets if there are any, are `[out, in / group]` of any
    floating dtype, for groups of one of `GROUP_SIZES`.
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
    """The elements `[N, KB]` in DTYPE of those outputs, int64 `[N]`, from that input on; zero beyond the matrix."""
    if BITS == 16:
        at = first + tl.arange(0, KB)
        mask = is_output[:, None] & (at[None, :] < K)
        return tl.load(values + outputs[:, None] * K + at[None, :], mask=mask, other=0.0).to(DTYPE)
    else:  # noqa: RET505
        at = first * BITS // 8 + tl.arange(0, KB * BITS // 8)
        mask = is_output[:, None] & (at[None, :] < K * BITS // 8)
        packed = tl.load(values + outputs[:, None] * (K * BITS // 8) + at[None, :], mask=mask, other=0)
        if BITS == 4:
            numbers = tl.interleave((packed & 15).to(tl.float32), (packed >> 4).to(tl.float32))
        else:
            numbers = packed.to(tl.float32)
        group = first // GROUP + tl.arange(0, KB // GROUP)
        is_group = is_output[:, None] & (group[None, :] < K // GROUP)
        places = outputs[:, None] * (K // GROUP) + group[None, :]
        scale = tl.load(scales + places, mask=is_group, other=0.0).to(tl.float32)
        exact = tl.reshape(numbers, (N, KB // GROUP, GROUP)) * scale[:, :, None]
        if HAS_OFFSETS:
            exact += tl.load(offsets + places, mask=is_group, other=0.0).to(tl.float32)[:, :, None]
        return tl.reshape(exact, (N, KB)).to(DTYPE)


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
        matrix.group_size,
        matrix.offsets is not None,
        _OUTPUTS,
        _INPUTS,
        num_warps=4,
    )
