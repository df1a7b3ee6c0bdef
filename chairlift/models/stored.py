"""Weights as a checkpoint stores them, under the names of Hugging Face's checkpoints, whatever kind of file it is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from chairlift.errors import CheckpointError, named
from chairlift.models.file_bytes import FileBytes
from chairlift.models.grouped import BITS_IN_PLANES, GROUP_ALIGNMENT, GroupedWeight
from chairlift.models.safetensors_header import TensorPlace, read_places

_NUMBERS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # of weights that are stored plainly
_PIECE_BYTES = 2**20  # a multiple of every dtype's size
_ROWS_COMPARED = 4096
_SHARING_BYTES = 2  # bits of values of which a scale and an offset share a byte
_NATIVE_SCALE_BYTES = 2  # native code has scales and offsets in float16 if no byte holds them, and steps in any case


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """Describes how a matrix in groups is stored: enough to know its size before it is read."""

    num_bits: int
    group_size: int
    scale_bytes: int  # of a scale, and of an offset
    has_offsets: bool = False
    scales_per_step: int = 0  # native code has scales as bytes, and so many share a step of 16 bits; 0: as numbers
    is_float: bool = False  # its values are float8 numbers, which native code does not multiply
    has_table: bool = False  # its values stand for numbers of 8 bits, which a GPU has in their place

    def bits_in_memory(self, *, is_on_gpu: bool) -> int:
        """Counts the bits of a value where it is multiplied."""
        return 8 if is_on_gpu and self.has_table else self.num_bits

    @property
    def is_in_planes(self) -> bool:
        """See `GroupedWeight`."""
        return self.num_bits in BITS_IN_PLANES

    @property
    def can_be_multiplied(self) -> bool:
        """True if kernels have products with such groups."""
        return self.is_in_planes or self.group_size % GROUP_ALIGNMENT == 0

    def regular(self) -> "GroupFormat":
        """Describes what `GroupedWeight.regular` makes of it."""
        has_offsets = self.has_offsets and self.group_size == GROUP_ALIGNMENT  # smaller groups are rounded
        return GroupFormat(8, GROUP_ALIGNMENT, self.scale_bytes, has_offsets) if self.is_in_planes else self

    def num_bytes(self, num_elements: int, *, is_on_gpu: bool) -> int:
        """Counts the memory of so many weights."""
        num_values = num_elements * self.bits_in_memory(is_on_gpu=is_on_gpu) // 8
        num_scales = num_elements // self.group_size * (1 + self.has_offsets)
        if is_on_gpu:
            return num_values + num_scales * max(self.scale_bytes, torch.bfloat16.itemsize)  # which E8M0 becomes
        if not self.scales_per_step:
            return num_values + num_scales * min(self.scale_bytes, _NATIVE_SCALE_BYTES)
        num_counts = num_scales // 2 if self.num_bits == _SHARING_BYTES else num_scales
        return num_values + num_counts + num_scales // self.scales_per_step * _NATIVE_SCALE_BYTES


def stacked_format(formats: Sequence[GroupFormat], *, is_on_gpu: bool) -> GroupFormat | None:
    """Returns the format of matrices that are stacked, as `stack_rows` does it: the widest of each.

    None if no kernel multiplies them.
    """
    if is_on_gpu or len({each.num_bits for each in formats}) > 1:
        formats = [each.regular() for each in formats]
    if len({each.group_size for each in formats}) != 1 or not formats[0].can_be_multiplied:
        return None
    runs = {each.scales_per_step for each in formats}
    return GroupFormat(
        8 if len({each.has_table for each in formats}) > 1 else max(each.num_bits for each in formats),
        formats[0].group_size,
        max(each.scale_bytes for each in formats),
        any(each.has_offsets for each in formats),
        runs.pop() if len(runs) == 1 else 0,
        is_float=any(each.is_float for each in formats),
        has_table=any(each.has_table for each in formats),
    )


@dataclass(frozen=True, slots=True)
class GroupedSize:
    """Counts the weights of a model that are kept in groups."""

    num_parameters: int
    num_bytes: int
    num_dequantized: int = 0  # numbers of a matrix that a GPU writes out at a time, to multiply many rows


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Describes a tensor before it is read."""

    shape: tuple[int, ...]
    groups: GroupFormat | None = None  # None: its numbers are stored plainly


class WeightReader(Protocol):
    """Single tensors of a checkpoint. CheckpointError for files that are damaged."""

    tensors: dict[str, StoredTensor]  # by name

    def read(self, name: str) -> torch.Tensor | GroupedWeight:
        """The tensor, on the CPU; in groups if it has them."""
        ...

    def read_into(self, name: str, place: torch.Tensor) -> None:
        """Copies a tensor without groups to a dense place of its shape, in the place's own dtype and on its device."""
        ...


class ComparableWeights(WeightReader, Protocol):
    """Is a `WeightReader` that also compares tensors as they are stored."""

    def are_equal(self, first: str, second: str) -> bool:
        """True if both tensors are stored alike; False for those that take scales or other tensors."""
        ...


class PlainWeights(ComparableWeights, Protocol):
    """Is a `ComparableWeights` whose tensors are read as they are stored, and which tells their types."""

    def read(self, name: str) -> torch.Tensor:
        """See `WeightReader`."""
        ...

    def dtype_of(self, name: str) -> torch.dtype:
        """Returns the type of the numbers that the tensor holds."""
        ...


class SafetensorsWeights:
    """A `WeightReader` over safetensors files."""

    def __init__(self, files: list[Path]) -> None:
        self._places: dict[str, TensorPlace] = {}
        for path in files:
            self._places |= read_places(path)
        self.tensors = {name: StoredTensor(place.shape) for name, place in self._places.items()}

    def dtype_of(self, name: str) -> torch.dtype:
        """Returns the type of the numbers that the tensor holds."""
        return self._places[name].dtype

    def read(self, name: str) -> torch.Tensor:
        place = self._places[name]
        with FileBytes(place.path) as file:
            return file.read(place.offset, place.num_bytes).view(place.dtype).view(place.shape)

    def read_into(self, name: str, place: torch.Tensor) -> None:
        """See `WeightReader`. Reads a piece at a time, which stays in a processor's cache until it is copied."""
        stored, flat = self._places[name], place.view(-1)
        check_dtype(name, stored.dtype)
        size = stored.dtype.itemsize
        piece = torch.empty(min(stored.num_bytes, _PIECE_BYTES), dtype=torch.uint8)
        with FileBytes(stored.path) as file:
            for begin in range(0, stored.num_bytes, _PIECE_BYTES):
                part = piece[: min(_PIECE_BYTES, stored.num_bytes - begin)]
                file.read_into(part, stored.offset + begin)
                flat[begin // size : (begin + len(part)) // size].copy_(part.view(stored.dtype))

    def read_rows(self, name: str, index: int, start: int, stop: int) -> torch.Tensor:
        """Reads rows of one of the matrices that are stacked in the tensor, which has three dimensions."""
        place = self._places[name]
        _, num_rows, num_columns = place.shape
        row_bytes = num_columns * place.dtype.itemsize
        with FileBytes(place.path) as file:
            read = file.read(place.offset + (index * num_rows + start) * row_bytes, (stop - start) * row_bytes)
        return read.view(place.dtype).view(stop - start, num_columns)

    def are_equal(self, first: str, second: str) -> bool:
        """True if both tensors have the same dtype, shape and bits, which those without rows or elements have not."""
        one, two = self._places[first], self._places[second]
        if (one.dtype, one.shape) != (two.dtype, two.shape) or not one.shape or 0 in one.shape:
            return False  # a tensor without elements may claim any number of rows
        return all(
            _are_same_bits(*(self.read_spans(name, 0, [(start, start + _ROWS_COMPARED)]) for name in (first, second)))
            for start in range(0, one.shape[0], _ROWS_COMPARED)
        )

    def read_spans(self, name: str, dim: int, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Reads spans of the first or second dimension, concatenated, and nothing else of the tensor.

        As in slices, what is beyond the end is left out.
        """
        place = self._places[name]
        spans = [(min(start, place.shape[dim]), min(stop, place.shape[dim])) for start, stop in spans]
        shape = list(place.shape)
        shape[dim] = sum(stop - start for start, stop in spans)
        step = math.prod(place.shape[dim + 1 :]) * place.dtype.itemsize  # bytes of one index of that dimension
        row_bytes = place.shape[dim] * step
        content = torch.empty(math.prod(shape) * place.dtype.itemsize, dtype=torch.uint8)
        end = 0
        with FileBytes(place.path) as file:
            for row in range(place.shape[0] if dim else 1):
                for start, stop in spans:
                    begin, end = end, end + (stop - start) * step
                    file.read_into(content[begin:end], place.offset + row * row_bytes + start * step)
        return content.view(place.dtype).view(shape)


def fill(name: str, place: torch.Tensor, read: torch.Tensor | GroupedWeight) -> None:
    """Copies what was read as a whole to its place. CheckpointError as for `check_dtype`."""
    assert isinstance(read, torch.Tensor), "those in groups have no place"
    check_dtype(name, read.dtype)
    place.copy_(read)


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """CheckpointError for numbers that are no weights, such as integers whose scales nobody knows."""
    if dtype not in _NUMBERS:
        held = str(dtype).removeprefix("torch.")
        raise CheckpointError(f"tensor {named(name)} holds {held}; weights must be bfloat16, float16 or float32")


def _are_same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), two.view(torch.uint8))
