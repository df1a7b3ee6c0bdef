"""Reads compressed safetensors: their matrices of 4 or 8 bits become weights in groups.

Their makers document the formats:
compressed-tensors, "pack-quantized": https://github.com/vllm-project/compressed-tensors
AWQ, "gemm": https://github.com/casper-hansen/AutoAWQ
GPTQ: https://github.com/ModelCloud/GPTQModel
All pack unsigned values into words of 32 bits, the lowest bits first; they differ in what is packed, and in the order.
"""

from dataclasses import dataclass

import torch

from chairlift.errors import CheckpointError, named
from chairlift.models.float8 import Float8Weights
from chairlift.models.grouped import GroupedWeight
from chairlift.models.quantization_config import Compression, Float8, Stated, unreadable
from chairlift.models.stored import ComparableWeights, GroupFormat, PlainWeights, StoredTensor

_SPREAD_OVER = 128  # inputs; a whole row's scale is repeated for each 128, or for 64 or 32 where 128 does not fit
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word each of 8 neighbours is
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Layout:
    """The tensors that represent a matrix `name.weight`."""

    packed: str
    scales: str
    zeros: str
    others: tuple[str, ...] = ()
    is_transposed: bool = False  # inputs come first


_LAYOUTS = {
    "compressed-tensors": _Layout("weight_packed", "weight_scale", "weight_zero_point", ("weight_shape",)),
    "awq": _Layout("qweight", "scales", "qzeros", is_transposed=True),
    "gptq": _Layout("qweight", "scales", "qzeros", ("g_idx",), is_transposed=True),
}


class CompressedWeights:
    """A `WeightReader` over safetensors of which some matrices are compressed."""

    def __init__(self, files: PlainWeights, compression: Compression) -> None:
        self._files, self._compression = files, compression
        self._layout = layout = _LAYOUTS[compression.method]
        ending = f".{layout.packed}"
        self._matrices = {  # by the name of the weight
            f"{name.removesuffix(ending)}.weight": name.removesuffix(ending)
            for name in files.tensors
            if name.endswith(ending)
        }
        parts = (layout.packed, layout.scales, layout.zeros, *layout.others)
        consumed = {f"{base}.{part}" for base in self._matrices.values() for part in parts}
        for base in self._matrices.values():
            if f"{base}.{layout.scales}" not in files.tensors:
                raise CheckpointError(f"the checkpoint lacks {named(base)}.{layout.scales}")
        self.tensors = {name: each for name, each in files.tensors.items() if name not in consumed}
        self.tensors |= {name: StoredTensor(self._shape_of(name), self._format_of(name)) for name in self._matrices}

    def _shape_of(self, name: str) -> tuple[int, int]:
        rows, columns = self._part_shape(name, self._layout.packed)
        per_word = 32 // self._compression.num_bits
        if self._compression.method == "awq":
            return columns * per_word, rows
        return (columns, rows * per_word) if self._layout.is_transposed else (rows, columns * per_word)

    def _format_of(self, name: str) -> GroupFormat:
        num_bits, num_inputs = self._compression.num_bits, self._shape_of(name)[1]
        num_groups = self._part_shape(name, self._layout.scales)[0 if self._layout.is_transposed else 1]
        if num_groups < 1 or num_inputs % num_groups:
            raise CheckpointError(
                f"tensor {named(name)} has {num_inputs} inputs, which do not make {num_groups} groups"
            )
        size = num_inputs // num_groups
        if num_groups == 1:
            size = next((each for each in (_SPREAD_OVER, 64, 32) if num_inputs % each == 0), size)
        has_offsets = num_bits == 4 or f"{self._matrices[name]}.{self._layout.zeros}" in self._files.tensors
        return GroupFormat(num_bits, size, _SCALE_BYTES, has_offsets)

    def are_equal(self, first: str, second: str) -> bool:
        """As in plain files. Matrices in groups count as different from all others."""
        return not {first, second} & self._matrices.keys() and self._files.are_equal(first, second)

    def read(self, name: str) -> torch.Tensor | GroupedWeight:
        """CheckpointError for parts that do not match, and for GPTQ's act-order."""
        stored = self.tensors[name]
        if stored.groups is None:
            return self._files.read(name)
        values, zeros = self._values(name), self._zeros(name)
        scales = self._part(name, self._layout.scales).float()
        scales = scales.T if self._layout.is_transposed else scales
        if scales.shape[0] != len(values) or (zeros is not None and zeros.shape != scales.shape):
            raise CheckpointError(f"tensor {named(name)} and its scales have shapes that do not fit each other")
        if stored.groups.num_bits == 8:
            values = (values ^ 128).view(torch.int8)
            zeros = None if zeros is None else zeros - 128
        elif zeros is None:
            zeros = torch.full_like(scales, 8)
        num_times = stored.shape[1] // stored.groups.group_size // scales.shape[1]  # more than 1: a scale of a row
        offsets = None if zeros is None else (-scales * zeros).repeat_interleave(num_times, dim=1)
        return GroupedWeight(stored.groups.num_bits, values, scales.repeat_interleave(num_times, dim=1), offsets)

    def read_into(self, name: str, place: torch.Tensor) -> None:
        """See `WeightReader`."""
        self._files.read_into(name, place)

    def _values(self, name: str) -> torch.Tensor:
        """uint8 `[out, in]`, or `[out, in / 2]` with 4 bits: the first of two neighbours is in the low half."""
        packed = self._part(name, self._layout.packed)
        if self._compression.method == "awq":
            nibbles = _awq_nibbles(packed).T
            return nibbles[:, ::2] | nibbles[:, 1::2] << 4
        if self._compression.method == "gptq":
            self._refuse_act_order(name)
        return (packed.T if self._layout.is_transposed else packed).contiguous().view(torch.uint8)

    def _zeros(self, name: str) -> torch.Tensor | None:
        """float32 `[out, groups]`: the unsigned value that represents zero; None if it is the middle one."""
        if f"{self._matrices[name]}.{self._layout.zeros}" not in self._files.tensors:
            return None
        packed = self._part(name, self._layout.zeros)
        if self._compression.method == "awq":
            return _awq_nibbles(packed).T.float()
        # In both formats, neighbours in a word are outputs.
        words = (packed if self._layout.is_transposed else packed.T).contiguous().view(torch.uint8)
        num_bits = self._compression.num_bits
        zeros = words if num_bits == 8 else torch.stack((words & 15, words >> 4), dim=-1).flatten(1)
        shifted: torch.Tensor = zeros + self._compression.zero_shift & 2**num_bits - 1
        return shifted.T.float()

    def _refuse_act_order(self, name: str) -> None:
        order = f"{self._matrices[name]}.g_idx"
        if order not in self._files.tensors:
            return
        num_inputs, num_groups = self.tensors[name].shape[1], self._part_shape(name, self._layout.scales)[0]
        if not torch.equal(self._files.read(order).long(), torch.arange(num_inputs) // (num_inputs // num_groups)):
            raise unreadable("GPTQ in the order of activations (act-order, desc_act)")

    def _part(self, name: str, part: str) -> torch.Tensor:
        tensor = self._files.read(f"{self._matrices[name]}.{part}")
        is_packed = part != self._layout.scales
        if tensor.dim() != 2 or is_packed != (tensor.dtype == torch.int32):
            raise CheckpointError(f"tensor {named(self._matrices[name])}.{part} is {tensor.dtype} {list(tensor.shape)}")
        return tensor

    def _part_shape(self, name: str, part: str) -> tuple[int, int]:
        stated = f"{self._matrices[name]}.{part}"
        shape = self._files.tensors[stated].shape
        if len(shape) != 2:
            raise CheckpointError(f"tensor {named(stated)} has {len(shape)} dimensions, not 2")
        return shape[0], shape[1]


def open_compressed(files: PlainWeights, stated: Stated) -> ComparableWeights:
    """Opens files of which some matrices are as a config.json says. CheckpointError if they are not."""
    return Float8Weights(files, stated) if isinstance(stated, Float8) else CompressedWeights(files, stated)


def _awq_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """int32 `[n, m]` -> uint8 `[n, 8 m]`"""
    stored = packed.contiguous().view(torch.uint8)
    nibbles = torch.stack((stored & 15, stored >> 4), dim=-1).view(len(packed), -1, 8)
    return nibbles[:, :, _AWQ_ORDER].flatten(1)
