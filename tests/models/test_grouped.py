"""Matrices of small integers in groups: what they stand for, and rounding to them."""

import math
from dataclasses import replace

import pytest
import torch

from chairlift.models import mxfp4
from chairlift.models.cpu.packing import pack_grouped
from chairlift.models.grouped import GroupedWeight, quantize, stack_rows
from chairlift.models.layers import pad_rows

FOUR_BITS = GroupedWeight(
    4,
    torch.tensor([[0x10, 0xF2], [0x88, 0x07]], dtype=torch.uint8),
    torch.tensor([[1.0, 0.5], [2.0, 1.0]], dtype=torch.float16),
    torch.tensor([[10.0, 0.0], [-16.0, -8.0]], dtype=torch.float16),
)
EIGHT_BITS = GroupedWeight(
    8, torch.tensor([[-128, 127, 3, 0]], dtype=torch.int8), torch.tensor([[1.0, 0.25]], dtype=torch.bfloat16)
)


IN_POWERS_OF_TWO = GroupedWeight(
    4,
    torch.arange(96, dtype=torch.uint8).view(3, 32),
    mxfp4.scales_of(torch.tensor([[0, 1], [128, 140], [120, 255]], dtype=torch.uint8)),
    table=mxfp4.TABLE,
)


def random_weight(outputs: int, inputs: int) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))


def lost(weight: torch.Tensor, rounded: torch.Tensor) -> float:
    """Returns what rounding took, as a share of the whole (of squares)."""
    return float((rounded - weight).square().sum() / weight.square().sum())


# What they stand for


def test_scales_that_are_powers_of_two_may_be_stacked_padded_and_compacted() -> None:
    expected = IN_POWERS_OF_TWO.dequantize()
    others = replace(IN_POWERS_OF_TWO, scales=IN_POWERS_OF_TWO.scales.float())
    assert torch.equal(stack_rows([IN_POWERS_OF_TWO, others]).dequantize(), torch.cat([expected, expected]))
    padded = IN_POWERS_OF_TWO.map_rows(lambda rows: pad_rows(rows, 16)).dequantize()
    assert torch.equal(padded[:3], expected)
    assert not padded[3:].any()
    assert torch.equal(IN_POWERS_OF_TWO.compacted().dequantize(), expected)
    packed = pack_grouped(IN_POWERS_OF_TWO).scales
    assert packed is not None
    assert packed[0, :, :4].tolist() == [[0, 127, 119, 0], [0, 139, 254, 0]]


def test_an_element_is_its_scale_times_its_value_plus_its_offset() -> None:
    assert FOUR_BITS.dequantize().tolist() == [[10.0, 11.0, 1.0, 7.5], [0.0, 0.0, -1.0, -8.0]]
    assert EIGHT_BITS.dequantize().tolist() == [[-128.0, 127.0, 0.75, 0.0]]
    assert EIGHT_BITS.dequantize(torch.bfloat16).dtype == torch.bfloat16
    assert (FOUR_BITS.num_outputs, FOUR_BITS.num_inputs, FOUR_BITS.group_size) == (2, 4, 2)
    assert (EIGHT_BITS.num_outputs, EIGHT_BITS.num_inputs, EIGHT_BITS.group_size) == (1, 4, 2)


def test_values_of_8_bits_take_the_place_of_4_without_a_change() -> None:
    widened = FOUR_BITS.widened()
    assert widened.values.tolist() == [[0, 1, 2, 15], [8, 8, 7, 0]]
    assert torch.equal(widened.dequantize(), FOUR_BITS.dequantize())
    assert EIGHT_BITS.widened() is EIGHT_BITS


def test_scales_take_16_bits_where_these_hold_them() -> None:
    wide = GroupedWeight(8, EIGHT_BITS.values, EIGHT_BITS.scales.float(), torch.tensor([[0.1]]))
    compacted = wide.compacted()
    assert compacted.scales.dtype == torch.bfloat16
    assert compacted.offsets is not None
    assert compacted.offsets.dtype == torch.float32
    assert torch.equal(compacted.dequantize(), wide.dequantize())
    assert GroupedWeight(8, EIGHT_BITS.values, torch.tensor([[1 + 2**-10]])).compacted().scales.dtype == torch.float16


def test_smaller_groups_hold_the_same_numbers() -> None:
    assert FOUR_BITS.regrouped(1).group_size == 1
    assert torch.equal(FOUR_BITS.regrouped(1).dequantize(), FOUR_BITS.dequantize())


def test_rows_are_arranged_with_their_scales_and_offsets() -> None:
    turned = FOUR_BITS.map_rows(lambda rows: rows.flip(0))
    assert torch.equal(turned.dequantize(), FOUR_BITS.dequantize().flip(0))


PLAIN = GroupedWeight(4, FOUR_BITS.values, FOUR_BITS.scales)


@pytest.mark.parametrize(("other", "num_bits"), [(PLAIN, 4), (EIGHT_BITS, 8)])
def test_stacked_matrices_get_the_wider_bits_and_offsets_if_one_has_any(other: GroupedWeight, num_bits: int) -> None:
    both = stack_rows([FOUR_BITS, other])
    assert both.num_bits == num_bits
    assert torch.equal(both.dequantize(), torch.cat((FOUR_BITS.dequantize(), other.dequantize())))
    assert stack_rows([PLAIN, PLAIN]).offsets is None


STEPPED = GroupedWeight(
    4,
    torch.tensor([[0x10, 0xF2], [0x88, 0x07]], dtype=torch.uint8),
    torch.tensor([[3, 0], [63, 255]], dtype=torch.uint8),
    torch.tensor([[1, 2], [0, 8]], dtype=torch.uint8),
    scale_steps=torch.tensor([[0.5], [2.0]], dtype=torch.float16),
    offset_steps=torch.tensor([[-1.0], [-0.25]], dtype=torch.float16),
)


def test_scales_and_offsets_are_multiples_of_the_steps_that_they_share() -> None:
    assert STEPPED.dequantize().tolist() == [[-1.0, 0.5, -2.0, -2.0], [1008.0, 1008.0, 3568.0, -2.0]]
    assert (STEPPED.scales_per_step, STEPPED.without_steps().scales_per_step) == (2, 0)
    assert STEPPED.num_bytes == 4 + 4 + 4 + 4 + 4
    same = [STEPPED.without_steps(), STEPPED.widened(), STEPPED.regrouped(1), STEPPED.compacted()]
    assert all(torch.equal(each.dequantize(), STEPPED.dequantize()) for each in same)
    assert torch.equal(STEPPED.rows(slice(1, 2)).dequantize(), STEPPED.dequantize()[1:])


@pytest.mark.parametrize(("other", "per_step"), [(STEPPED, 2), (FOUR_BITS, 0), (EIGHT_BITS, 0)])
def test_stacked_matrices_keep_steps_if_all_have_them(other: GroupedWeight, per_step: int) -> None:
    both = stack_rows([STEPPED, other])
    assert both.scales_per_step == per_step
    assert torch.equal(both.dequantize(), torch.cat((STEPPED.dequantize(), other.dequantize())))


def in_planes(values: list[int], num_bits: int) -> torch.Tensor:
    """uint8 `[1, n * num_bits / 8]`, place by place."""
    stored = []
    for start in range(0, len(values), 32):
        words = [values[at : at + 4] for at in range(start, start + 32, 4)]
        for width, shift in ((4, 0), (num_bits - 4, 4)):
            sharing = 8 // width
            for first in range(0, 8, sharing):
                together = words[first : first + sharing]
                for place in range(4):
                    fields = [word[place] >> shift & 2**width - 1 for word in together]
                    stored.append(sum(field << width * i for i, field in enumerate(fields)))
    return torch.tensor([stored], dtype=torch.uint8)


def six_bits(num_steps: int) -> GroupedWeight:
    counts = torch.tensor([[1, -2, 127, -128]], dtype=torch.int8)
    steps = torch.tensor([[0.5, 2.0, 0.25, 4.0]], dtype=torch.float16)[:, :num_steps]
    return GroupedWeight(6, in_planes(list(range(64)), 6), counts, scale_steps=steps)


def test_values_of_6_bits_stand_for_32_less_and_16_share_a_scale() -> None:
    weight = six_bits(2)
    assert (weight.num_outputs, weight.num_inputs, weight.group_size, weight.scales_per_step) == (1, 64, 16, 2)
    scales = torch.tensor([0.5, -1.0, 254.0, -256.0]).repeat_interleave(16)
    assert torch.equal(weight.dequantize()[0], (torch.arange(64) - 32) * scales)
    assert weight.num_bytes == 48 + 4 + 4


def test_6_bits_become_8_where_kernels_know_no_other_and_beside_others() -> None:
    exact = six_bits(2).dequantize()
    for weight in (six_bits(2).regular(), six_bits(2).widened()):
        assert (weight.num_bits, weight.group_size) == (8, 32)
        assert torch.equal(weight.values, quantize(exact, 8).values)
    other = GroupedWeight(8, torch.ones(1, 64, dtype=torch.int8), torch.ones(1, 2))
    both = stack_rows([six_bits(2), other])
    assert (both.num_bits, both.group_size, both.offsets) == (8, 32, None)
    assert torch.equal(both.dequantize()[1:], torch.ones(1, 64))
    assert torch.equal(stack_rows([six_bits(2), six_bits(2)]).dequantize(), torch.cat((exact, exact)))


def test_values_of_5_bits_have_offsets_and_lose_nothing_in_8() -> None:
    counts = torch.tensor([[3, 0]], dtype=torch.uint8), torch.tensor([[1, 63]], dtype=torch.uint8)
    steps = torch.tensor([[0.5]], dtype=torch.float16), torch.tensor([[-2.0]], dtype=torch.float16)
    weight = GroupedWeight(5, in_planes([*range(32), *range(32)], 5), *counts, None, *steps)
    exact = torch.cat((torch.arange(32) * 1.5 - 2, torch.full((32,), -126.0)))
    assert torch.equal(weight.dequantize()[0], exact)
    regular = weight.regular()
    assert (regular.num_bits, regular.group_size) == (8, 32)
    assert torch.equal(regular.dequantize()[0], exact)


def test_6_bits_in_groups_that_kernels_do_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="4 scales do not make runs of one size"):
        six_bits(4)
    with pytest.raises(ValueError, match="values of 6 bits have a scale for 16 neighbours, and no offsets"):
        GroupedWeight(6, in_planes([0] * 64, 6), torch.ones(1, 2))


def test_steps_that_are_not_of_4_bits_with_offsets_are_refused() -> None:
    values, counts = torch.zeros(2, 6, dtype=torch.int8), torch.ones(2, 3, dtype=torch.uint8)
    steps = torch.ones(2, 1, dtype=torch.float16)
    with pytest.raises(ValueError, match="steps are of the scales and offsets of 4 bits"):
        GroupedWeight(8, values, counts, counts, scale_steps=steps, offset_steps=steps)
    with pytest.raises(ValueError, match="3 scales do not make runs of one size"):
        GroupedWeight(
            4, values.view(torch.uint8), counts, counts, scale_steps=steps.repeat(1, 2), offset_steps=steps.repeat(1, 2)
        )


def test_what_makes_no_matrix_is_refused() -> None:
    values, scales = torch.zeros(2, 6, dtype=torch.int8), torch.ones(2, 4)
    with pytest.raises(ValueError, match="2, 3, 4, 5, 6 or 8 bits, not 7"):
        GroupedWeight(7, values, scales)
    with pytest.raises(ValueError, match="6 inputs do not make 4 groups of one size"):
        GroupedWeight(8, values, scales)
    with pytest.raises(ValueError, match="groups of different sizes cannot be stacked"):
        stack_rows([GroupedWeight(8, values, scales[:, :3]), GroupedWeight(8, values, scales[:, :2])])


# Rounding to them


def test_multiples_of_a_scale_are_found_again_in_8_bits() -> None:
    integers = torch.arange(2 * 64).view(2, 64) - 64
    integers[:, ::32] = 127
    weight = integers * torch.tensor([[0.5], [3.0]])
    grouped = quantize(weight, 8)
    assert (grouped.num_bits, grouped.group_size) == (8, 32)
    assert torch.equal(grouped.dequantize(), weight)


def test_8_bits_are_off_by_half_a_step_at_most() -> None:
    weight = random_weight(50, 320) * torch.logspace(-30, 30, 50)[:, None]
    grouped = quantize(weight, 8)
    steps = weight.view(50, -1, 32).abs().amax(dim=2, keepdim=True) / 127
    errors = (grouped.dequantize() - weight).view(50, -1, 32).abs()
    assert (errors <= 0.56 * steps).all()  # scales have 11 bits: 127 steps may lack a sixteenth of one
    assert (grouped.scales.view(torch.int32) & 0x1FFF == 0).all()
    assert lost(random_weight(50, 320), quantize(random_weight(50, 320), 8).dequantize()) < 3e-5


def test_4_bits_nearly_keep_what_a_file_of_such_weights_had() -> None:
    values = torch.randint(0, 256, (16, 64), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    values[:, ::16], values[:, 1::16] = 0x40, 0x2F  # 0 and 15, the ends of the range, are in each group
    scales = random_weight(16, 4).abs() + 1
    weight = GroupedWeight(4, values, scales, -7.3 * scales).dequantize()
    assert lost(weight, quantize(weight, 4).dequantize()) < 1e-3


def test_scales_and_offsets_of_4_bits_are_such_as_bytes_hold() -> None:
    grouped = quantize(random_weight(16, 320), 4)
    assert grouped.offsets is not None
    units = grouped.scales.amax(dim=1, keepdim=True) / 255
    for counts in (grouped.scales / units, grouped.offsets / (-15 * units)):
        torch.testing.assert_close(counts, counts.round(), rtol=0, atol=1e-3)
        assert ((counts > -0.5) & (counts < 255.5)).all()


@pytest.mark.parametrize("magnitude", [1e-12, 1.0, 1e12])
def test_an_error_falls_with_each_bit_at_any_magnitude(magnitude: float) -> None:
    weight = random_weight(64, 320) * magnitude
    errors = [lost(weight, quantize(weight, num_bits).dequantize()) ** 0.5 for num_bits in (4, 5, 6, 8)]
    assert errors == [pytest.approx(each, rel=0.05) for each in (0.0735, 0.035, 0.0175, 0.0054)]


def test_5_and_6_bits_are_counts_of_steps_of_their_row_that_float16_holds() -> None:
    five, six = (quantize(50 * random_weight(16, 320), num_bits) for num_bits in (5, 6))
    assert (five.values.shape, five.scales.dtype, five.scales_per_step) == ((16, 200), torch.uint8, 10)
    assert (six.values.shape, six.scales.dtype, six.scales_per_step) == ((16, 240), torch.int8, 20)
    assert five.offsets is not None
    assert (five.scales.amax(dim=1) == 255).all()
    assert (five.offsets.amax(dim=1) == 255).all()
    assert (six.scales.abs().amax(dim=1) == 127).all()
    for steps, sign in ((five.scale_steps, 1), (five.offset_steps, -1), (six.scale_steps, 1)):
        assert steps is not None
        assert torch.equal(steps.half().float(), steps)
        assert (steps.sign() == sign).all()


def test_5_bits_keep_nearly_what_4_bits_held() -> None:
    weight = random_weight(64, 320)
    before = quantize(weight, 4).dequantize()
    assert lost(before, quantize(before, 5).dequantize()) ** 0.5 < 0.005


@pytest.mark.parametrize("num_bits", [5, 6])
def test_what_has_been_rounded_loses_next_to_nothing_once_more(num_bits: int) -> None:
    once = quantize(random_weight(16, 320), num_bits).dequantize()
    assert lost(once, quantize(once, num_bits).dequantize()) ** 0.5 < (0.02 if num_bits == 5 else 0.01)


def test_weights_on_one_side_of_zero_keep_their_size() -> None:
    weight = random_weight(4, 64).abs() / 10 + 5
    for sign in (1, -1):
        error = quantize(sign * weight, 4).dequantize() - sign * weight
        assert error.abs().max() < 0.2


@pytest.mark.parametrize("num_bits", [4, 5, 6])
def test_inputs_that_count_more_lose_less(num_bits: int) -> None:
    weight, importance = random_weight(64, 320), torch.ones(320)
    importance[::10] = 50

    def counted(rounded: GroupedWeight) -> float:
        return lost(weight * importance.sqrt(), rounded.dequantize() * importance.sqrt())

    share = 0.6 if num_bits < 6 else 1.0  # with 6 bits there is no more than a scale to choose
    assert counted(quantize(weight, num_bits, importance)) < share * counted(quantize(weight, num_bits))


@pytest.mark.parametrize("importance", [torch.full((64,), 3.0), torch.zeros(64)])
def test_inputs_that_count_alike_are_rounded_as_without_importance(importance: torch.Tensor) -> None:
    weight = random_weight(16, 64)
    alike, plain = (lost(weight, quantize(weight, 4, each).dequantize()) for each in (importance, None))
    assert alike == pytest.approx(plain, rel=1e-3)


def test_8_bits_heed_no_importance() -> None:
    weight = random_weight(4, 64)
    assert torch.equal(quantize(weight, 8, torch.arange(64.0)).dequantize(), quantize(weight, 8).dequantize())


@pytest.mark.parametrize(("name", "share"), [("Q4_0", 0.75), ("Q4_1", 0.95)])
def test_4_bits_lose_less_than_ggufs_own(name: str, share: float) -> None:
    gguf = pytest.importorskip("gguf")
    weight = random_weight(64, 2048)
    kind = gguf.GGMLQuantizationType[name]
    theirs = torch.from_numpy(gguf.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind))
    assert lost(weight, quantize(weight, 4).dequantize()) < share * lost(weight, theirs)


def test_a_sign_makes_no_difference_to_8_bits() -> None:
    weight = random_weight(8, 256)
    assert torch.equal(quantize(-weight, 8).dequantize(), -quantize(weight, 8).dequantize())


@pytest.mark.parametrize("num_bits", [4, 5, 6, 8])
def test_inputs_are_padded_with_zeros_to_whole_groups_and_a_group_of_zeros_stays_zero(num_bits: int) -> None:
    weight = random_weight(3, 50)
    grouped = quantize(weight, num_bits)
    assert grouped.num_inputs == 64
    padded = torch.nn.functional.pad(weight, (0, 14))
    assert torch.equal(grouped.dequantize(), quantize(padded, num_bits).dequantize())
    weight = torch.cat((torch.zeros(1, 32), torch.ones(1, 32)), dim=1)
    assert quantize(weight, num_bits).dequantize().tolist() == [[0.0] * 32 + [pytest.approx(1.0, rel=1e-3)] * 32]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_makes_its_scale_none(value: float) -> None:
    weight = random_weight(2, 64)
    weight[1, 40] = value
    assert quantize(weight, 8).scales.isfinite().tolist() == [[True, True], [True, False]]
    for num_bits, num_groups in ((4, 2), (5, 2), (6, 4)):
        scales = quantize(weight, num_bits).without_steps().scales
        assert scales.isfinite().tolist() == [[True] * num_groups, [False] * num_groups]


@pytest.mark.parametrize("num_bits", [4, 5, 6, 8])
def test_a_large_matrix_is_rounded_as_its_rows_are(num_bits: int) -> None:
    weight = random_weight(2500, 320)
    whole = quantize(weight, num_bits)
    for row in (0, 818, 819, 1638, 2499):
        alone = quantize(weight[row : row + 1], num_bits)
        assert torch.equal(alone.dequantize(), whole.rows(slice(row, row + 1)).dequantize())


def test_a_large_matrix_with_a_table_is_widened_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randint(256, (2500, 160), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    table = torch.arange(-8, 8, dtype=torch.int8)
    coded = GroupedWeight(4, values, torch.ones(2500, 10), table=table)
    expected, sizes, integers = coded.dequantize(), [], GroupedWeight._integers

    def noting(some: GroupedWeight) -> torch.Tensor:
        sizes.append(some.num_outputs * some.num_inputs)
        return integers(some)

    monkeypatch.setattr(GroupedWeight, "_integers", noting)
    widened = coded.without_table()
    assert max(sizes) <= 1 << 18  # where the whole has more
    assert widened.table is None
    assert torch.equal(widened.values.float(), expected)


def test_values_that_a_table_names_keep_what_they_stand_for() -> None:
    table, other = torch.arange(-8, 8, dtype=torch.int8), torch.arange(0, 16, dtype=torch.int8)
    coded = replace(PLAIN, table=table)
    expected = PLAIN.dequantize() - 8 * PLAIN.scales.float().repeat_interleave(PLAIN.group_size, dim=1)
    assert torch.equal(coded.dequantize(), expected)
    assert torch.equal(coded.widened().dequantize(), expected)
    assert stack_rows([coded, coded]).num_bits == 4
    mixed = stack_rows([coded, replace(PLAIN, table=other), PLAIN])
    assert mixed.num_bits == 8
    assert torch.equal(mixed.dequantize(), torch.cat([expected, PLAIN.dequantize(), PLAIN.dequantize()]))
    with pytest.raises(ValueError, match="a table is of the 16 values of 4 bits"):
        replace(coded, table=table[:15])
