"""Matrices that are read part by part are packed as the same matrix in one piece is."""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial

import pytest
import torch

from chairlift.models.blocks import Arrange
from chairlift.models.cpu.packing import LANES, PackedMatrix, pack_grouped
from chairlift.models.cpu.parts import arrange_stacked, pack_parts
from chairlift.models.grouped import GroupedParts, GroupedWeight, quantize, stack_rows
from chairlift.models.layers import pad_rows


def matrix(num_outputs: int, num_bits: int, seed: int) -> GroupedWeight:
    return quantize(torch.randn(num_outputs, 64, generator=torch.Generator().manual_seed(seed)), num_bits)


def with_steps(weight: GroupedWeight) -> GroupedWeight:
    """The same values with scales of other sizes, two of which share a step."""
    counts = weight.scales.abs().mul(7).to(torch.uint8)
    steps = torch.full((weight.num_outputs, 1), 0.5, dtype=torch.float16)
    return replace(weight, scales=counts, offsets=counts + 1, scale_steps=steps, offset_steps=-steps)


def symmetric(weight: GroupedWeight) -> GroupedWeight:
    """Whose value 8 stands for 0, so that offsets are not stored."""
    return replace(weight, offsets=-8 * weight.scales)


def in_planes(num_bits: int, seed: int) -> GroupedWeight:
    """Random values and counts in the form that blocks of GGUF files have."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (20, 256 * num_bits // 8), dtype=torch.uint8, generator=random)
    counts = torch.randint(-32, 32, (20, 16), generator=random).to(torch.int8)
    return GroupedWeight(num_bits, values, counts, None, scale_steps=torch.rand(20, 1, generator=random).half())


FOUR, EIGHT = ([matrix(20, num_bits, seed) for seed in range(3)] for num_bits in (4, 8))


def parts_of(weights: Sequence[GroupedWeight]) -> GroupedParts:
    return GroupedParts([partial(lambda each: each, weight) for weight in weights], 3 * 20 * 64)


def assert_equal(one: PackedMatrix, other: PackedMatrix) -> None:
    for field in fields(PackedMatrix):
        first, second = getattr(one, field.name), getattr(other, field.name)
        if isinstance(first, torch.Tensor):
            assert first.dtype == second.dtype, field.name
            assert torch.equal(first, second), field.name
        else:
            assert first == second, field.name


@pytest.mark.parametrize(
    "weights",
    [
        EIGHT,
        FOUR,
        [with_steps(each) for each in FOUR],
        [symmetric(each) for each in FOUR],
        [symmetric(FOUR[0]), FOUR[1], FOUR[2]],
        [FOUR[0], EIGHT[1], FOUR[2]],
        [in_planes(6, seed) for seed in range(3)],
        [in_planes(3, 0), in_planes(6, 1), in_planes(6, 2)],
    ],
    ids=["8 bits", "4 bits", "steps", "no offsets", "some offsets", "some of 8 bits", "planes", "several planes"],
)
def test_parts_are_packed_as_the_whole_is(weights: list[GroupedWeight]) -> None:
    pad, bias = partial(pad_rows, multiple=LANES), torch.randn(3 * 32)
    whole = pack_grouped(stack_rows([each.map_rows(pad) for each in weights]), bias)
    assert_equal(pack_parts(parts_of(weights), pad, bias), whole)


def test_no_part_is_packed_alone_after_one_of_another_format() -> None:
    read: list[int] = []

    def read_part(index: int) -> GroupedWeight:
        read.append(index)
        return (FOUR[0], EIGHT[1], FOUR[2])[index]

    pack_parts(GroupedParts([partial(read_part, index) for index in range(3)], 3 * 20 * 64), torch.clone)
    assert read == [0, 1, 0, 1, 2]


TWO_FORMATS = [matrix(32, 8, 0), matrix(32, 4, 1)]
EXACT = torch.cat([each.dequantize() for each in TWO_FORMATS])


def test_stacked_matrices_of_one_format_become_one_and_others_stay_apart() -> None:
    assert [each.num_outputs for each in arrange_stacked([*TWO_FORMATS, TWO_FORMATS[1]], torch.clone, 16)] == [32, 64]
    (whole,) = arrange_stacked(TWO_FORMATS[:1] * 2, torch.clone, 16)
    assert torch.equal(whole.dequantize(), EXACT[:32].repeat(2, 1))


def test_rows_change_places_within_a_format_and_formats_with_each_other() -> None:
    apart = arrange_stacked(TWO_FORMATS, lambda rows: rows.flip(0), 16)
    assert [each.num_bits for each in apart] == [4, 8]
    assert torch.equal(torch.cat([each.dequantize() for each in apart]), EXACT.flip(0))


@pytest.mark.parametrize(
    "arrange",
    [
        lambda rows: rows.view(2, 2, 16, -1).transpose(0, 1).reshape(64, -1),
        lambda rows: rows.roll(8, 0),
        lambda rows: torch.cat((rows, torch.zeros_like(rows[:16]))),
    ],
    ids=["in turns", "not by panels", "with zeros"],
)
def test_rows_that_cannot_stay_in_their_formats_get_one(arrange: Arrange) -> None:
    (whole,) = arrange_stacked(TWO_FORMATS, arrange, 16)
    assert whole.num_bits == 8
    assert torch.equal(whole.dequantize(), arrange(EXACT))
