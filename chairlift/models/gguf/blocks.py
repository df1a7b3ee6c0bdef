"""Reads the tensors of a GGUF file: plain numbers, or blocks of 32 or 256 neighbours that share scales.

Blocks become weights in groups of 32 or 16. Their layouts are those of ggml
(https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h). A decoder takes blocks as uint8 `[n, bytes]` and
returns groups: values `[n, elements]` (`[n, elements * bits / 8]` bytes if not of 8 bits), scales and offsets
`[n, elements / group size]`, and the steps of these `[n, 1]` if it has some.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from chairlift.models import mxfp4, planes
from chairlift.models.file_bytes import FileBytes
from chairlift.models.gguf.header import TensorInfo
from chairlift.models.gguf.kinds import Kind
from chairlift.models.grouped import POWERS_OF_TWO, GroupedWeight
from chairlift.models.side_by_side import compute_each, elements_of_part
from chairlift.models.stored import GroupFormat

GROUP_SIZE = 32
PLAIN = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}

_LOW_HALVES = 0x0F0F0F0F0F0F0F0F
_BYTES_OF_1 = 0x0101010101010101
_A_BIT_EACH = 0x8040201008040201 - 2**64  # the first byte's lowest bit, the second byte's next, and so on
_GATHERING = ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0x00000000FFFFFFFF))
_ELEMENTS_AT_ONCE = 2**18  # so that intermediate results stay in a processor's cache
_IQ4_TABLE = torch.tensor((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), dtype=torch.int8)


@dataclass(frozen=True, slots=True)
class Groups:
    """Holds weights in groups as a decoder returns them, or the rows that they are written to."""

    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None
    scale_steps: torch.Tensor | None = None
    offset_steps: torch.Tensor | None = None


_PARTS = tuple(field.name for field in fields(Groups))


@dataclass(frozen=True, slots=True)
class Unpacker:
    """Reads blocks of some types in native code, to the same bits as their decoders here.

    `unpack` takes the type, blocks as uint8 `[n bytes]`, and dense rows, to which it writes. Other threads of Python
    run meanwhile.
    """

    kinds: frozenset[Kind]
    unpack: Callable[[Kind, torch.Tensor, Groups], None]


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A type of blocks, and the format of its groups."""

    decode: Callable[[torch.Tensor], Groups]
    num_bits: int
    scale_dtype: torch.dtype = torch.float16
    has_offsets: bool = False
    table: torch.Tensor | None = None
    has_steps: bool = False  # scales and offsets are counts of a step for each block
    group_size: int = GROUP_SIZE

    @property
    def stored_scale_dtype(self) -> torch.dtype:
        """Returns the type of scales and offsets, or of counts, which have a sign where there are no offsets."""
        if not self.has_steps:
            return self.scale_dtype
        return torch.uint8 if self.has_offsets else torch.int8


def format_of(kind: Kind) -> GroupFormat | None:
    """The group format of a readable type; None: plain numbers."""
    if kind in PLAIN:
        return None
    blocks = _BLOCKS[kind]
    size, scale_bytes = blocks.group_size, blocks.scale_dtype.itemsize
    scales_per_step = kind.block.num_elements // size if blocks.has_steps else 0
    return GroupFormat(
        blocks.num_bits,
        size,
        scale_bytes,
        blocks.has_offsets,
        scales_per_step,
        has_table=blocks.table is not None,
    )


def read_tensor(info: TensorInfo, unpacker: Unpacker | None = None) -> torch.Tensor | GroupedWeight:
    """Reads the tensor, in the file's own dtype or in groups. CheckpointError if the file has become too short."""
    with FileBytes(info.path) as file:
        if info.kind in PLAIN:
            return file.read(info.offset, info.num_bytes).view(PLAIN[info.kind]).view(info.shape)
        return _read_groups(file, info, unpacker)


def _read_groups(file: FileBytes, info: TensorInfo, unpacker: Unpacker | None) -> GroupedWeight:
    """Reads a matrix of blocks, some rows at a time."""
    blocks, block = _BLOCKS[info.kind], info.kind.block
    num_outputs, num_inputs = info.shape
    num_groups, num_steps = num_inputs // blocks.group_size, num_inputs // block.num_elements
    scale_dtype = blocks.stored_scale_dtype
    rows = Groups(
        torch.empty(
            num_outputs, num_inputs * blocks.num_bits // 8, dtype=torch.int8 if blocks.num_bits == 8 else torch.uint8
        ),
        torch.empty(num_outputs, num_groups, dtype=scale_dtype),
        torch.empty(num_outputs, num_groups, dtype=scale_dtype) if blocks.has_offsets else None,
        torch.empty(num_outputs, num_steps, dtype=torch.float16) if blocks.has_steps else None,
        torch.empty(num_outputs, num_steps, dtype=torch.float16) if blocks.has_steps and blocks.has_offsets else None,
    )
    unpack = unpacker.unpack if unpacker is not None and info.kind in unpacker.kinds else None
    num_at_once = _ELEMENTS_AT_ONCE if unpack is None else elements_of_part(num_outputs * num_inputs)
    step, row_bytes = max(1, num_at_once // num_inputs), info.num_bytes // num_outputs

    def read_rows(start: int) -> None:
        stop = min(start + step, num_outputs)
        written = file.read(info.offset + start * row_bytes, (stop - start) * row_bytes)
        parts = {name: getattr(rows, name) for name in _PARTS}
        places: dict[str, Any] = {name: None if part is None else part[start:stop] for name, part in parts.items()}
        if unpack is not None:
            unpack(info.kind, written, Groups(**places))
            return
        groups = blocks.decode(written.view(-1, block.num_bytes))
        for name, place in places.items():
            if place is not None:
                place[:] = getattr(groups, name).reshape(-1, place.shape[1])

    compute_each(read_rows, range(0, num_outputs, step), num_outputs * num_inputs)
    steps = rows.scale_steps, rows.offset_steps
    return GroupedWeight(blocks.num_bits, rows.values, rows.scales, rows.offsets, blocks.table, *steps)


def _halves(stored: torch.Tensor) -> torch.Tensor:
    """uint8 `[n, 2 k]` -> float16 `[n, k]`"""
    return stored.contiguous().view(torch.float16)


def _words(stored: torch.Tensor) -> torch.Tensor:
    """uint8 `[n, 4 k]` -> int32 `[n, k]`"""
    return stored.contiguous().view(torch.int32)


def _nibbles(stored: torch.Tensor) -> torch.Tensor:
    """uint8 `[..., k]` -> `[..., 2 k]`: all low halves, then all high ones."""
    return torch.cat((stored & 15, stored >> 4), dim=-1)


def _paired(stored: torch.Tensor) -> torch.Tensor:
    """uint8 `[..., k]` -> `[..., k]`: halves in the order of `_nibbles`, the first of two neighbours in the low half.

    Computed on eight bytes at once: neighbours move together, until their pairs fill the lower four.
    """
    words = stored.contiguous().view(torch.int64)
    words = torch.cat((words & _LOW_HALVES, words >> 4 & _LOW_HALVES), dim=-1)
    for shift, mask in _GATHERING:
        words |= words >> shift
        words &= mask
    return words.view(torch.int32)[..., ::2].contiguous().view(torch.uint8)


def _fifth_bits(stored: torch.Tensor) -> torch.Tensor:
    """uint8 `[n, 4]` -> `[n, 32]`: 16 for each bit that is set; bit i of a little-endian number is element i's.

    Computed on eight bytes at once: each keeps one bit of a copy, and a carry into its highest bit tells if it is set.
    """
    copies = stored.to(torch.int64) * _BYTES_OF_1 & _A_BIT_EACH
    return ((copies + 127 * _BYTES_OF_1) >> 3 & 16 * _BYTES_OF_1).view(torch.uint8)


def _decode_q4_0(blocks: torch.Tensor) -> Groups:
    scales = _halves(blocks[:, :2])
    return Groups(_paired(blocks[:, 2:]), scales, -8 * scales)  # exact: a power of two


def _decode_q4_1(blocks: torch.Tensor) -> Groups:
    return Groups(_paired(blocks[:, 4:]), _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _decode_q5_0(blocks: torch.Tensor) -> Groups:
    values = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return Groups(values.view(torch.int8) - 16, _halves(blocks[:, :2]))


def _decode_q5_1(blocks: torch.Tensor) -> Groups:
    values = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return Groups(values.view(torch.int8), _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _decode_q8_0(blocks: torch.Tensor) -> Groups:
    return Groups(blocks[:, 2:].view(torch.int8), _halves(blocks[:, :2]))


def _decode_q4_k(blocks: torch.Tensor) -> Groups:
    values = _paired(blocks[:, 16:].reshape(-1, 4, 32))  # each 32 bytes: one group, then the next
    scales, minima = _k_counts(blocks)
    return Groups(values, scales, minima, _halves(blocks[:, :2]), -_halves(blocks[:, 2:4]))


def _decode_q5_k(blocks: torch.Tensor) -> Groups:
    low = planes.paired(_words(blocks[:, 48:]).view(-1, 1, 8)).view(-1, 8, 4)  # each 32 bytes: one group, then the next
    fifth = planes.exchanged(_words(blocks[:, 16:48]), 1)  # [n, 8]
    values = torch.cat((low, fifth[..., None]), dim=-1).view(len(blocks), -1)
    scales, minima = _k_counts(blocks)
    return Groups(values.view(torch.uint8), scales, minima, _halves(blocks[:, :2]), -_halves(blocks[:, 2:4]))


def _k_counts(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of 8 groups, uint8 `[n, 8]`: counts of 6 bits, of a step for all of them."""
    low, middle, high = blocks[:, 4:16].view(-1, 3, 4).unbind(1)  # 8 scales and 8 minima of 6 bits in 12 bytes
    scales = torch.cat((low & 63, (high & 15) | (low >> 2 & 48)), dim=1)
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 2 & 48)), dim=1)
    return scales, minima


def _decode_q6_k(blocks: torch.Tensor) -> Groups:
    """16 neighbours share a scale, a count of 8 bits. Each half of a block has four groups of 32."""
    low = planes.paired(_words(blocks[:, :128]).view(-1, 2, 8))  # [2 n, 2, 2, 4]
    high = planes.exchanged(_words(blocks[:, 128:192]).view(-1, 2, 4), 2).transpose(1, 2)  # [2 n, 4, 2]
    values = torch.cat((low.flatten(1, 2), high), dim=-1).view(len(blocks), -1)
    return Groups(values.view(torch.uint8), blocks[:, 192:208].view(torch.int8), None, _halves(blocks[:, 208:]))


def _decode_q2_k(blocks: torch.Tensor) -> Groups:
    """16 neighbours share a scale and an offset, counts of 4 bits."""
    values = planes.exchanged(_words(blocks[:, 16:80]).view(-1, 2, 4), 2).transpose(1, 2).reshape(len(blocks), -1)
    scales, minima = blocks[:, :16] & 15, blocks[:, :16] >> 4
    return Groups(values.view(torch.uint8), scales, minima, _halves(blocks[:, 80:82]), -_halves(blocks[:, 82:84]))


def _decode_q3_k(blocks: torch.Tensor) -> Groups:
    """16 neighbours share a scale, a count of 6 bits."""
    low = planes.exchanged(_words(blocks[:, 32:96]).view(-1, 2, 4), 2).transpose(1, 2).reshape(-1, 8, 2)
    high = planes.exchanged(_words(blocks[:, :32]), 1)  # [n, 8]
    values = torch.cat((low, high[..., None]), dim=-1).view(len(blocks), -1)
    lowest = torch.cat((blocks[:, 96:104] & 15, blocks[:, 96:104] >> 4), dim=1)
    highest = torch.cat([(blocks[:, 104:108] >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1)
    scales = (lowest | highest << 4).view(torch.int8) - 32  # [n, 16]
    return Groups(values.view(torch.uint8), scales, None, _halves(blocks[:, 108:]))


def _decode_iq4_nl(blocks: torch.Tensor) -> Groups:
    return Groups(_paired(blocks[:, 2:]), _halves(blocks[:, :2]))


def _decode_iq4_xs(blocks: torch.Tensor) -> Groups:
    """8 groups, whose scales have 6 bits: 4 in a half of a byte, and 2 in a number of 16 bits for all."""
    high = (blocks[:, 2:4].contiguous().view(torch.int16).int() >> torch.arange(0, 16, 2)) & 3
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).flatten(1)
    scales = _halves(blocks[:, :2]).float() * ((low | high << 4) - 32)
    return Groups(_paired(blocks[:, 8:].reshape(-1, 8, 16)), scales)


def _decode_mxfp4(blocks: torch.Tensor) -> Groups:
    return Groups(_paired(blocks[:, 1:]), mxfp4.scales_of(blocks[:, :1]))


_BLOCKS = {
    Kind.Q8_0: _Blocks(_decode_q8_0, 8),
    Kind.Q4_0: _Blocks(_decode_q4_0, 4, has_offsets=True),
    Kind.Q4_1: _Blocks(_decode_q4_1, 4, has_offsets=True),
    Kind.Q5_0: _Blocks(_decode_q5_0, 8),
    Kind.Q5_1: _Blocks(_decode_q5_1, 8, has_offsets=True),
    Kind.Q4_K: _Blocks(_decode_q4_k, 4, torch.float32, has_offsets=True, has_steps=True),
    Kind.Q5_K: _Blocks(_decode_q5_k, 5, torch.float32, has_offsets=True, has_steps=True),
    Kind.Q6_K: _Blocks(_decode_q6_k, 6, torch.float32, has_steps=True, group_size=16),
    Kind.Q2_K: _Blocks(_decode_q2_k, 2, torch.float32, has_offsets=True, has_steps=True, group_size=16),
    Kind.Q3_K: _Blocks(_decode_q3_k, 3, has_steps=True, group_size=16),
    Kind.IQ4_NL: _Blocks(_decode_iq4_nl, 4, table=_IQ4_TABLE),
    Kind.IQ4_XS: _Blocks(_decode_iq4_xs, 4, torch.float32, table=_IQ4_TABLE),
    Kind.MXFP4: _Blocks(_decode_mxfp4, 4, POWERS_OF_TWO, table=mxfp4.TABLE),
}
READABLE = (*PLAIN, *_BLOCKS)
