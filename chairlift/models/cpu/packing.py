"""Weights in the layout that the kernels read.

A matrix `[out, in]` becomes panels of 16 outputs. Within a panel, 32-bit words (one float32, two bfloat16 or four int8
values of one output) are transposed: word k of all 16 outputs, then word k + 1. So a processor's dot-product
instructions take what a sequential read brings. Inputs are padded to 64 and outputs to 16 with zeros.

Queries and keys are rotated as whole heads, each half with the other. Where only some elements of a head turn, they
come first in both halves, and the angle of the others is 0.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from chairlift.models.rope import RopeConfig, rope_tables

LANES = 16
DEPTH_ALIGNMENT = 64
_ROWS_AT_ONCE = 1024  # in float32 a large head would take several times what it takes itself


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """`[out, in]` in panels, with one scale and one sum of values per output if it is int8."""

    panels: torch.Tensor  # int32 words [padded out / 16, padded in * itemsize / 4, 16]
    num_outputs: int  # as the kernels count: without the last panel's padding
    depth: int
    bias: torch.Tensor | None  # float32 [padded out]
    scales: torch.Tensor | None  # float32 [padded out]
    sums: torch.Tensor | None  # int32 [padded out]

    @property
    def num_bytes(self) -> int:
        tensors = (self.panels, self.bias, self.scales, self.sums)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def pack(weight: torch.Tensor, bias: torch.Tensor | None = None, *, is_quantized: bool = False) -> PackedMatrix:
    """`[out, in]` (and `[out]`) -> panels, quantized to int8 if asked for."""
    num_outputs, num_inputs = weight.shape
    scales = sums = None
    if is_quantized:
        weight, scales = quantize(weight)
        sums = _pad_outputs(weight.sum(dim=1, dtype=torch.int32))
        scales = _pad_outputs(scales)
    missing = (0, -num_inputs % DEPTH_ALIGNMENT, 0, -num_outputs % LANES)
    padded = pad(weight, missing) if any(missing) else weight  # it would copy, and a head is large
    words = padded.contiguous().view(torch.int32)
    panels = words.view(len(words) // LANES, LANES, -1).transpose(1, 2).contiguous()
    padded_bias = None if bias is None else _pad_outputs(bias.float())
    return PackedMatrix(panels, num_outputs, padded.shape[1], padded_bias, scales, sums)


def interleave(tensor: torch.Tensor) -> torch.Tensor:
    """Gate and up stacked `[2 I, ...]` -> 16 outputs of gate, then the same 16 of up, and so on; I padded to 16."""
    gate, up = (_pad_outputs(half).view(-1, LANES, *tensor.shape[1:]) for half in tensor.chunk(2))
    return torch.stack((gate, up), dim=1).flatten(0, 2)


def arrange_heads(rows: torch.Tensor, num_heads: int, head_dim: int, num_rotated: int) -> torch.Tensor:
    """`[n * head_dim, ...]`: the elements of the first `num_heads` heads in the order above, if there are so many.

    In the order of a checkpoint the first `num_rotated` elements turn, each half of these with the other.
    """
    if num_rotated == head_dim:
        return rows
    middle, end = num_rotated // 2, (num_rotated + head_dim) // 2
    ranges = ((0, middle), (num_rotated, end), (middle, num_rotated), (end, head_dim))
    order = torch.cat([torch.arange(start, stop) for start, stop in ranges])
    indices = torch.arange(len(rows)).view(-1, head_dim)
    indices[:num_heads] = indices[:num_heads, order]
    return rows[indices.flatten()]


def rope_table(rope: RopeConfig, head_dim: int, max_seq_len: int) -> torch.Tensor:
    """float32 `[max_seq_len, head_dim]`: the cosines of half a head, then the sines; the other half has the same."""
    cosines, sines = rope_tables(rope, head_dim, max_seq_len, torch.device("cpu"))
    num_turning = cosines.shape[-1] // 2
    still = (0, head_dim // 2 - num_turning)
    return torch.cat((pad(cosines[:, :num_turning], still, value=1.0), pad(sines[:, :num_turning], still)), dim=-1)


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[out, in]` -> int8 values and float32 scales `[out]`: symmetric, the largest magnitude of each row is 127."""
    values, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    for start in range(0, len(weight), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        exact = weight[rows].float()
        scales[rows] = exact.abs().amax(dim=1) / 127
        values[rows] = (exact / scales[rows].clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_()
    return values, scales


def _pad_outputs(tensor: torch.Tensor) -> torch.Tensor:
    """The first dimension to a multiple of 16."""
    return pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, -len(tensor) % LANES)).contiguous()
