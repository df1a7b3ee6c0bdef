"""Reads the header of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): metadata and tensors.

A file may come from anywhere, so its header is trusted only as far as the file's size confirms it: no number in it
makes this loop or allocate beyond the file's own size. (The package gguf reads the same header, but its loops run as
long as the header says.)
"""

import math
import re
import struct
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from chairlift.errors import CheckpointError, named, shown
from chairlift.models.gguf.kinds import Kind

_SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER = 2**28  # bytes; a vocabulary of half a million tokens with its merges takes 30 MB
_READ_AHEAD = 2**20  # bytes
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")
_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)

Metadata = dict[str, Any]
"""Numbers, booleans, strings, lists of strings, and numpy arrays of numbers."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Describes a tensor as the header does. Its bytes are within the file."""

    shape: tuple[int, ...]  # the outermost dimension first, as in torch
    kind: Kind
    path: Path
    offset: int  # bytes from the beginning of the file
    num_bytes: int


@dataclass(frozen=True, slots=True, weakref_slot=True)
class GGUFFile:
    """The header of a file, or of all parts of one that is split."""

    path: Path  # of the first part
    metadata: Metadata
    tensors: dict[str, TensorInfo]


_State = tuple[Path, int, int, int, int]
"""A file as it was: its path, device, number on it, size in bytes, and time of its last change in ns."""

_held: "weakref.WeakValueDictionary[tuple[_State, ...], GGUFFile]" = weakref.WeakValueDictionary()
"""The headers that somebody holds: a large vocabulary takes a while to read, and several readers need it at start."""
_reading = threading.Lock()  # held while a header is read, so that another thread waits for the same one


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
    """Reads the header, unless somebody still holds it and the file is as it was.

    CheckpointError if a part is missing, damaged, truncated or of a kind that is not known.
    """
    parts = parts_of(path)
    for part in parts:
        if not part.is_file():
            raise CheckpointError(f"{path} is split, and {part.name} is not beside it")
    try:
        states = tuple(map(_state_of, parts))
    except OSError as error:
        raise CheckpointError(f"{path} is no GGUF file that can be read: {error}") from error
    with _reading:
        if (file := _held.get(states)) is None:
            file = _held[states] = _read_headers(path, parts)
    return file


def _state_of(path: Path) -> _State:
    found = path.stat()
    return path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _read_headers(path: Path, parts: list[Path]) -> GGUFFile:
    metadata: Metadata = {}
    tensors: dict[str, TensorInfo] = {}
    for part in parts:
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
    with path.open("rb") as file:
        size = path.stat().st_size
        cursor = _Cursor(file, size)
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
    if sum(info.num_bytes for info in infos.values()) > size:  # a model of them would be larger than the file
        raise ValueError("its tensors overlap")
    return GGUFFile(path, metadata, infos)


def _unique(items: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    seen = set()
    for name, value in items:
        if name in seen:
            raise ValueError(f"it has {named(name)} twice")
        seen.add(name)
        yield name, value


def _tensor_place(cursor: "_Cursor") -> tuple[str, tuple[tuple[int, ...], Kind, int]]:
    name = cursor.text()
    (num_dimensions,) = cursor.numbers("I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"tensor {named(name)} has {num_dimensions} dimensions")
    shape = cursor.numbers("Q" * num_dimensions)[::-1]
    kind, offset = cursor.numbers("IQ")
    try:
        return name, (shape, Kind(kind), offset)
    except ValueError:
        raise ValueError(f"tensor {named(name)} is of type {kind}, which is not known") from None


def _num_bytes(name: str, shape: tuple[int, ...], kind: Kind) -> int:
    num_elements, num_bytes = kind.block
    if min(shape) < 1 or shape[-1] % num_elements:
        raise ValueError(f"tensor {named(name)} of shape {list(shape)} cannot be of type {kind.name}")
    return math.prod(shape) // num_elements * num_bytes


class _Cursor:
    """Reads a header from its beginning. ValueError where it would go beyond the end."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self._data = bytearray()  # of the file, as far as it was needed
        self.position = 0

    def raw(self, num_bytes: int) -> bytes:
        start = self.position
        self._need(start + num_bytes)
        self.position += num_bytes
        return bytes(self._data[start : self.position])

    def _need(self, stop: int) -> None:
        """Reads on if that byte is not there yet."""
        if stop > min(self._size, _MAX_HEADER):
            raise self._cut()
        if stop > len(self._data):
            self._data += self._file.read(max(stop - len(self._data), _READ_AHEAD))
        if stop > len(self._data):
            raise self._cut()

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
        data, unpack = self._data, _LENGTH.unpack_from
        for _ in range(count):
            start = self.position + _LENGTH.size
            if start > len(data):
                self._need(start)
            stop = start + unpack(data, self.position)[0]
            if stop > len(data):
                self._need(stop)
            self.position = stop
            yield data[start:stop].decode()

    def _cut(self) -> ValueError:
        is_long = self._size > _MAX_HEADER
        return ValueError(f"it is {'too long' if is_long else 'truncated'} in its header, at byte {self.position}")

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
