"""Packs matrices that are stacked: those of all experts each as soon as it is read, others in formats of their own.

So one of many experts is in memory twice at a time, and threads that read one and pack it need nothing of the others.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import Any

import torch

from chairlift.models.blocks import Arrange
from chairlift.models.cpu.packing import PackedMatrix, pack_grouped
from chairlift.models.grouped import GroupedParts, GroupedWeight, stack_rows
from chairlift.models.side_by_side import compute_each

_BY_PANEL = ("panels", "scales", "offsets", "steps", "units")  # fields in which parts stand one after the other


def pack_parts(read: GroupedParts, arrange: Arrange, bias: torch.Tensor | None = None) -> PackedMatrix:
    """Packs the parts as one matrix of all their rows. `arrange`: those of a part. `bias`: float32 `[out]`, of all."""
    packed = _pack_alike(read, arrange)
    if packed is None:
        return pack_grouped(stack_rows([part().map_rows(arrange) for part in read.parts]), bias)
    return replace(packed, bias=bias)


def _pack_alike(read: GroupedParts, arrange: Arrange) -> PackedMatrix | None:
    """Packs each part in its place; None as soon as one has another format than the first."""
    first = _pack(read.parts[0], arrange)
    format, is_other = _format_of(first), threading.Event()
    places = {
        name: torch.empty(len(read.parts), *each.shape, dtype=each.dtype) for name, each in _arrays(first).items()
    }

    def write(index: int) -> None:
        if is_other.is_set():
            return
        packed = first if index == 0 else _pack(read.parts[index], arrange)
        if _format_of(packed) != format:
            is_other.set()
            return
        for name, each in _arrays(packed).items():
            places[name][index] = each

    compute_each(write, range(len(read.parts)), read.num_elements)
    if is_other.is_set():
        return None
    joined: dict[str, Any] = {name: each.flatten(0, 1) for name, each in places.items()}
    return replace(first, num_outputs=first.num_outputs * len(read.parts), **joined)


def arrange_stacked(parts: Sequence[GroupedWeight], arrange: Arrange, num_together: int) -> list[GroupedWeight]:
    """Brings the rows of matrices that are stacked into another order.

    They become one matrix if they have one format, and else as few as there are formats: the rows of each follow those
    of the one before it, and all but the last have a multiple of `num_together` rows. Where that is impossible, since
    rows of several change places or rows of zeros are inserted, they become one, too.
    """
    alike = [stack_rows(list(each)) for _, each in groupby(parts, _format_of_weight)]
    del parts  # memory, if nobody else has them
    if len(alike) > 1 and (apart := _arrange_apart(alike, arrange, num_together)) is not None:
        return apart
    whole = stack_rows(alike)
    del alike
    return [whole.map_rows(arrange)]


def _arrange_apart(parts: Sequence[GroupedWeight], arrange: Arrange, num_together: int) -> list[GroupedWeight] | None:
    ends = torch.tensor(list(accumulate(part.num_outputs for part in parts)))
    order = arrange(torch.arange(1, int(ends[-1]) + 1)[:, None])[:, 0] - 1
    owners = torch.bucketize(order, ends, right=True)
    runs = torch.unique_consecutive(owners, return_counts=True)[1].tolist()
    if len(runs) > len(parts) or any(count % num_together for count in runs[:-1]) or bool((order < 0).any()):
        return None
    matrices = []
    for places, owner in zip(torch.split(order, runs), torch.split(owners, runs), strict=True):
        part, end = parts[int(owner[0])], int(ends[owner[0]])
        own = places - (end - part.num_outputs)
        matrices.append(part.map_rows(lambda rows, own=own: rows[own]))  # type: ignore[misc]
    return matrices


def _format_of_weight(weight: GroupedWeight) -> tuple[object, ...]:
    table = None if weight.table is None else tuple(weight.table.tolist())
    return weight.num_bits, weight.group_size, weight.scales_per_step, weight.offsets is None, table


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
