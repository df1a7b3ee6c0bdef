"""The structures that the native code is given, field by field as in `csrc/model.h`."""

import ctypes
from ctypes import POINTER, c_double, c_int64, c_void_p


class Matrix(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("panels", "bias")),
        *((name, c_int64) for name in ("columns", "depth")),
        *((name, c_void_p) for name in ("scales", "offsets", "units")),
        *((name, c_int64) for name in ("num_bits", "group_size", "scale_bits")),
        *((name, c_void_p) for name in ("residual_panels", "residual_scales", "residual_offsets", "residual_units")),
        ("first_residual", c_int64),
    ]


class Layer(ctypes.Structure):
    _fields_ = [
        *((name, Matrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("pre_attention_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm")),
        *((name, c_void_p) for name in ("query_norm", "key_norm", "rope")),
        ("window", c_int64),
    ]


class Model(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim")),
        *((name, c_int64) for name in ("intermediate", "vocab", "is_gelu", "are_heads_normed_as_one")),
        *((name, c_double) for name in ("eps", "attention_scale", "embedding_scale", "residual_scale")),
        *((name, c_double) for name in ("logits_scale", "attention_softcap", "logits_softcap")),
        ("layers", POINTER(Layer)),
        *((name, c_void_p) for name in ("final_norm", "embedding")),
        ("head", Matrix),
    ]


class Batch(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("num_rows", "num_tokens")),
        *((name, c_void_p) for name in ("input_ids", "row_offsets", "slots", "cache_lengths")),
        *((name, c_void_p) for name in ("common_slots", "common_lengths", "blocks")),
        *((name, c_int64) for name in ("slot_stride", "value_offset", "layer_stride", "token_stride")),
    ]


_STRUCTURES = (Matrix, Layer, Model, Batch)  # in the order in which `chairlift_start` tells their sizes


def start(library: ctypes.CDLL) -> str | None:
    """Prepares this process for a library of kernels. The reason if it cannot be used here; None if it can."""
    told = (c_int64 * len(_STRUCTURES))()
    if library.chairlift_start(told):
        return "the system does not let this process use these instructions"
    sizes = [ctypes.sizeof(each) for each in _STRUCTURES]
    if list(told) != sizes:
        return f"its structures have {list(told)} bytes, and those of this version {sizes}; install both anew"
    return None
