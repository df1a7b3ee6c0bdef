"""Shows the experts of gpt-oss as one tensor for each expert, which is what the blocks ask for.

In a stack of both, gate and up alternate. In plain numbers matrices are transposed; in MXFP4 they are not:

    gate_up_proj           [experts, hidden, 2 inner]
    gate_up_proj_blocks    [experts, 2 inner, groups, 16]: two values of 4 bits in a byte, the first in the low half
    gate_up_proj_scales    [experts, 2 inner, groups]: exponents of 2
    gate_up_proj_bias      [experts, 2 inner]

and likewise `down_proj`, of which every row is an output of the same matrix.
"""

from dataclasses import dataclass

import torch

from chairlift.errors import CheckpointError, named
from chairlift.models import mxfp4
from chairlift.models.blocks import AlternatingExperts
from chairlift.models.claims import MAX_EXPERTS
from chairlift.models.grouped import POWERS_OF_TWO, GroupedWeight
from chairlift.models.stored import GroupFormat, SafetensorsWeights, StoredTensor, fill

_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_PLAIN, _BLOCKS, _SCALES, _BIAS = "", "_blocks", "_scales", "_bias"
_DIMENSIONS = {_PLAIN: 3, _BLOCKS: 4, _BIAS: 2}
_BYTES_OF_A_GROUP = mxfp4.GROUP_SIZE // 2
_FORMAT = GroupFormat(4, mxfp4.GROUP_SIZE, POWERS_OF_TWO.itemsize, has_table=True)


@dataclass(frozen=True, slots=True)
class _Slice:
    """Every so manieth output of one expert."""

    stack: str
    kind: str
    expert: int
    first: int
    step: int


class AlternatingWeights:
    """A `WeightReader` over safetensors of a gpt-oss."""

    def __init__(self, files: SafetensorsWeights, names: AlternatingExperts) -> None:
        """CheckpointError for a stack that is none."""
        self._files = files
        self._slices: dict[str, _Slice] = {}
        self.tensors: dict[str, StoredTensor] = {}
        endings = {
            f".{names.within}{stack}{kind}": (stack, kind)
            for stack in _PARTS
            for kind in (_PLAIN, _BLOCKS, _SCALES, _BIAS)
        }
        for name, stored in files.tensors.items():
            ending = next((each for each in endings if name.endswith(each)), None)
            if ending is None:
                self.tensors[name] = stored
            elif endings[ending][1] != _SCALES:
                stack, kind = endings[ending]
                self._unstack(name, name.removesuffix(f"{stack}{kind}"), stored.shape, _PARTS[stack], kind)

    def _unstack(self, stack: str, prefix: str, shape: tuple[int, ...], parts: tuple[str, ...], kind: str) -> None:
        is_stack = len(shape) == _DIMENSIONS[kind] and 1 <= shape[0] <= MAX_EXPERTS
        num_outputs = shape[2 if kind == _PLAIN else 1] if is_stack else 0
        if num_outputs % len(parts) or not is_stack or (kind == _BLOCKS and shape[3] != _BYTES_OF_A_GROUP):
            raise CheckpointError(f"tensor {named(stack)} has shape {list(shape)}, which are no stacked matrices")
        if kind == _BLOCKS:
            scales, given = f"{stack.removesuffix(_BLOCKS)}{_SCALES}", self._files.tensors
            if scales not in given or given[scales].shape != shape[:3]:
                raise CheckpointError(f"tensor {named(stack)} has no scales {named(scales)} of its shape")
        rows = num_outputs // len(parts)
        columns = {_PLAIN: shape[1:2], _BLOCKS: (shape[2] * mxfp4.GROUP_SIZE,) if kind == _BLOCKS else (), _BIAS: ()}
        stored = StoredTensor((rows, *columns[kind]), _FORMAT if kind == _BLOCKS else None)
        for expert in range(shape[0]):
            for index, part in enumerate(parts):
                name = f"{prefix}{expert}.{part}.{'bias' if kind == _BIAS else 'weight'}"
                self.tensors[name] = stored
                self._slices[name] = _Slice(stack, kind, expert, index, len(parts))

    def read(self, name: str) -> torch.Tensor | GroupedWeight:
        """See `WeightReader`."""
        if (own := self._slices.get(name)) is None:
            return self._files.read(name)
        read = self._one(own.stack, own.expert)
        if own.kind == _PLAIN:
            return read[:, own.first :: own.step].T
        if own.kind == _BIAS:
            return read[own.first :: own.step]
        blocks = read[own.first :: own.step]
        exponents = self._one(f"{own.stack.removesuffix(_BLOCKS)}{_SCALES}", own.expert)[own.first :: own.step]
        if blocks.dtype != torch.uint8 or exponents.dtype != torch.uint8:
            raise CheckpointError(f"tensor {named(own.stack)} must be bytes, as its scales")
        return GroupedWeight(4, blocks.flatten(1), mxfp4.scales_of(exponents), table=mxfp4.TABLE)

    def read_into(self, name: str, place: torch.Tensor) -> None:
        """See `WeightReader`."""
        if name in self._slices:
            fill(name, place, self.read(name))
        else:
            self._files.read_into(name, place)

    def _one(self, stack: str, expert: int) -> torch.Tensor:
        return self._files.read_spans(stack, 0, [(expert, expert + 1)])[0]
