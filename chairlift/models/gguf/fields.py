"""Reads the metadata of a GGUF file, each number once, so that none is left that was not understood."""

import math
from typing import Any

import numpy as np

from chairlift.errors import CheckpointError, named, shown
from chairlift.models.gguf.header import GGUFFile

_MAX_SIZE = 2**24  # limit of every size of a model
_HARMLESS = {"rope.scaling.finetuned", "attention.causal", "tensor_data_layout", "pooling_type"}

Config = dict[str, Any]
"""Fields as a config.json has them."""


class Fields:
    """A file's metadata, and which of it was read: a number that was not read must not matter."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._prefix = f"{architecture}."
        self._rows = {name: info.shape[0] for name, info in file.tensors.items() if info.shape}
        self._endings = {name.split(".", 2)[2] for name in file.tensors if name.count(".") > 1}  # within a layer
        self._left = {name: value for name, value in file.metadata.items() if name.startswith(self._prefix)}

    def size(self, name: str, default: int | None = None) -> int:
        """A size or count. CheckpointError if it is none, or missing without a default."""
        value = self.any(name, default)
        if type(value) is not int or not 1 <= value <= _MAX_SIZE:
            raise CheckpointError(f"{self._prefix}{name} must be a number from 1 to {_MAX_SIZE}, not {shown(value)}")
        return value

    def count(self, name: str) -> int:
        """A count, which may be 0, or missing for 0. CheckpointError if it is none."""
        value = self.any(name, 0)
        if type(value) is not int or not 0 <= value <= _MAX_SIZE:
            raise CheckpointError(f"{self._prefix}{name} must be a number from 0 to {_MAX_SIZE}, not {shown(value)}")
        return value

    def counts(self, name: str, num_layers: int, default: int | None = None, *, may_differ: bool = False) -> list[int]:
        """A count by layer, which may be 0, or the same for all, unless they may differ.

        CheckpointError if it is neither, or always 0.
        """
        value = self.any(name, default)
        given = value.tolist() if isinstance(value, np.ndarray) else [value] * num_layers
        if len(given) != num_layers or not all(type(each) is int and 0 <= each <= _MAX_SIZE for each in given):
            raise CheckpointError(f"{self._prefix}{name} must be a count, or {num_layers} of them, not {shown(value)}")
        if len(set(given) - {0}) != 1 and not (may_differ and any(given)):
            raise CheckpointError(f"{self._prefix}{name} must be one count but for zeros, not {shown(value)}")
        return given

    def number(self, name: str, default: float | None = None) -> float:
        """Above 0. CheckpointError as above."""
        value = self.any(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise CheckpointError(f"{self._prefix}{name} must be a positive number, not {shown(value)}")
        return float(value)

    def has(self, name: str) -> bool:
        """Returns true if it is present, and not zero."""
        return _is_set(self._left.get(f"{self._prefix}{name}"))

    def rows_of(self, tensor: str, default: int | None = None) -> int:
        """Counts the rows of a tensor. CheckpointError if it is missing without a default."""
        rows = self._rows.get(tensor, default)
        if rows is None:
            raise CheckpointError(f"it lacks tensor {tensor}")
        return rows

    def has_tensor(self, name: str) -> bool:
        """Returns true if some layer has a tensor of that name."""
        return name in self._endings

    def text(self, name: str, default: str) -> str:
        value = self.any(name, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{self._prefix}{name} must be a text, not {shown(value)}")
        return value

    def refuse_leftover(self) -> None:
        """CheckpointError for a number that is set but was never read, and for attention that is not causal."""
        if self._left.get(f"{self._prefix}attention.causal") is False:
            raise CheckpointError(
                f"its {self._prefix}attention.causal is false, and only causal attention is supported"
            )
        for name, value in self._left.items():
            if name.removeprefix(self._prefix) not in _HARMLESS and _is_set(value):
                raise CheckpointError(f"its {named(name)} ({shown(value)}) is not supported")

    def peek(self, name: str) -> Any:
        """Returns what is there without having read it; None: nothing."""
        return self._left.get(f"{self._prefix}{name}")

    def any(self, name: str, default: Any) -> Any:
        value = self._left.pop(f"{self._prefix}{name}", default)
        if value is None:
            raise CheckpointError(f"it lacks {self._prefix}{name}")
        return value


def _is_set(value: object) -> bool:
    return bool(value.any() if isinstance(value, np.ndarray) else value)
