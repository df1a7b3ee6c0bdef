"""Tests how many bits matrices get, and what memory that makes."""

import pytest

from chairlift.config import Quantization
from chairlift.models.precision import Widths, bytes_per_weight, is_sensitive_layer, widths_for


@pytest.mark.parametrize(
    ("num_layers", "sensitive"),
    [
        (2, [1]),
        (6, [2, 5]),
        (16, [0, 1, 4, 7, 10, 13, 14, 15]),
        (30, [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29]),
    ],
)
def test_the_ends_and_every_third_layer_between_are_sensitive(num_layers: int, sensitive: list[int]) -> None:
    assert [index for index in range(num_layers) if is_sensitive_layer(index, num_layers)] == sensitive


def test_what_is_not_quantized_has_no_widths_on_a_cpu() -> None:
    assert widths_for(None, 10**8) is None
    assert widths_for(Quantization.FP8, 10**8) is None


@pytest.mark.parametrize("num_parameters", [10**6, 10**11])
def test_int8_is_8_bits_of_models_of_any_size(num_parameters: int) -> None:
    widths = widths_for(Quantization.INT8, num_parameters)
    assert widths == Widths(most=8, head=8, values=8, sensitive=8, keeps_errors=True)
    assert bytes_per_weight(Quantization.INT8, num_parameters, has_experts=False) == 8.5 / 8


def test_int4_has_more_bits_in_the_layers_of_small_models_and_fewer_in_their_heads() -> None:
    small, large = (widths_for(Quantization.INT4, 2**30 - less) for less in (1, 0))
    assert small == Widths(most=5, head=6, values=6, sensitive=6, keeps_errors=False)
    assert large == Widths(most=4, head=8, values=4, sensitive=8, keeps_errors=True)


def test_experts_of_large_models_have_fewer_bits_than_the_mean() -> None:
    sizes = [bytes_per_weight(Quantization.INT4, 2**35, has_experts=each) for each in (False, True)]
    assert sizes == [5.5 / 8, 4.75 / 8]
    sizes = [bytes_per_weight(Quantization.INT4, 2**29, has_experts=each) for each in (False, True)]
    assert sizes == [6.25 / 8, 6.25 / 8]
