"""Weights as a checkpoint stores them, under the names of Hugging Face's checkpoints, whatever kind of file it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from chairlift.errors import CheckpointError
from chairlift.models.grouped import GroupedWeight

_ROWS_COMPARED = 4096


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """Describes how a matrix in groups is stored: enough to know its size before it is read."""

    num_bits: int
    group_size: int
    group_bytes: int  # of a group's scale and offset


@dataclass(frozen=True, slots=True)
class GroupedSize:
    """Counts the weights of a model that are kept in groups."""

    num_parameters: int
    num_bytes: int


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


class SafetensorsWeights:
    """A `WeightReader` over safetensors files.

    A file is mapped anew for each tensor: an open mapping keeps every page that was read, so that a model would be in
    memory twice while it is loaded.
    """

    def __init__(self, files: list[Path]) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self._files: dict[str, Path] = {}  # by name of the tensor
        for path in files:
            try:
                with safe_open(path, framework="pt") as file:
                    found = {name: StoredTensor(tuple(file.get_slice(name).get_shape())) for name in file.keys()}  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is damaged or truncated: {error}") from error
            self.tensors |= found
            self._files |= dict.fromkeys(found, path)

    def read(self, name: str) -> torch.Tensor:
        with safe_open(self._files[name], framework="pt") as handle:
            tensor: torch.Tensor = handle.get_tensor(name)
        return tensor

    def are_equal(self, first: str, second: str) -> bool:
        """True if both tensors have the same dtype, shape and bits, which those without rows or elements have not."""
        shape = self.tensors[first].shape
        if self.tensors[first] != self.tensors[second] or not shape or 0 in shape:
            return False  # a tensor without elements may claim any number of rows
        num_rows = shape[0]
        return all(
            _are_same_bits(*(self.read_spans(name, 0, [(start, start + _ROWS_COMPARED)]) for name in (first, second)))
            for start in range(0, num_rows, _ROWS_COMPARED)
        )

    def read_spans(self, name: str, dim: int, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Spans of the first or second dimension, concatenated; nothing else of the tensor is read."""
        with safe_open(self._files[name], framework="pt") as handle:
            whole = handle.get_slice(name)
            parts = [whole[start:stop] if dim == 0 else whole[:, start:stop] for start, stop in spans]
        return torch.cat(parts, dim)


def _are_same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.dtype == two.dtype and torch.equal(one.view(torch.uint8), two.view(torch.uint8))
