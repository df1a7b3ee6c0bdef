"""Packs matrices that are stacked, such as those of all experts, each as soon as it is read.

So one of them is in memory twice at a time, and threads that read one and pack it need nothing of the others.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from chairlift.models.blocks import Arrange
from chairlift.models.cpu.packing import PackedMatrix, pack_grouped
from chairlift.models.grouped import GroupedParts, GroupedWeight, stack_rows
from chairlift.models.side_by_side import compute_each

_BY_PANEL = ("panels", "scales", "offsets", "steps", "units")  # fields in which parts stand one after the other


def pack_parts(read: GroupedParts, arrange: Arrange, bias: torch.Tensor | None = None) -> PackedMatrix:
    """Packs the parts as one matrix of all their rows. `arrange`: those of a part. `bias`: float32 `[out]`, of all."""
    first = _pack(read.parts[0], arrange)
    places = {
        name: torch.empty(len(read.parts), *each.shape, dtype=each.dtype) for name, each in _arrays(first).items()
    }

    def write(index: int) -> bool:
        """Returns false if the part has another format than the first."""
        packed = first if index == 0 else _pack(read.parts[index], arrange)
        if _format_of(packed) != _format_of(first):
            return False
        for name, each in _arrays(packed).items():
            places[name][index] = each
        return True

    if not all(compute_each(write, range(len(read.parts)), read.num_elements)):
        return pack_grouped(stack_rows([part().map_rows(arrange) for part in read.parts]), bias)
    joined: dict[str, Any] = {name: each.flatten(0, 1) for name, each in places.items()}
    return replace(first, num_outputs=first.num_outputs * len(read.parts), bias=bias, **joined)


def _pack(part: Callable[[], GroupedWeight], arrange: Arrange) -> PackedMatrix:
    return pack_grouped(part().map_rows(arrange))


def _arrays(packed: PackedMatrix) -> dict[str, torch.Tensor]:
    """Its fields in which there is something for each panel."""
    return {name: each for name in _BY_PANEL if (each := getattr(packed, name)) is not None}


def _format_of(packed: PackedMatrix) -> tuple[object, ...]:
    """Returns what parts of one matrix have in common."""
    table = None if packed.table is None else packed.table.tolist()
    shapes = {name: (each.dtype, each.shape) for name, each in _arrays(packed).items()}
    return packed.num_bits, packed.depth, packed.group_size, packed.scales_per_step, table, shapes
