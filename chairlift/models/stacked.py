"""Shows the stacked matrices of experts as one tensor for each expert, which is what the blocks ask for.

`experts.gate_up_proj` `[experts, 2 inner, hidden]` becomes `experts.0.gate_proj.weight` and so on. Only the bytes of a
matrix that is asked for are read.
"""

from dataclasses import dataclass

import torch

from chairlift.errors import CheckpointError, named
from chairlift.models.blocks import StackedExperts
from chairlift.models.claims import MAX_EXPERTS
from chairlift.models.stored import SafetensorsWeights, StoredTensor, fill


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One expert's rows of a stacked tensor."""

    stack: str
    expert: int
    start: int
    stop: int


class StackedWeights:
    """A `WeightReader` over safetensors in which experts are stacked as the family does."""

    def __init__(self, files: SafetensorsWeights, names: StackedExperts) -> None:
        """CheckpointError for a stack that is none."""
        self._files = files
        self._matrices: dict[str, _Matrix] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for name, stored in files.tensors.items():
            if name.endswith(f".{names.within}{names.gate_up}"):
                self._unstack(name, name.removesuffix(names.gate_up), stored.shape, ("gate_proj", "up_proj"))
            elif name.endswith(f".{names.within}{names.down}"):
                self._unstack(name, name.removesuffix(names.down), stored.shape, ("down_proj",))
            else:
                self.tensors[name] = stored

    def _unstack(self, stack: str, prefix: str, shape: tuple[int, ...], parts: tuple[str, ...]) -> None:
        if len(shape) != 3 or not 1 <= shape[0] <= MAX_EXPERTS or shape[1] % len(parts):
            raise CheckpointError(f"tensor {named(stack)} has shape {list(shape)}, which are no stacked matrices")
        num_experts, num_rows, num_inputs = shape
        length = num_rows // len(parts)
        for expert in range(num_experts):
            for index, part in enumerate(parts):
                name = f"{prefix}{expert}.{part}.weight"
                self.tensors[name] = StoredTensor((length, num_inputs))
                self._matrices[name] = _Matrix(stack, expert, index * length, (index + 1) * length)

    def read(self, name: str) -> torch.Tensor:
        """See `WeightReader`."""
        if (matrix := self._matrices.get(name)) is None:
            return self._files.read(name)
        return self._files.read_rows(matrix.stack, matrix.expert, matrix.start, matrix.stop)

    def read_into(self, name: str, place: torch.Tensor) -> None:
        """See `WeightReader`."""
        if name in self._matrices:
            fill(name, place, self.read(name))
        else:
            self._files.read_into(name, place)
