"""Reads compressed safetensors: their matrices of 4 or 8 bits become weights in groups.

Their makers document the formats:
compressed-tensors, "pack-quantized": https://github.com/vllm-project/compressed-tensors
AWQ, "gemm": https://github.com/casper-hansen/AutoAWQ
GPTQ: https://github.com/ModelCloud/GPTQModel
All pack unsigned values into words of 32 bits, the lowest bits first; they differ in what is packed, and in the order.
"""

from dataclasses import dataclass
from typing import Any

import torch

from chairlift.errors import CheckpointError, named, shown
from chairlift.models.grouped import GroupedWeight
from chairlift.models.stored import GroupFormat, SafetensorsWeights, StoredTensor

_BITS = (4, 8)
_GROUP_SIZES = (32, 64, 128)
_SPREAD_OVER = 128  # inputs; a whole row's scale is repeated for each 128, or for 64 or 32 where 128 does not fit
_TOLD_BY_NAMES = "mxfp4"  # of the experts' tensors, which `alternating` reads
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word each of 8 neighbours is
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Compression:
    """Describes compressed matrices as a config.json does."""

    method: str
    num_bits: int
    zero_shift: int = 0  # is added to a stored zero point


def read_compression(raw: dict[str, Any]) -> Compression | None:
    """From a config.json; None if weights are as they are. CheckpointError names what cannot be read."""
    stated = raw.get("quantization_config") or raw.get("compression_config")
    if not stated:
        return None
    if not isinstance(stated, dict):
        raise CheckpointError(f"quantization_config must be an object, not {shown(stated)}")
    method = stated.get("quant_method", "an unnamed method")
    if method == _TOLD_BY_NAMES:
        return None
    if method not in _READERS_OF_CONFIGS:
        raise _unreadable(f"quantized with {named(method)}")
    return _READERS_OF_CONFIGS[method](stated)


def _read_compressed_tensors(stated: dict[str, Any]) -> Compression:
    if (layout := stated.get("format")) != "pack-quantized":
        raise _unreadable(f"compressed-tensors in the format {named(layout)}")
    if stated.get("kv_cache_scheme") or (stated.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _unreadable("compressed-tensors with a sparse format or a quantized cache")
    found = set()
    for group in (stated.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        if group.get("input_activations") or group.get("output_activations"):
            raise _unreadable("compressed-tensors with quantized activations")
        if weights.get("type", "int") != "int" or weights.get("strategy") not in ("group", "channel"):
            raise _unreadable(
                f"compressed-tensors of {named(weights.get('type'))} values by {named(weights.get('strategy'))}"
            )
        if weights.get("actorder") in ("group", True):
            raise _unreadable("compressed-tensors in the order of activations (actorder)")
        found.add((weights.get("num_bits"), weights.get("group_size") or -1))
    if len(found) != 1:
        raise _unreadable(f"compressed-tensors in {len(found)} formats at once")
    ((num_bits, group_size),) = found
    return Compression("compressed-tensors", _checked(num_bits, group_size))


def _read_awq(stated: dict[str, Any]) -> Compression:
    if (version := str(stated.get("version", "gemm")).lower()) != "gemm":
        raise _unreadable(f"AWQ in the version {named(version)}")
    num_bits = stated.get("bits", stated.get("w_bit"))
    if num_bits != 4:
        raise _unreadable(f"AWQ in {named(num_bits)} bits")
    return Compression("awq", _checked(num_bits, stated.get("group_size", stated.get("q_group_size"))))


def _read_gptq(stated: dict[str, Any]) -> Compression:
    layout = stated.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise _unreadable(f"GPTQ in the format {named(layout)}")
    # The layout "gptq" stores zero points minus one.
    return Compression("gptq", _checked(stated.get("bits"), stated.get("group_size")), int(layout == "gptq"))


_READERS_OF_CONFIGS = {"compressed-tensors": _read_compressed_tensors, "awq": _read_awq, "gptq": _read_gptq}


def _checked(num_bits: object, group_size: object) -> int:
    if type(num_bits) is not int or num_bits not in _BITS or group_size not in (*_GROUP_SIZES, -1):
        raise _unreadable(f"values of {named(num_bits)} bits in groups of {named(group_size)}")
    return num_bits


def _unreadable(what: str) -> CheckpointError:
    return CheckpointError(
        f"its weights are {what}, which cannot be read; choose a checkpoint of 4 or 8 bits in groups of 32, 64 or 128"
        " (pack-quantized, AWQ gemm or GPTQ), or one in bfloat16, float16 or float32"
    )


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

    def __init__(self, files: SafetensorsWeights, compression: Compression) -> None:
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
            raise _unreadable("GPTQ in the order of activations (act-order, desc_act)")

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


def _awq_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """int32 `[n, m]` -> uint8 `[n, 8 m]`"""
    stored = packed.contiguous().view(torch.uint8)
    nibbles = torch.stack((stored & 15, stored >> 4), dim=-1).view(len(packed), -1, 8)
    return nibbles[:, :, _AWQ_ORDER].flatten(1)
