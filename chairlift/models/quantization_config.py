"""Reads what a config.json says of quantized weights, and refuses by name what cannot be read.

Integers of 4 or 8 bits are packed by compressed-tensors, AWQ and GPTQ (`compressed`). Float8 numbers (e4m3) come with
scales of tensors, rows or blocks (`float8`), under the names of several tools:
fp8: https://huggingface.co/docs/transformers/quantization/finegrained_fp8
fbgemm_fp8: https://huggingface.co/docs/transformers/quantization/fbgemm_fp8
compressed-tensors, "float-quantized" and "mxfp8-quantized": https://github.com/vllm-project/compressed-tensors
modelopt: https://github.com/NVIDIA/Model-Optimizer
"""

from dataclasses import dataclass
from typing import Any

from chairlift.errors import CheckpointError, named, shown

_BITS = (4, 8)
_GROUP_SIZES = (32, 64, 128)
_TOLD_BY_NAMES = "mxfp4"  # of the experts' tensors, which `alternating` reads
_FLOAT8_FORMATS = ("float-quantized", "naive-quantized", "mxfp8-quantized")


@dataclass(frozen=True, slots=True)
class Compression:
    """Describes matrices of packed integers as a config.json does."""

    method: str
    num_bits: int
    zero_shift: int = 0  # is added to a stored zero point


@dataclass(frozen=True, slots=True)
class Block:
    """Counts the outputs and inputs of a matrix that share a scale."""

    num_outputs: int
    num_inputs: int


@dataclass(frozen=True, slots=True)
class Float8:
    """Describes matrices of float8 numbers as a config.json does."""

    block: Block | None  # None: a scale is of a row, or of the whole matrix


_MODELOPT: dict[object, Block | None] = {
    "FP8": None,
    "FP8_PER_CHANNEL_PER_TOKEN": None,
    "FP8_PB_WO": Block(128, 128),
    "MXFP8": Block(1, 32),
}


Stated = Compression | Float8
"""Any of the formats that a config.json states."""


def read_compression(raw: dict[str, Any]) -> Stated | None:
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
        raise unreadable(f"quantized with {named(method)}")
    return _READERS_OF_CONFIGS[method](stated)


def _read_compressed_tensors(stated: dict[str, Any]) -> Stated:
    if stated.get("format") in _FLOAT8_FORMATS:
        return _read_float_quantized(stated)
    if (layout := stated.get("format")) != "pack-quantized":
        raise unreadable(f"compressed-tensors in the format {named(layout)}")
    if stated.get("kv_cache_scheme") or (stated.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise unreadable("compressed-tensors with a sparse format or a quantized cache")
    found = set()
    for group in (stated.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        if group.get("input_activations") or group.get("output_activations"):
            raise unreadable("compressed-tensors with quantized activations")
        if weights.get("type", "int") != "int" or weights.get("strategy") not in ("group", "channel"):
            raise unreadable(
                f"compressed-tensors of {named(weights.get('type'))} values by {named(weights.get('strategy'))}"
            )
        if weights.get("actorder") in ("group", True):
            raise unreadable("compressed-tensors in the order of activations (actorder)")
        found.add((weights.get("num_bits"), weights.get("group_size") or -1))
    if len(found) != 1:
        raise unreadable(f"compressed-tensors in {len(found)} formats at once")
    ((num_bits, group_size),) = found
    return Compression("compressed-tensors", _checked(num_bits, group_size))


def _read_awq(stated: dict[str, Any]) -> Compression:
    if (version := str(stated.get("version", "gemm")).lower()) != "gemm":
        raise unreadable(f"AWQ in the version {named(version)}")
    num_bits = stated.get("bits", stated.get("w_bit"))
    if num_bits != 4:
        raise unreadable(f"AWQ in {named(num_bits)} bits")
    return Compression("awq", _checked(num_bits, stated.get("group_size", stated.get("q_group_size"))))


def _read_gptq(stated: dict[str, Any]) -> Compression:
    layout = stated.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise unreadable(f"GPTQ in the format {named(layout)}")
    # The layout "gptq" stores zero points minus one.
    return Compression("gptq", _checked(stated.get("bits"), stated.get("group_size")), int(layout == "gptq"))


def _read_float_quantized(stated: dict[str, Any]) -> Float8:
    if (stated.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise unreadable("compressed-tensors with a sparse format")
    blocks = set()
    for group in (stated.get("config_groups") or {}).values():
        weights, activations = group.get("weights") or {}, group.get("input_activations") or {}
        for what in (weights, {**weights, **activations}):
            if what.get("type") != "float" or what.get("num_bits") != 8:
                raise unreadable(
                    f"compressed-tensors of {named(what.get('num_bits'))} bits and type {named(what.get('type'))}"
                )
        blocks.add(_read_float_block(weights))
    if len(blocks) != 1:
        raise unreadable(f"compressed-tensors in {len(blocks)} formats at once")
    return Float8(blocks.pop())


def _read_float_block(weights: dict[str, Any]) -> Block | None:
    match weights.get("strategy"):
        case "tensor" | "channel":
            return None
        case "block":
            return _read_block(weights.get("block_structure"))
        case "group":
            return _read_block([1, weights.get("group_size")])
        case strategy:
            raise unreadable(f"compressed-tensors of float values by {named(strategy)}")


def _read_fp8(stated: dict[str, Any]) -> Float8:
    experts = stated.get("expert_dtype", "fp8")
    if experts != "fp8":
        raise unreadable(f"fp8, and its experts {named(experts)}")
    size = stated.get("weight_block_size")
    return Float8(None if size is None else _read_block(size))


def _read_fbgemm(stated: dict[str, Any]) -> Float8:  # noqa: ARG001
    return Float8(None)


def _read_modelopt(stated: dict[str, Any]) -> Float8:
    algorithm = stated.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in _MODELOPT:
        raise unreadable(f"modelopt's {named(algorithm)}")
    return Float8(_MODELOPT[algorithm])


def _read_block(size: object) -> Block:
    """From a pair, outputs first, or as older compressed-tensors write it, "128x128"."""
    parts = [int(each) if each.isdecimal() else 0 for each in size.split("x")] if isinstance(size, str) else size
    if not (isinstance(parts, list) and len(parts) == 2 and all(type(each) is int and each > 0 for each in parts)):
        raise CheckpointError(f"the blocks of quantized weights must have two sizes, not {shown(size)}")
    return Block(*parts)


_READERS_OF_CONFIGS = {
    "compressed-tensors": _read_compressed_tensors,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm,
    "modelopt": _read_modelopt,
}


def _checked(num_bits: object, group_size: object) -> int:
    if type(num_bits) is not int or num_bits not in _BITS or group_size not in (*_GROUP_SIZES, -1):
        raise unreadable(f"values of {named(num_bits)} bits in groups of {named(group_size)}")
    return num_bits


def unreadable(what: str) -> CheckpointError:
    """Makes the error for weights that are something else than what is read."""
    return CheckpointError(
        f"its weights are {what}, which cannot be read; choose a checkpoint of 4 or 8 bits in groups of 32, 64 or 128"
        " (pack-quantized, AWQ gemm or GPTQ), or one in float8 (e4m3), bfloat16, float16 or float32"
    )
