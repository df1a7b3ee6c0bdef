"""Reads safetensors whose matrices are float8 numbers (e4m3), with scales of matrices, rows or blocks.

    name.weight             float8 [out, in]
    name.weight_scale       one number, [out], [out, 1], or one of each block; or
    name.weight_scale_inv   likewise: an element is number * scale, whatever the name says

Scales are numbers, or exponents of 2 in a byte (E8M0), as those of 32 inputs in MXFP8. Scales of activations and of a
quantized cache are left out. Activations are quantized by the token if at all, and the cache has the model's dtype;
both lose less than one scale for all tokens.
"""

import math

import torch

from chairlift.errors import CheckpointError, named
from chairlift.models.grouped import GroupedWeight
from chairlift.models.quantization_config import Block, Float8
from chairlift.models.stored import GroupFormat, PlainWeights, StoredTensor, check_dtype

_WEIGHT = ".weight"
_SCALES = ("_scale_inv", "_scale")  # behind a matrix's name
_OF_ACTIVATIONS = ("input_scale", "input_scale_ub", "activation_scale")  # beside a matrix
_EXPONENTS = (torch.float8_e8m0fnu, torch.uint8)  # the format's own type, and its bytes
_OF_A_CACHE = (".k_scale", ".v_scale", ".kv_scale", ".k_proj.output_scale", ".v_proj.output_scale")


class Float8Weights:
    """A `WeightReader` over safetensors of which some matrices are float8 numbers."""

    def __init__(self, files: PlainWeights, stated: Float8) -> None:
        """CheckpointError for a matrix without scales, or with scales of a wrong shape."""
        self._files = files
        matrices = [name for name in files.tensors if self._is_matrix(name)]
        self._scales = {name: self._find_scales(name) for name in matrices}
        self._blocks = {name: self._find_block(name, stated.block) for name in matrices}
        needless = set(self._scales.values())
        for name in matrices:
            needless |= {f"{name.removesuffix('weight')}{part}" for part in _OF_ACTIVATIONS}
        self.tensors = {
            name: stored
            for name, stored in files.tensors.items()
            if name not in needless and not name.endswith(_OF_A_CACHE)
        }
        for name in matrices:
            shape = files.tensors[name].shape
            group_size = math.gcd(self._blocks[name].num_inputs, shape[1])
            self.tensors[name] = StoredTensor(shape, GroupFormat(8, group_size, 4, is_float=True))

    def _is_matrix(self, name: str) -> bool:
        is_weight = name.endswith(_WEIGHT) and len(self._files.tensors[name].shape) == 2
        return is_weight and self._files.dtype_of(name) is torch.float8_e4m3fn

    def _find_scales(self, name: str) -> str:
        scales = next((f"{name}{each}" for each in _SCALES if f"{name}{each}" in self._files.tensors), None)
        if scales is None:
            raise CheckpointError(f"the checkpoint lacks the scales of {named(name)}, which holds float8 numbers")
        return scales

    def _find_block(self, name: str, stated: Block | None) -> Block:
        """Tells what shares a scale by the shape of all scales."""
        num_outputs, num_inputs = self._files.tensors[name].shape
        shape = _without_ones(self._files.tensors[self._scales[name]].shape)
        if math.prod(shape) == 1:
            return Block(num_outputs, num_inputs)
        if stated is None and shape in ((num_outputs,), (num_outputs, 1)):
            return Block(1, num_inputs)
        if stated is not None and shape == (-(-num_outputs // stated.num_outputs), -(-num_inputs // stated.num_inputs)):
            return Block(stated.num_outputs, min(stated.num_inputs, num_inputs))
        blocks = "rows" if stated is None else f"blocks of {stated.num_outputs} x {stated.num_inputs}"
        raise CheckpointError(
            f"tensor {named(name)} has shape {[num_outputs, num_inputs]} and scales of shape {list(shape)}, which are"
            f" not one for each of its {blocks}"
        )

    def are_equal(self, first: str, second: str) -> bool:
        """As in plain files. Matrices with scales count as different from all others."""
        return not {first, second} & self._scales.keys() and self._files.are_equal(first, second)

    def read(self, name: str) -> torch.Tensor | GroupedWeight:
        """CheckpointError for scales that are no numbers."""
        if name not in self._scales:
            return self._files.read(name)
        values, block = self._files.read(name), self._blocks[name]
        scales = self._read_scales(self._scales[name])
        num_outputs, num_inputs = values.shape
        grid = scales.view(-(-num_outputs // block.num_outputs), -(-num_inputs // block.num_inputs))
        group_size = math.gcd(block.num_inputs, num_inputs)
        of_rows = grid.repeat_interleave(block.num_outputs, dim=0)[:num_outputs]
        of_groups = of_rows.repeat_interleave(block.num_inputs // group_size, dim=1)[:, : num_inputs // group_size]
        return GroupedWeight(8, values, of_groups.contiguous())

    def _read_scales(self, name: str) -> torch.Tensor:
        """float32, in the stored shape."""
        stored = self._files.read(name)
        if stored.dtype in _EXPONENTS:
            return stored.view(torch.float8_e8m0fnu).float()
        check_dtype(name, stored.dtype)
        return stored.float()

    def read_into(self, name: str, place: torch.Tensor) -> None:
        """See `WeightReader`."""
        self._files.read_into(name, place)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns `[n, m]` for the `[n, 1, m, 1]` in which modelopt has the scales of blocks, and else the shape."""
    return shape[::2] if len(shape) == 4 and shape[1::2] == (1, 1) else shape
