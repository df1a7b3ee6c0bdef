"""GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): metadata, tensors, and their blocks.
`families` says what their names and numbers mean.

A file may come from anywhere, so its header is trusted only as far as the file's size confirms it: no number in it
makes this loop or allocate beyond the file's own size. (The package gguf reads the same header, but its loops run as
long as the header says.)

Tensors are written in blocks of 32 or 256 neighbours with their scales, which become weights in groups of 32. The
layouts are those of ggml (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h). A decoder takes blocks as
uint8 `[n, bytes]` and returns groups: values `[n, elements]` (`[n, elements / 2]` bytes if they have 4 bits), scales
and offsets `[n, elements / 32]`.
"""

import math
import mmap
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from chairlift.errors import CheckpointError, named, shown
from chairlift.models.grouped import GroupedWeight
from chairlift.models.stored import GroupFormat

_SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER = 2**28  # bytes; a vocabulary of half a million tokens with its merges takes 30 MB
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")
_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)

Metadata = dict[str, Any]
"""Numbers, booleans, strings, lists of strings, and numpy arrays of numbers."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a header says of a tensor. Its bytes are within the file."""

    shape: tuple[int, ...]  # the outermost dimension first, as in torch
    kind: GGMLQuantizationType
    path: Path
    offset: int  # bytes from the beginning of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The header of a file, or of all parts of one that is split."""

    path: Path  # of the first part
    metadata: Metadata
    tensors: dict[str, TensorInfo]


def is_gguf_name(path: Path) -> bool:
    """True if a file of that name would be a GGUF file."""
    return path.suffix.lower() == _SUFFIX


def is_gguf(path: Path) -> bool:
    """True if it is a GGUF file: by its name, or else by its first bytes."""
    if not path.is_file() or is_gguf_name(path):
        return path.is_file()
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:  # it cannot be read as anything
        return False


def open_gguf(path: Path) -> GGUFFile:
    """Reads the header. CheckpointError if a part is missing, damaged, truncated or of a kind that is not known."""
    metadata: Metadata = {}
    tensors: dict[str, TensorInfo] = {}
    parts = parts_of(path)
    for part in parts:
        if not part.is_file():
            raise CheckpointError(f"{path} is split, and {part.name} is not beside it")
        try:
            header = _read_header(part)
        except (OSError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{part} is no GGUF file that can be read: {error}") from error
        if twice := sorted(tensors.keys() & header.tensors):
            raise CheckpointError(f"{part} holds tensor {named(twice[0])} again")
        metadata = metadata or header.metadata
        tensors |= header.tensors
    count = metadata.get("split.count", 1)
    if count not in (0, len(parts)):
        raise CheckpointError(f"{path} is part of {count}, and its name does not say which: name-00001-of-00003.gguf")
    return GGUFFile(parts[0], metadata, tensors)


def parts_of(path: Path) -> list[Path]:
    """All parts of a file that is split; else the file."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return [path]
    stem, count, suffix = match[1], int(match[3]), match[4]
    return [path.with_name(f"{stem}-{number + 1:05}-of-{count:05}{suffix}") for number in range(count)]


def _read_header(path: Path) -> GGUFFile:
    size = path.stat().st_size
    if size < len(_MAGIC):
        raise ValueError("it is truncated")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        if cursor.raw(len(_MAGIC)) != _MAGIC:
            raise ValueError(f"it does not begin with {_MAGIC.decode()}")
        (version,) = cursor.numbers("I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, and only {' and '.join(map(str, _VERSIONS))} are known")
        num_tensors, num_fields = cursor.numbers("QQ")
        metadata = dict(_unique(cursor.field() for _ in range(num_fields)))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment must be a power of two, not {shown(alignment)}")
        places = dict(_unique(_tensor_place(cursor) for _ in range(num_tensors)))
        start = -(-cursor.position // alignment) * alignment
    infos = {}
    for name, (shape, kind, offset) in places.items():
        infos[name] = info = TensorInfo(shape, kind, path, start + offset, _num_bytes(name, shape, kind))
        if info.offset + info.num_bytes > size:
            raise ValueError(
                f"it is truncated: tensor {named(name)} ends at byte {info.offset + info.num_bytes} of {size}"
            )
    return GGUFFile(path, metadata, infos)


def _unique(items: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    seen = set()
    for name, value in items:
        if name in seen:
            raise ValueError(f"it has {named(name)} twice")
        seen.add(name)
        yield name, value


def _tensor_place(cursor: "_Cursor") -> tuple[str, tuple[tuple[int, ...], GGMLQuantizationType, int]]:
    name = cursor.text()
    (num_dimensions,) = cursor.numbers("I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"tensor {named(name)} has {num_dimensions} dimensions")
    shape = cursor.numbers("Q" * num_dimensions)[::-1]
    kind, offset = cursor.numbers("IQ")
    try:
        return name, (shape, GGMLQuantizationType(kind), offset)
    except ValueError:
        raise ValueError(f"tensor {named(name)} is of type {kind}, which is not known") from None


def _num_bytes(name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    num_elements, num_bytes = GGML_QUANT_SIZES[kind]  # of a block
    if min(shape) < 1 or shape[-1] % num_elements:
        raise ValueError(f"tensor {named(name)} of shape {list(shape)} cannot be of type {kind.name}")
    return math.prod(shape) // num_elements * num_bytes


class _Cursor:
    """Reads a header from its beginning. ValueError where it would go beyond the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = min(len(data), _MAX_HEADER)
        self.position = 0

    def raw(self, num_bytes: int) -> bytes:
        start = self.position
        if num_bytes > self._size - start:
            raise self._cut()
        self.position += num_bytes
        return self._data[start : self.position]

    def numbers(self, format: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{format}", self.raw(struct.calcsize(f"<{format}")))

    def text(self) -> str:
        return self.raw(_LENGTH.unpack(self.raw(_LENGTH.size))[0]).decode()

    def field(self) -> tuple[str, Any]:
        name = self.text()
        (kind,) = self.numbers("I")
        return name, self._array(name) if kind == _ARRAY else self._scalar(name, kind)

    def _texts(self, count: int) -> Iterator[str]:
        """As `text` for each, in a third of the time: a vocabulary has hundreds of thousands."""
        data, end, unpack = self._data, self._size - _LENGTH.size, _LENGTH.unpack_from
        for _ in range(count):
            start = self.position + _LENGTH.size
            if self.position > end or (stop := start + unpack(data, self.position)[0]) > self._size:
                raise self._cut()
            self.position = stop
            yield data[start:stop].decode()

    def _cut(self) -> ValueError:
        is_whole = self._size == len(self._data)
        return ValueError(f"it is {'truncated' if is_whole else 'too long'} in its header, at byte {self.position}")

    def _scalar(self, name: str, kind: int) -> Any:
        return self.text() if kind == _STRING else self.numbers(_format(name, kind))[0]

    def _array(self, name: str) -> Any:
        kind, count = self.numbers("IQ")
        if kind == _STRING:
            return list(self._texts(count))
        number = np.dtype(f"<{_format(name, kind)}" if kind != 7 else "?")
        return np.frombuffer(self.raw(count * number.itemsize), number)


def _format(name: str, kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"{named(name)} is of type {kind}, which is not known")
    return _SCALARS[kind]


# --- blocks

Kind = GGMLQuantizationType

GROUP_SIZE = 32
PLAIN = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}

_LOW_HALVES = 0x0F0F0F0F0F0F0F0F
_GATHERING = ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0x00000000FFFFFFFF))
_ELEMENTS_AT_ONCE = 2**18  # so that intermediate results stay in a processor's cache
_Q8_MAX = 127


@dataclass(frozen=True, slots=True)
class _Groups:
    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A type of blocks, and the format of its groups."""

    decode: Callable[[torch.Tensor], _Groups]
    num_bits: int
    scale_dtype: torch.dtype = torch.float16
    has_offsets: bool = False


def format_of(kind: Kind) -> GroupFormat | None:
    """The group format of a readable type; None: plain numbers."""
    if kind in PLAIN:
        return None
    blocks = _BLOCKS[kind]
    return GroupFormat(blocks.num_bits, GROUP_SIZE, blocks.scale_dtype.itemsize * (1 + blocks.has_offsets))


def read_tensor(info: TensorInfo) -> torch.Tensor | GroupedWeight:
    """The tensor, in the file's own dtype or in groups. The file is mapped for as long as this takes."""
    size = info.path.stat().st_size
    mapped = torch.from_file(str(info.path), shared=False, size=size, dtype=torch.uint8)
    written = mapped[info.offset : info.offset + info.num_bytes]
    if info.kind in PLAIN:
        return written.clone().view(PLAIN[info.kind]).view(info.shape)
    return _read_groups(written.view(info.shape[0], -1), info)


def _read_groups(rows: torch.Tensor, info: TensorInfo) -> GroupedWeight:
    """uint8 `[out, bytes]`, some rows at a time."""
    blocks, block_bytes = _BLOCKS[info.kind], GGML_QUANT_SIZES[info.kind][1]
    num_outputs, num_inputs = info.shape
    values_of = torch.uint8 if blocks.num_bits == 4 else torch.int8
    values = torch.empty(num_outputs, num_inputs * blocks.num_bits // 8, dtype=values_of)
    scales = torch.empty(num_outputs, num_inputs // GROUP_SIZE, dtype=blocks.scale_dtype)
    offsets = torch.empty_like(scales) if blocks.has_offsets else None
    step = max(1, _ELEMENTS_AT_ONCE // num_inputs)
    for start in range(0, num_outputs, step):
        some = slice(start, start + step)
        groups = blocks.decode(rows[some].reshape(-1, block_bytes))
        values[some] = groups.values.reshape(-1, values.shape[1])
        scales[some] = groups.scales.view(-1, scales.shape[1])
        if offsets is not None and groups.offsets is not None:
            offsets[some] = groups.offsets.view(-1, scales.shape[1])
    return GroupedWeight(blocks.num_bits, values, scales, offsets)


def _halves(stored: torch.Tensor) -> torch.Tensor:
    """uint8 `[n, 2 k]` -> float16 `[n, k]`"""
    return stored.contiguous().view(torch.float16)


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


def _bits(stored: torch.Tensor) -> torch.Tensor:
    """uint8 `[n, 4]` -> `[n, 32]`: bit i of a little-endian number is element i's."""
    return ((stored[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1)


def _decode_q4_0(blocks: torch.Tensor) -> _Groups:
    scales = _halves(blocks[:, :2])
    return _Groups(_paired(blocks[:, 2:]), scales, -8 * scales)  # exact: a power of two


def _decode_q4_1(blocks: torch.Tensor) -> _Groups:
    return _Groups(_paired(blocks[:, 4:]), _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _decode_q5_0(blocks: torch.Tensor) -> _Groups:
    values = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return _Groups(values.view(torch.int8) - 16, _halves(blocks[:, :2]))


def _decode_q5_1(blocks: torch.Tensor) -> _Groups:
    values = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return _Groups(values.view(torch.int8), _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _decode_q8_0(blocks: torch.Tensor) -> _Groups:
    return _Groups(blocks[:, 2:].view(torch.int8), _halves(blocks[:, :2]))


def _decode_q4_k(blocks: torch.Tensor) -> _Groups:
    values = _paired(blocks[:, 16:].reshape(-1, 4, 32))  # each 32 bytes: one group, then the next
    return _Groups(values, *_k_scales(blocks))


def _decode_q5_k(blocks: torch.Tensor) -> _Groups:
    fifth = (blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1  # [n, 8 groups, 32]
    values = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32) | fifth << 4
    return _Groups(values.view(torch.int8), *_k_scales(blocks))


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets of 8 groups, float32: products of a float16 for all of them and 6 bits for each."""
    low, middle, high = blocks[:, 4:16].view(-1, 3, 4).unbind(1)  # 8 scales and 8 minima of 6 bits in 12 bytes
    scales = torch.cat((low & 63, (high & 15) | (low >> 2 & 48)), dim=1)
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 2 & 48)), dim=1)
    return _halves(blocks[:, :2]).float() * scales, -_halves(blocks[:, 2:4]).float() * minima


def _decode_q6_k(blocks: torch.Tensor) -> _Groups:
    """16 neighbours share a scale: in groups of 32 they are rounded to 255 steps, with nearly the same error."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 8, 32)
    high = (blocks[:, 128:192].view(-1, 2, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]) & 3
    values = (low | high.view(-1, 8, 32) << 4).view(torch.int8) - 32
    scales = _halves(blocks[:, 208:]).float() * blocks[:, 192:208].view(torch.int8)  # [n, 16]
    largest = values.view(-1, 16, 16).abs().amax(dim=-1) * scales.abs()
    exact = largest.view(-1, 8, 2).amax(dim=-1) / _Q8_MAX
    steps = exact.half()
    steps = (steps.view(torch.int16) + (steps.float() < exact)).view(torch.float16)  # rounded up, to clip nothing
    ratios = scales.view(-1, 8, 2) / steps.float().clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    nearest = (values.view(-1, 8, 2, 16) * ratios[..., None]).round_()
    return _Groups(nearest.to(torch.int8), steps)


_BLOCKS = {
    Kind.Q8_0: _Blocks(_decode_q8_0, 8),
    Kind.Q4_0: _Blocks(_decode_q4_0, 4, has_offsets=True),
    Kind.Q4_1: _Blocks(_decode_q4_1, 4, has_offsets=True),
    Kind.Q5_0: _Blocks(_decode_q5_0, 8),
    Kind.Q5_1: _Blocks(_decode_q5_1, 8, has_offsets=True),
    Kind.Q4_K: _Blocks(_decode_q4_k, 4, torch.float32, has_offsets=True),
    Kind.Q5_K: _Blocks(_decode_q5_k, 8, torch.float32, has_offsets=True),
    Kind.Q6_K: _Blocks(_decode_q6_k, 8),
}
READABLE = (*PLAIN, *_BLOCKS)
