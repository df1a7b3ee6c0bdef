"""The kernels' layout of weights, and their rounding to 8 bits."""

import math

import pytest
import torch

from chairlift.models.cpu.packing import arrange_heads, interleave, pack, quantize, rope_table
from chairlift.models.rope import RopeConfig


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


def test_a_word_holds_four_int8_values_of_an_output() -> None:
    weight = torch.zeros(16, 64)
    weight[5, :6] = torch.tensor([127.0, -1.0, 2.0, 3.0, 4.0, 5.0])
    packed = pack(weight, is_quantized=True)
    assert packed.panels.shape == (1, 16, 16)
    assert values_of(packed.panels, torch.int8)[0, :2, 5].tolist() == [[127, -1, 2, 3], [4, 5, 0, 0]]
    assert packed.scales is not None
    assert packed.sums is not None
    assert packed.scales.tolist() == [0.0] * 5 + [1.0] + [0.0] * 10
    assert packed.sums.tolist() == [0] * 5 + [140] + [0] * 10


@pytest.mark.parametrize(
    ("dtype", "is_quantized", "words"),
    [(torch.float32, False, 128), (torch.bfloat16, False, 64), (torch.float32, True, 32), (torch.bfloat16, True, 32)],
)
def test_outputs_are_padded_to_16_and_inputs_to_64_with_zeros(
    dtype: torch.dtype, is_quantized: bool, words: int
) -> None:
    weight, bias = torch.full((17, 65), 3.0, dtype=dtype), torch.full((17,), 5.0, dtype=dtype)
    packed = pack(weight, bias, is_quantized=is_quantized)
    assert (packed.num_outputs, packed.depth) == (17, 128)
    assert packed.panels.shape == (2, words, 16)
    values = values_of(packed.panels, torch.int8 if is_quantized else dtype)  # [panels, words, 16, per word]
    by_output = values.permute(0, 2, 1, 3).reshape(32, 128).float()
    assert by_output[:17, :65].eq(127 if is_quantized else 3.0).all()
    assert by_output[17:].eq(0).all()
    assert by_output[:, 65:].eq(0).all()
    assert packed.bias is not None
    assert packed.bias.dtype == torch.float32
    assert packed.bias.tolist() == [5.0] * 17 + [0.0] * 15
    for per_output in (packed.scales, packed.sums):
        assert (per_output is not None) == is_quantized
        assert per_output is None or (len(per_output) == 32 and per_output[17:].eq(0).all())


def test_bytes_are_of_all_parts() -> None:
    weight, bias = torch.ones(16, 64), torch.ones(16)
    assert pack(weight).num_bytes == 16 * 64 * 4
    assert pack(weight.bfloat16(), bias.bfloat16()).num_bytes == 16 * 64 * 2 + 16 * 4
    assert pack(weight, bias, is_quantized=True).num_bytes == 16 * 64 + 3 * 16 * 4


def test_packing_leaves_the_weight_as_it_is_and_keeps_nothing_of_it() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    before = weight.clone()
    packed = pack(weight)
    assert torch.equal(weight, before)
    assert packed.panels.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()


def test_gate_and_up_take_turns_by_sixteen() -> None:
    gate, up = torch.arange(32), torch.arange(100, 132)
    assert interleave(torch.cat((gate, up))).tolist() == [
        *range(16),
        *range(100, 116),
        *range(16, 32),
        *range(116, 132),
    ]


def test_gate_and_up_are_padded_each() -> None:
    gate, up = torch.full((2, 3), 1.0), torch.full((2, 3), 2.0)
    mixed = interleave(torch.cat((gate, up)))
    assert mixed.shape == (32, 3)
    assert mixed[:, 0].tolist() == [1.0, 1.0] + [0.0] * 14 + [2.0, 2.0] + [0.0] * 14


def test_quantization_is_symmetric_and_off_by_half_a_step_at_most() -> None:
    weight = torch.randn(50, 333, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 50)[:, None]
    values, scales = quantize(weight)
    assert (values.dtype, scales.dtype, scales.shape) == (torch.int8, torch.float32, (50,))
    assert values.abs().amax(dim=1).tolist() == [127] * 50
    torch.testing.assert_close(scales, weight.abs().amax(dim=1) / 127)
    errors = (values * scales[:, None] - weight).abs()
    assert (errors <= scales[:, None] / 2 * (1 + 1e-5)).all()
    mirrored, same_scales = quantize(-weight)
    assert torch.equal(mirrored, -values)
    assert torch.equal(same_scales, scales)


def test_half_way_between_two_steps_goes_to_the_even_one() -> None:
    values, scales = quantize(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]))
    assert scales.tolist() == [1.0]
    assert values.tolist() == [[127, 0, 2, 2, 0, -2]]


def test_a_row_of_zeros_stays_zero() -> None:
    values, scales = quantize(torch.tensor([[0.0, 0.0], [0.0, 1.0]]))
    assert values.tolist() == [[0, 0], [0, 127]]
    assert scales[0] == 0
    assert scales.isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_so_in_the_scale(value: float) -> None:
    _, scales = quantize(torch.tensor([[1.0, value], [1.0, 2.0]]))
    assert not scales[0].isfinite()
    assert scales[1].isfinite()


def test_a_large_matrix_is_quantized_as_its_rows_are() -> None:
    weight = torch.randn(2500, 8, generator=torch.Generator().manual_seed(0))
    values, scales = quantize(weight)
    for row in (0, 1023, 1024, 2048, 2499):
        row_values, row_scale = quantize(weight[row : row + 1])
        assert torch.equal(values[row : row + 1], row_values)
        assert torch.equal(scales[row : row + 1], row_scale)


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
