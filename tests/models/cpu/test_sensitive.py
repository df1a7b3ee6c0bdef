"""Tests which layers keep 8 bits of their most sensitive matrices with int4."""

import pytest

from chairlift.models.cpu.weights import is_sensitive_layer


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
