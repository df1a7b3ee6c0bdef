"""What went on at each moment."""

from dataclasses import replace

import numpy as np
import pytest

from chairlift.bench.timeline import peak_running, peak_token_rate, running_at, token_rates

from .samples import record


def test_tokens_count_in_the_bin_in_which_they_arrived() -> None:
    # Tokens at 51, 51.5 and 52; and at 52, 52.5 and 53.
    rates = token_rates([record(0), record(1)], started_at=50.0, num_bins=8, width_s=0.5)
    assert rates.tolist() == [0, 0, 2, 2, 4, 2, 2, 0]


def test_a_chunk_of_several_tokens_counts_for_as_many() -> None:
    rates = token_rates([replace(record(0), usage_output_tokens=12)], started_at=50.0, num_bins=3, width_s=1.0)
    assert rates.tolist() == [0, 8, 4]


def test_what_comes_after_the_last_bin_counts_in_it() -> None:
    assert token_rates([record(0)], started_at=50.0, num_bins=1, width_s=1.0).tolist() == [3]


def test_the_peak_is_that_of_whole_seconds_from_the_first_request_sent() -> None:
    burst = replace(record(1), chunk_times=(52.0, 52.25, 52.75), ended_at=52.75)
    # Seconds from 51: none, the burst, none.
    assert peak_token_rate([burst]) == 3.0
    # Seconds from 50: none, two of the first, its last with the burst.
    assert peak_token_rate([record(0), burst]) == 4.0


def test_nothing_has_no_peak() -> None:
    assert peak_token_rate([]) == 0.0
    assert peak_running([]) == 0


def test_requests_are_in_flight_from_being_sent_to_their_end() -> None:
    # In flight from 50 to 52 and from 51 to 53.
    moments = np.asarray([49.0, 50.0, 50.5, 51.0, 51.5, 52.0, 52.5, 53.0])
    assert running_at([record(0), record(1)], moments).tolist() == [0, 1, 1, 2, 2, 1, 1, 0]


@pytest.mark.parametrize(("starts", "peak"), [([0], 1), ([0, 1], 2), ([0, 2], 1), ([0, 1, 2, 3], 2), ([0, 0, 0], 3)])
def test_one_that_ends_when_another_is_sent_is_not_beside_it(starts: list[int], peak: int) -> None:
    assert peak_running([record(start) for start in starts]) == peak
