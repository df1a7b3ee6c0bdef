"""Shows the stacked matrices of experts as one tensor for each expert, which is what the blocks ask for.

`experts.gate_up_proj` `[experts, 2 inner, hidden]` becomes `experts.0.gate_proj.weight` and so on. Some checkpoints
have inputs first, `[experts, hidden, 2 inner]`, and the shape of `down_proj` tells which. Only the bytes of an expert
that is asked for are read.
"""

from dataclasses import dataclass

import torch

from chairlift.errors import CheckpointError, named
from chairlift.models.blocks import StackedExperts
from chairlift.models.claims import MAX_EXPERTS
from chairlift.models.stored import SafetensorsWeights, StoredTensor, fill


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One expert's outputs of a stacked tensor, from `start` to `stop`."""

    stack: str
    expert: int
    start: int
    stop: int
    num_inputs: int
    has_inputs_first: bool


class StackedWeights:
    """A `WeightReader` over safetensors in which experts are stacked as the family does."""

    def __init__(self, files: SafetensorsWeights, names: StackedExperts) -> None:
        """CheckpointError for a stack that is none."""
        self._files = files
        self._matrices: dict[str, _Matrix] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for name, stored in files.tensors.items():
            if name.endswith(f".{names.within}{names.gate_up}"):
                self._unstack(name, name.removesuffix(names.gate_up), names, ("gate_proj", "up_proj"))
            elif name.endswith(f".{names.within}{names.down}"):
                self._unstack(name, name.removesuffix(names.down), names, ("down_proj",))
            else:
                self.tensors[name] = stored

    def _unstack(self, stack: str, prefix: str, names: StackedExperts, parts: tuple[str, ...]) -> None:
        shape, has_inputs_first = self._files.tensors[stack].shape, self._has_inputs_first(prefix, names)
        outputs, inputs = (2, 1) if has_inputs_first else (1, 2)  # dimensions
        if len(shape) != 3 or not 1 <= shape[0] <= MAX_EXPERTS or shape[outputs] % len(parts):
            raise CheckpointError(f"tensor {named(stack)} has shape {list(shape)}, which are no stacked matrices")
        length, num_inputs = shape[outputs] // len(parts), shape[inputs]
        for expert in range(shape[0]):
            for index, part in enumerate(parts):
                name, start = f"{prefix}{expert}.{part}.weight", index * length
                self.tensors[name] = StoredTensor((length, num_inputs))
                self._matrices[name] = _Matrix(stack, expert, start, start + length, num_inputs, has_inputs_first)

    def _has_inputs_first(self, prefix: str, names: StackedExperts) -> bool:
        """Tells the order by the two shapes of a layer, of which one order at most makes a gate, an up and a down."""
        parts = [self._files.tensors.get(f"{prefix}{part}") for part in (names.gate_up, names.down)]
        shapes = [part.shape for part in parts if part is not None]
        if [len(shape) for shape in shapes] != [3, 3]:
            return False
        (_, hidden, num_both), (_, inner, num_outputs) = shapes
        return (hidden, num_both) == (num_outputs, 2 * inner)

    def read(self, name: str) -> torch.Tensor:
        """See `WeightReader`."""
        if (matrix := self._matrices.get(name)) is None:
            return self._files.read(name)
        if matrix.has_inputs_first:
            whole = self._files.read_rows(matrix.stack, matrix.expert, 0, matrix.num_inputs)
            return whole[:, matrix.start : matrix.stop].T.contiguous()
        return self._files.read_rows(matrix.stack, matrix.expert, matrix.start, matrix.stop)

    def read_into(self, name: str, place: torch.Tensor) -> None:
        """See `WeightReader`."""
        if name in self._matrices:
            fill(name, place, self.read(name))
        else:
            self._files.read_into(name, place)
