"""The kernels' layout of weights."""

import math

import pytest
import torch

from chairlift.models.config import RopeConfig
from chairlift.models.cpu.packing import arrange_heads, interleave, pack, pack_grouped, rope_table
from chairlift.models.grouped import GroupedWeight, quantize


def values_of(panels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """int32 words `[panels, words, 16]` -> `[panels, words, 16, values of a word]`."""
    return panels.unsqueeze(-1).view(dtype)


def test_a_panel_holds_word_after_word_of_sixteen_outputs() -> None:
    weight = torch.tensor([[100.0 * output + k for k in range(64)] for output in range(32)])
    packed = pack(weight)
    assert (packed.num_outputs, packed.depth, packed.panels.dtype) == (32, 64, torch.int32)
    assert packed.panels.shape == (2, 64, 16)
    assert packed.panels.is_contiguous()
    values = values_of(packed.panels, torch.float32)
    assert values[0, 0].flatten().tolist() == [100.0 * output for output in range(16)]
    assert values[0, 1].flatten().tolist() == [100.0 * output + 1 for output in range(16)]
    assert values[1, 63].flatten().tolist() == [100.0 * output + 63 for output in range(16, 32)]


def test_a_word_holds_two_bfloat16_values_of_an_output() -> None:
    weight = torch.zeros(16, 64, dtype=torch.bfloat16)
    weight[3, :4] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    packed = pack(weight)
    assert packed.panels.shape == (1, 32, 16)
    assert values_of(packed.panels, torch.bfloat16)[0, :3, 3].tolist() == [[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]]


def test_a_word_holds_four_values_of_8_bits_with_128_added() -> None:
    values = torch.zeros(16, 32, dtype=torch.int8)
    values[5, :6] = torch.tensor([127, -128, 2, 3, -1, 5])
    packed = pack_grouped(GroupedWeight(8, values, torch.ones(16, 1)))
    assert (packed.num_bits, packed.group_size, packed.depth) == (8, 32, 32)
    assert packed.panels.shape == (1, 8, 16)
    assert values_of(packed.panels, torch.uint8)[0, :2, 5].tolist() == [[255, 0, 130, 131], [127, 133, 128, 128]]


def test_values_of_4_bits_lie_in_halves_of_bytes_a_word_in_each() -> None:
    values = torch.zeros(16, 16, dtype=torch.uint8)  # of 32 inputs
    values[5, :4] = torch.tensor([0x21, 0x43, 0x65, 0x87])  # 1, 2, 3, ... 8
    packed = pack_grouped(GroupedWeight(4, values, torch.ones(16, 1)))
    assert (packed.num_bits, packed.group_size, packed.depth) == (4, 32, 32)
    assert packed.panels.shape == (1, 4, 16)
    assert values_of(packed.panels, torch.uint8)[0, :2, 5].tolist() == [[0x51, 0x62, 0x73, 0x84], [0, 0, 0, 0]]


def test_scales_and_offsets_are_multiples_of_a_rows_power_of_two_in_the_order_of_reading() -> None:
    scales = torch.arange(1.0, 37.0).view(18, 2) * 1e-7  # in float16 as they are they would lose most bits
    packed = pack_grouped(GroupedWeight(8, torch.ones(18, 64, dtype=torch.int8), scales, -3 * scales))
    assert packed.scales is not None
    assert packed.offsets is not None
    assert packed.units is not None
    assert packed.scales.dtype == packed.offsets.dtype == torch.float16
    assert packed.scales.shape == packed.offsets.shape == (2, 2, 16)
    assert packed.units.shape == (32,)
    assert packed.units[17] == 2.0**-31  # the largest of its row is 1.08e-5, which is 23193 of these
    assert packed.scales[1, :, 1].tolist() == [7516.0, 7732.0]
    assert packed.offsets[1, :, 1].tolist() == [-22544.0, -23200.0]
    assert packed.scales[1, :, 2:].eq(0).all()


def test_scales_of_4_bits_are_a_sixteenth_and_offsets_by_8_of_them_are_left_out() -> None:
    values, scales = torch.zeros(16, 16, dtype=torch.uint8), torch.full((16, 1), 0.5)
    plain = pack_grouped(GroupedWeight(4, values, scales, -8 * scales))
    assert plain.offsets is None
    assert plain.scales is not None
    assert plain.units is not None
    assert (plain.scales * plain.units).eq(0.5 / 16).all()
    shifted = pack_grouped(GroupedWeight(4, values, scales, -7 * scales))
    assert shifted.offsets is not None
    assert shifted.units is not None
    assert (shifted.offsets * shifted.units).eq(-3.5).all()
    bare = pack_grouped(GroupedWeight(4, values, scales))
    assert bare.offsets is not None
    assert bare.offsets.eq(0).all()


def test_scales_and_offsets_of_our_own_4_bits_are_bytes() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    weight[3] = 0.0
    grouped = quantize(weight, 4)
    packed = pack_grouped(grouped, has_byte_scales=True)
    assert packed.scales is not None
    assert packed.offsets is not None
    assert packed.units is not None
    assert grouped.offsets is not None
    assert packed.scales.dtype == packed.offsets.dtype == torch.uint8
    assert packed.scales[0].amax(dim=0).tolist() == [255 if row != 3 else 0 for row in range(16)]
    torch.testing.assert_close(packed.scales[0].T * packed.units[:, None] * 16, grouped.scales)
    torch.testing.assert_close(packed.offsets[0].T * packed.units[:, None] * -240, grouped.offsets)


def test_groups_that_rows_cannot_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"groups of 32, 64, 96, .* weights, not of 16"):
        pack_grouped(GroupedWeight(8, torch.zeros(1, 64, dtype=torch.int8), torch.ones(1, 4)))


@pytest.mark.parametrize(("dtype", "words"), [(torch.float32, 128), (torch.bfloat16, 64)])
def test_outputs_are_padded_to_16_and_inputs_to_64_with_zeros(dtype: torch.dtype, words: int) -> None:
    weight, bias = torch.full((17, 65), 3.0, dtype=dtype), torch.full((17,), 5.0, dtype=dtype)
    packed = pack(weight, bias)
    assert (packed.num_outputs, packed.depth) == (17, 128)
    assert packed.panels.shape == (2, words, 16)
    values = values_of(packed.panels, dtype)  # [panels, words, 16, per word]
    by_output = values.permute(0, 2, 1, 3).reshape(32, 128).float()
    assert by_output[:17, :65].eq(3.0).all()
    assert by_output[17:].eq(0).all()
    assert by_output[:, 65:].eq(0).all()
    assert packed.bias is not None
    assert packed.bias.dtype == torch.float32
    assert packed.bias.tolist() == [5.0] * 17 + [0.0] * 15
    assert packed.scales is packed.offsets is None


def test_gate_and_up_take_turns_by_sixteen() -> None:
    gate, up = torch.arange(32), torch.arange(100, 132)
    assert interleave(torch.cat((gate, up))).tolist() == [
        *range(16),
        *range(100, 116),
        *range(16, 32),
        *range(116, 132),
    ]


def test_the_elements_that_turn_come_first_in_both_halves_of_a_query_or_key() -> None:
    rows = torch.arange(24)  # heads of 8, of which 4 turn: a query, a key, a value
    query, key, value = arrange_heads(rows, num_heads=2, head_dim=8, num_rotated=4).view(3, 8).tolist()
    assert query == [0, 1, 4, 5, 2, 3, 6, 7]
    assert key == [8, 9, 12, 13, 10, 11, 14, 15]
    assert value == [16, 17, 18, 19, 20, 21, 22, 23]


def test_a_head_that_turns_as_a_whole_stays_as_it_is() -> None:
    rows = torch.arange(24)
    assert arrange_heads(rows, num_heads=2, head_dim=8, num_rotated=8) is rows


def test_what_does_not_turn_has_an_angle_of_0() -> None:
    half = RopeConfig(10_000.0, parameters=(("partial_rotary_factor", 0.5),))
    table = rope_table(half, head_dim=8, max_seq_len=3)
    assert table[0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert table[2].tolist() == pytest.approx(
        [math.cos(2), math.cos(0.02), 1, 1, math.sin(2), math.sin(0.02), 0, 0], abs=1e-6
    )
