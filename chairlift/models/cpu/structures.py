"""The structures that the native code is given, field by field as in `csrc/model.h`."""

import ctypes
from ctypes import POINTER, c_double, c_int64, c_void_p

import torch


class Matrix(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("panels", "bias")),
        *((name, c_int64) for name in ("columns", "depth")),
        *((name, c_void_p) for name in ("scales", "offsets", "units")),
        *((name, c_int64) for name in ("num_bits", "group_size", "scale_bits", "scales_per_step")),
        *((name, c_void_p) for name in ("steps", "table")),
        *((name, c_void_p) for name in ("residual_panels", "residual_scales", "residual_offsets", "residual_units")),
        ("first_residual", c_int64),
        ("next", c_void_p),
        ("first_next", c_int64),
    ]


class AttentionBlock(ctypes.Structure):
    _fields_ = [
        *((name, Matrix) for name in ("qkv", "out")),
        *((name, c_void_p) for name in ("query_norm", "key_norm", "sinks", "rope")),
        *((name, c_int64) for name in ("num_heads", "num_kv_heads", "head_dim")),
        *((name, c_int64) for name in ("window", "are_heads_normed_as_one", "has_output_gate", "has_value_norm")),
        *((name, c_int64) for name in ("are_keys_values", "num_common", "is_query_only", "group", "plane")),
        *((name, c_double) for name in ("scale", "softcap", "input_scale", "output_scale")),
        *((name, Matrix) for name in ("query_down", "kv_down", "key_up", "value_up")),
        *((name, c_void_p) for name in ("query_down_norm", "kv_norm")),
        *((name, c_int64) for name in ("still_dim", "value_dim")),
        ("latent_eps", c_double),
    ]


class DenseMLPBlock(ctypes.Structure):
    _fields_ = [
        *((name, Matrix) for name in ("up", "down")),
        *((name, c_int64) for name in ("intermediate", "is_gated", "is_gelu")),
        *((name, c_double) for name in ("gate_scale", "output_scale")),
        ("is_sparse", c_int64),
        ("cutoff", c_double),
        ("output_gate", Matrix),
    ]


class ExpertsBlock(ctypes.Structure):
    _fields_ = [
        *((name, Matrix) for name in ("router", "gate", "up", "down")),
        ("choice_bias", c_void_p),
        *((name, c_int64) for name in ("num_experts", "num_chosen", "intermediate", "is_sigmoid", "is_normalized")),
        *((name, c_int64) for name in ("num_groups", "num_chosen_groups", "num_scored_of_group", "activation")),
        *((name, c_double) for name in ("eps", "scale", "alpha", "limit")),
        *((name, c_void_p) for name in ("router_norm", "expert_scales")),
    ]


class GatedShortConvBlock(ctypes.Structure):
    _fields_ = [
        *((name, Matrix) for name in ("in", "out")),
        ("taps", c_void_p),
        *((name, c_int64) for name in ("num_features", "num_taps", "state_offset", "input_offset")),
    ]


class GatedDeltaNetBlock(ctypes.Structure):
    _fields_ = [
        *((name, Matrix) for name in ("in", "gate", "out")),
        *((name, c_void_p) for name in ("taps", "rates", "dt_bias", "norm")),
        *((name, c_int64) for name in ("num_key_heads", "num_value_heads", "key_dim", "value_dim", "num_taps")),
        ("has_tiled_heads", c_int64),
        *((name, c_int64) for name in ("state_offset", "input_offset")),
        *((name, c_double) for name in ("norm_eps", "length_eps")),
    ]


class Mamba2Block(ctypes.Structure):
    _fields_ = [
        *((name, Matrix) for name in ("in", "out")),
        *((name, c_void_p) for name in ("factors", "taps", "conv_bias", "rates", "skips", "dt_bias", "norm")),
        *((name, c_int64) for name in ("num_heads", "head_dim", "num_groups", "state_size", "num_taps")),
        *((name, c_int64) for name in ("is_gated_last", "state_offset", "input_offset")),
        *((name, c_double) for name in ("norm_eps", "least_dt", "most_dt", "output_scale")),
    ]


class PerLayerInputBlock(ctypes.Structure):
    _fields_ = [
        *((name, Matrix) for name in ("gate", "projection")),
        *((name, c_int64) for name in ("size", "first")),
    ]


class LaurelBlock(ctypes.Structure):
    _fields_ = [*((name, Matrix) for name in ("left", "right")), ("rank", c_int64)]


class AltUpBlock(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in ("router_norm", "router", "prediction", "correction", "output_scale")]


BLOCKS: dict[str, type[ctypes.Structure]] = {
    "attention": AttentionBlock,
    "dense_mlp": DenseMLPBlock,
    "experts": ExpertsBlock,
    "gated_short_conv": GatedShortConvBlock,
    "gated_delta_net": GatedDeltaNetBlock,
    "mamba2": Mamba2Block,
    "per_layer_input": PerLayerInputBlock,
    "laurel": LaurelBlock,
    "predicts": AltUpBlock,
    "corrects": AltUpBlock,
}
"""The structures of blocks, in the order in which a sublayer has pointers to them.

They have the names that `Block.native` gives, except that AltUp has a pointer for what it does before a layer, and one
for what it does at its end.
"""


class Sublayer(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("pre_norm", "post_norm", "sum_norm")),
        *((name, c_int64) for name in ("is_continued", "adds_input")),
        ("scale", c_double),
        *((name, POINTER(structure)) for name, structure in BLOCKS.items()),
    ]


class LayerInputs(ctypes.Structure):
    _fields_ = [
        ("projection", Matrix),
        ("norm", c_void_p),
        ("size", c_int64),
        *((name, c_double) for name in ("scale", "factor")),
    ]


class Streams(ctypes.Structure):
    _fields_ = [*((name, c_int64) for name in ("count", "num_products")), ("products", POINTER(Matrix))]


class Model(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("hidden", "vocab")),
        *((name, c_double) for name in ("eps", "embedding_scale", "residual_scale", "logits_scale", "logits_softcap")),
        ("num_sublayers", c_int64),
        ("sublayers", POINTER(Sublayer)),
        *((name, c_void_p) for name in ("final_norm", "embedding")),
        *((name, Matrix) for name in ("embedding_groups", "head")),
        ("layer_inputs", LayerInputs),
        ("streams", Streams),
    ]


class CacheGroup(ctypes.Structure):
    _fields_ = [
        ("blocks", c_void_p),
        *((name, c_int64) for name in ("slot_stride", "value_offset", "plane_stride", "token_stride")),
    ]


class States(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("live", "pending")),
        *((name, c_int64) for name in ("live_stride", "pending_slot_stride", "pending_token_stride")),
        *((name, c_void_p) for name in ("num_replayed", "num_tentative")),
    ]


class Batch(ctypes.Structure):
    sources: tuple[object, ...] = ()  # own what it points to
    _fields_ = [
        *((name, c_int64) for name in ("num_rows", "num_tokens")),
        *((name, c_void_p) for name in ("input_ids", "row_offsets", "slots", "cache_lengths")),
        *((name, c_void_p) for name in ("common_slots", "common_lengths")),
        ("num_groups", c_int64),
        ("groups", POINTER(CacheGroup)),
        ("states", States),
    ]


class Piece(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("is_first", "first_sublayer", "num_sublayers")),
        *((name, c_void_p) for name in ("residual", "hidden", "layer_inputs")),
    ]


_OF_A_BATCH: tuple[type[ctypes.Structure], ...] = (CacheGroup, States, Batch, Piece)
_OF_A_MODEL: tuple[type[ctypes.Structure], ...] = (Sublayer, LayerInputs, Streams, Model)
_OF_LAYERS: tuple[type[ctypes.Structure], ...] = (Matrix, *dict.fromkeys(BLOCKS.values()))
STRUCTURES: tuple[type[ctypes.Structure], ...] = (*_OF_LAYERS, *_OF_A_MODEL, *_OF_A_BATCH)
"""All of them, in the order in which `chairlift_start` tells their sizes."""


def address_of(tensor: torch.Tensor | None) -> int | None:
    """The address of a dense tensor's elements; None for None."""
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "the kernels know nothing of strides"
    return tensor.data_ptr()


def start(library: ctypes.CDLL) -> str | None:
    """Prepares this process for a library of kernels. The reason if it cannot be used here; None if it can."""
    told = (c_int64 * len(STRUCTURES))()
    if library.chairlift_start(told):
        return "the system does not let this process use these instructions"
    sizes = [ctypes.sizeof(each) for each in STRUCTURES]
    if list(told) != sizes:
        return f"its structures have {list(told)} bytes, and those of this version {sizes}; install both anew"
    return None
