"""Weights as a checkpoint stores them, under the names of Hugging Face's checkpoints, whatever kind of file it is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from chairlift.errors import CheckpointError
from chairlift.models.grouped import GroupedWeight


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """How a matrix in groups is kept: enough to know its size before it is read."""

    num_bits: int
    group_size: int
    group_bytes: int  # of a group's scale and offset


@dataclass(frozen=True, slots=True)
class GroupedSize:
    """What of a model's weights is kept in groups."""

    num_parameters: int
    num_bytes: int


class WeightReader(Protocol):
    """Single tensors of a checkpoint. CheckpointError for files that are damaged."""

    @property
    def names(self) -> set[str]: ...

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Without reading the tensor. KeyError if there is none of that name, as from the other two."""
        ...

    def format_of(self, name: str) -> GroupFormat | None:
        """None: its numbers are as they are."""
        ...

    def read(self, name: str) -> torch.Tensor | GroupedWeight:
        """The tensor, on the CPU; in groups if it has a format."""
        ...


class SafetensorsWeights:
    """A `WeightReader` over safetensors files.

    A file is mapped anew for each tensor: an open mapping keeps every page that was read, so that a model would be in
    memory twice while it is loaded.
    """

    def __init__(self, files: list[Path]) -> None:
        self._files: dict[str, Path] = {}  # tensor name -> its file
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in files:
            try:
                with safe_open(path, framework="pt") as handle:
                    shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is damaged or truncated: {error}") from error
            self._files.update(dict.fromkeys(shapes, path))
            self._shapes |= shapes

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """See `WeightReader`."""
        return self._shapes[name]

    def format_of(self, name: str) -> GroupFormat | None:
        """See `WeightReader`: safetensors have numbers as they are."""
        _ = self._files[name]
        return None

    def read(self, name: str) -> torch.Tensor:
        """See `WeightReader`."""
        with safe_open(self._files[name], framework="pt") as handle:
            tensor: torch.Tensor = handle.get_tensor(name)
        return tensor
