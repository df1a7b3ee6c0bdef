"""Reads what a safetensors file says of its tensors (https://huggingface.co/docs/safetensors#format).

A file may come from anywhere: what its header says is compared with the file's size before anybody allocates by it.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from chairlift.errors import CheckpointError, named, shown

_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 100_000_000  # bytes, as in the library safetensors
_MAX_DIMENSIONS = 16
_METADATA = "__metadata__"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Says where the bytes of a tensor are. They are within the file, and no other tensor has them."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the beginning of the file

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_places(path: Path) -> dict[str, TensorPlace]:
    """Reads a file's header: its tensors by name. CheckpointError if it is damaged, truncated or contradicts itself."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = _read_length(file.read(_LENGTH.size), size)
            described = json.loads(file.read(length), object_pairs_hook=_unique)
        return _places_of(path, described, _LENGTH.size + length, size)
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is damaged or truncated: {error}") from error


def _read_length(written: bytes, size: int) -> int:
    """The header's, in bytes."""
    if len(written) < _LENGTH.size:
        raise ValueError("it has no header")
    length: int = _LENGTH.unpack(written)[0]
    if length > min(size - _LENGTH.size, _MAX_HEADER):
        raise ValueError(f"its header would have {length} bytes, and the file has {size}")
    return length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(members := dict(pairs)) < len(pairs):
        raise ValueError("its header has a name twice")
    return members


def _places_of(path: Path, described: object, start: int, size: int) -> dict[str, TensorPlace]:
    """`start`: of the tensors' bytes. They follow each other without gaps, up to the end of the file."""
    if not isinstance(described, dict):
        raise ValueError("its header is no object")
    described.pop(_METADATA, None)
    spans = {name: _span_of(name, tensor) for name, tensor in described.items()}
    places = {}
    end = 0
    for name in sorted(spans, key=spans.__getitem__):
        begin, stop = spans[name]
        place = _place_of(path, name, described[name], start + begin)
        if begin != end or place.num_bytes != stop - begin:
            shape, dtype = list(place.shape), described[name]["dtype"]
            raise ValueError(
                f"tensor {named(name)} of type {dtype} and shape {shown(shape)} cannot have bytes {begin} to {stop}"
            )
        places[name], end = place, stop
    if start + end != size:
        raise ValueError(f"its tensors end at byte {start + end}, and the file at {size}")
    return places


def _span_of(name: str, tensor: object) -> tuple[int, int]:
    span = tensor.get("data_offsets") if isinstance(tensor, dict) else None
    if not (isinstance(span, list) and len(span) == 2 and all(type(each) is int for each in span)):
        raise ValueError(f"tensor {named(name)} has no data_offsets")
    return span[0], span[1]


def _place_of(path: Path, name: str, tensor: dict[str, Any], offset: int) -> TensorPlace:
    dtype, shape = tensor.get("dtype"), tensor.get("shape")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise CheckpointError(f"{path}: tensor {named(name)} is of type {shown(dtype)}, which cannot be read")
    if not (isinstance(shape, list) and all(type(each) is int and each >= 0 for each in shape)):
        raise ValueError(f"tensor {named(name)} has shape {shown(shape)}")
    if len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"tensor {named(name)} has {len(shape)} dimensions")
    return TensorPlace(path, _DTYPES[dtype], tuple(shape), offset)
