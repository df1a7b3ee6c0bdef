"""Tests what messages are made of: amounts of memory in units that fit."""

import pytest

from chairlift.errors import sized


@pytest.mark.parametrize(
    ("num_bytes", "said"),
    [
        (0, "0 bytes"),
        (312, "312 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (5_000_000, "4.77 MiB"),
        (2**30 - 1, "1024.00 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (2.5 * 2**40, "2.50 TiB"),
        (2**70, "1048576.00 PiB"),
        (-(2**30), "-1.00 GiB"),
    ],
)
def test_a_size_is_shown_in_the_largest_unit_that_it_fills(num_bytes: float, said: str) -> None:
    assert sized(num_bytes) == said
