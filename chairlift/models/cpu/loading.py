"""Brings weights into their layout in native code (`csrc/loading/`), while other threads of Python run.

The library is that of this machine's best instruction set, whatever set a decoder asks for: the results are the same.
"""

import functools
from ctypes import c_int, c_int64, c_void_p
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from chairlift.models.cpu.library import load_library
from chairlift.models.cpu.structures import address_of
from chairlift.models.gguf import Groups, Kind, Unpacker

if TYPE_CHECKING:
    from ctypes import _NamedFuncPointer


class Change(IntEnum):
    """Says what becomes of the words of 32 bits that are moved into panels."""

    NONE = 0
    TO_UNSIGNED = 1  # four signed bytes: 128 is added to each
    FOLD_HALVES = 2  # eight values of 4 bits: the second four stand in the high halves beside the first four


def write_panels(rows: torch.Tensor, place: torch.Tensor, change: Change) -> None:
    """Transposes `[out, bytes of a row]` of any dtype into int32 `[padded out / 16, words of a row, 16]`.

    Rows are dense, and of whole words; the last panel is padded with zeros.
    """
    num_rows, num_words = rows.shape[0], rows.shape[1] * rows.itemsize // place.itemsize
    write, _ = _functions()
    write(address_of(rows), num_rows, num_words, num_words, change, address_of(place))


def _unpack(kind: Kind, blocks: torch.Tensor, places: Groups) -> None:
    _, unpack = _functions()
    parts = (places.values, places.scales, places.offsets, places.scale_steps, places.offset_steps)
    is_known = unpack(kind, address_of(blocks), blocks.numel() // kind.block.num_bytes, *map(address_of, parts))
    assert is_known, f"csrc/loading/blocks.h does not unpack {kind.name}"


_LEGACY = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)
_CODES = (Kind.IQ4_NL, Kind.MXFP4)
_SUPERBLOCKS = (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)

UNPACKER = Unpacker(frozenset((*_LEGACY, *_CODES, *_SUPERBLOCKS)), _unpack)
"""Reads the types of blocks that most GGUF files consist of."""


@functools.cache
def _functions() -> "tuple[_NamedFuncPointer, _NamedFuncPointer]":
    """Returns the two entries of the library, with the types of their arguments."""
    library = load_library(None)
    write, unpack = library.chairlift_write_panels, library.chairlift_unpack_blocks
    write.argtypes, write.restype = [c_void_p, c_int64, c_int64, c_int64, c_int, c_void_p], None
    unpack.argtypes, unpack.restype = [c_int, c_void_p, c_int64, *(c_void_p,) * 5], c_int
    return write, unpack
