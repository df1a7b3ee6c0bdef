"""The kernels' structures and functions, as ctypes sees them. Field by field as in `csrc/decoder.cpp`."""

import ctypes
from ctypes import POINTER, c_double, c_int, c_int64, c_void_p

import torch

from chairlift.models.cpu.packing import PackedMatrix


class MatrixStruct(ctypes.Structure):
    _fields_ = [
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
        ("columns", c_int64),
        ("depth", c_int64),
    ]

    @classmethod
    def of(cls, matrix: PackedMatrix) -> "MatrixStruct":
        pointers = (address(tensor) for tensor in (matrix.panels, matrix.bias, matrix.scales, matrix.sums))
        return cls(*pointers, matrix.num_outputs, matrix.depth)


class LayerStruct(ctypes.Structure):
    _fields_ = [
        ("qkv", MatrixStruct),
        ("out", MatrixStruct),
        ("gate_up", MatrixStruct),
        ("down", MatrixStruct),
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
    ]


class ModelStruct(ctypes.Structure):
    _fields_ = [
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("intermediate", c_int64),
        ("vocab", c_int64),
        ("eps", c_double),
        ("layers", POINTER(LayerStruct)),
        ("final_norm", c_void_p),
        ("embedding", c_void_p),
        ("rope", c_void_p),
        ("head", MatrixStruct),
    ]


class BatchStruct(ctypes.Structure):
    _fields_ = [
        ("num_rows", c_int64),
        ("num_tokens", c_int64),
        ("input_ids", c_void_p),
        ("row_offsets", c_void_p),
        ("slots", c_void_p),
        ("cache_lengths", c_void_p),
        ("common_slots", c_void_p),
        ("common_lengths", c_void_p),
        ("blocks", c_void_p),
        ("slot_stride", c_int64),
        ("value_offset", c_int64),
        ("layer_stride", c_int64),
        ("token_stride", c_int64),
    ]


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Gives the library's functions their types."""
    library.chairlift_forward.restype = c_int64
    library.chairlift_forward.argtypes = [POINTER(ModelStruct), POINTER(BatchStruct), c_int, c_void_p, c_void_p, c_int]
    library.chairlift_logits.restype = c_int64
    library.chairlift_logits.argtypes = [POINTER(ModelStruct), c_void_p, c_int64, c_int, c_void_p, c_void_p, c_int]
    return library


def address(tensor: torch.Tensor | None) -> int | None:
    """Where a dense tensor's elements are; None for none."""
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "the kernels know nothing of strides"
    return tensor.data_ptr()
