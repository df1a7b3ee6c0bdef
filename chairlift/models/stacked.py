"""Shows the stacked matrices of experts as one tensor for each expert, which is what the blocks ask for.

`experts.gate_up_proj` `[experts, 2 inner, hidden]` becomes `experts.0.gate_proj.weight` and so on. Some checkpoints
have inputs first, `[experts, hidden, 2 inner]`, and the shape of `down_proj` tells which. Only the bytes of an expert
that is asked for are read.

Stacks of float8 numbers have stacks of scales beside them, such as `experts.gate_up_proj_scale_inv`: one for each block
of each expert, with inputs first where the matrices have them so, one for each expert, or one for all.
"""

import math
from dataclasses import dataclass

import torch

from chairlift.errors import CheckpointError, named
from chairlift.models.blocks import StackedExperts
from chairlift.models.claims import MAX_EXPERTS
from chairlift.models.quantization_config import Block
from chairlift.models.stored import SafetensorsWeights, StoredTensor, fill

_WEIGHT = "weight"
_LEAVES = {  # what follows the name of a stack, and what the tensors of an expert are called
    "": _WEIGHT,
    "_scale_inv": "weight_scale_inv",
    "_scale": "weight_scale",
    "_activation_scale": "activation_scale",
    "_input_scale": "input_scale",
}
_ONE = (1,)  # the shape of a scale of a whole matrix


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One expert's outputs of a stacked tensor, from `start` to `stop`."""

    stack: str
    expert: int
    start: int
    stop: int
    num_inputs: int
    has_inputs_first: bool


@dataclass(frozen=True, slots=True)
class _Number:
    """One number of a tensor, which has one for each expert, or for all."""

    stack: str
    index: int


@dataclass(frozen=True, slots=True)
class _Stack:
    """A tensor of all experts of a layer."""

    name: str
    base: str  # the name of the matrices, without what follows in those of their scales
    prefix: str  # of the experts' tensors
    parts: tuple[str, ...]  # that stand one after the other among the outputs
    leaf: str


class StackedWeights:
    """A `PlainWeights` over safetensors in which experts are stacked as the family does."""

    def __init__(self, files: SafetensorsWeights, names: StackedExperts, block: Block | None = None) -> None:
        """CheckpointError for a stack that is none. `block`: what shares a scale, where it is stated."""
        self._files, self._block = files, block
        self._own: dict[str, _Matrix | _Number] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for name, stored in files.tensors.items():
            if (stack := _find_stack(name, names)) is None:
                self.tensors[name] = stored
            elif stack.leaf == _WEIGHT:
                self._unstack(stack, self._has_inputs_first(stack.prefix, names))
            else:
                self._unstack_scales(stack, self._has_inputs_first(stack.prefix, names))

    def _unstack(self, stack: _Stack, has_inputs_first: bool) -> None:
        shape = self._files.tensors[stack.name].shape
        outputs, inputs = (2, 1) if has_inputs_first else (1, 2)  # dimensions
        if len(shape) != 3 or not 1 <= shape[0] <= MAX_EXPERTS or shape[outputs] % len(stack.parts):
            raise CheckpointError(f"tensor {named(stack.name)} has shape {list(shape)}, which are no stacked matrices")
        length, num_inputs = shape[outputs] // len(stack.parts), shape[inputs]
        for expert in range(shape[0]):
            for index, part in enumerate(stack.parts):
                name, start = f"{stack.prefix}{expert}.{part}.{stack.leaf}", index * length
                self.tensors[name] = StoredTensor((length, num_inputs))
                self._own[name] = _Matrix(stack.name, expert, start, start + length, num_inputs, has_inputs_first)

    def _unstack_scales(self, stack: _Stack, has_inputs_first: bool) -> None:
        """CheckpointError for scales without matrices, and for blocks that have outputs of two parts."""
        matrices, shape = self._files.tensors.get(stack.base), self._files.tensors[stack.name].shape
        if matrices is None or len(matrices.shape) != 3 or matrices.shape[0] > MAX_EXPERTS:
            raise CheckpointError(f"tensor {named(stack.name)} stands beside no stacked matrices")
        num_experts, num_numbers = matrices.shape[0], math.prod(shape)
        if num_numbers not in (1, num_experts):
            length = matrices.shape[2 if has_inputs_first else 1] // len(stack.parts)
            if self._block is not None and len(stack.parts) > 1 and length % self._block.num_outputs:
                raise CheckpointError(
                    f"a scale of {named(stack.name)} is of outputs of both {' and '.join(stack.parts)}"
                )
            self._unstack(stack, has_inputs_first)
            return
        for expert in range(num_experts):
            for part in stack.parts:
                name = f"{stack.prefix}{expert}.{part}.{stack.leaf}"
                self.tensors[name] = StoredTensor(_ONE)
                self._own[name] = _Number(stack.name, expert if num_numbers > 1 else 0)

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
        match self._own.get(name):
            case None:
                return self._files.read(name)
            case _Number(stack, index):
                return self._files.read(stack).flatten()[index : index + 1]
            case matrix if matrix.has_inputs_first:
                whole = self._files.read_rows(matrix.stack, matrix.expert, 0, matrix.num_inputs)
                return whole[:, matrix.start : matrix.stop].T.contiguous()
            case matrix:
                return self._files.read_rows(matrix.stack, matrix.expert, matrix.start, matrix.stop)

    def read_into(self, name: str, place: torch.Tensor) -> None:
        """See `WeightReader`."""
        if name in self._own:
            fill(name, place, self.read(name))
        else:
            self._files.read_into(name, place)

    def are_equal(self, first: str, second: str) -> bool:
        """As in plain files. Parts of stacks count as different from all others."""
        return not {first, second} & self._own.keys() and self._files.are_equal(first, second)

    def dtype_of(self, name: str) -> torch.dtype:
        """Returns the type of the numbers that the tensor, or its stack, holds."""
        own = self._own.get(name)
        return self._files.dtype_of(name if own is None else own.stack)


def _find_stack(name: str, names: StackedExperts) -> _Stack | None:
    """Returns None for a tensor that is no stack."""
    for base, parts in ((names.gate_up, ("gate_proj", "up_proj")), (names.down, ("down_proj",))):
        for ending, leaf in _LEAVES.items():
            if name.endswith(f".{names.within}{base}{ending}"):
                return _Stack(name, name.removesuffix(ending), name.removesuffix(f"{base}{ending}"), parts, leaf)
    return None
