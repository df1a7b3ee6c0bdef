"""From records to figures."""

from dataclasses import astuple, replace

import pytest

from chairlift.bench.own_load import OwnLoad
from chairlift.bench.records import TokenSource
from chairlift.bench.summary import Distribution, FailureCount, Goodput, summarize

from .samples import BUSY, BUSY_AGAIN, TIMEOUT, failed, record, result


def test_a_distribution_is_in_milliseconds_with_interpolated_percentiles() -> None:
    hundred_and_one = [step / 1000 for step in range(101)]
    distribution = Distribution.of_seconds(hundred_and_one)
    assert distribution is not None
    assert astuple(distribution) == pytest.approx((50.0, 50.0, 90.0, 99.0))
    assert Distribution.of_seconds([1.0, 2.0]) == Distribution(1500.0, 1500.0, 1900.0, 1990.0)


def test_nothing_has_no_distribution() -> None:
    assert Distribution.of_seconds([]) is None


def test_throughput_is_over_the_wall_clock_time_of_the_test() -> None:
    summary = summarize(result(record(0), record(1), duration_s=4.0))
    assert summary.request_throughput == 2 / 4.0
    assert summary.output_token_throughput == 6 / 4.0
    assert summary.total_token_throughput == 26 / 4.0


def test_peaks_are_of_what_succeeded() -> None:
    summary = summarize(result(record(0), record(1), failed(1, BUSY)))
    assert (summary.peak_output_token_throughput, summary.peak_running) == (3.0, 2)


def test_a_test_of_less_than_a_second_has_no_fullest_second() -> None:
    assert summarize(result(record(0), duration_s=0.9)).peak_output_token_throughput is None


def test_latencies_of_equal_requests() -> None:
    summary = summarize(result(record(0), record(1)))
    assert summary.ttft_ms == Distribution(1000.0, 1000.0, 1000.0, 1000.0)
    assert summary.tpot_ms == Distribution(500.0, 500.0, 500.0, 500.0)
    assert summary.itl_ms == Distribution(500.0, 500.0, 500.0, 500.0)
    assert summary.e2el_ms == Distribution(2000.0, 2000.0, 2000.0, 2000.0)


def test_itl_is_over_all_gaps_and_tpot_over_requests() -> None:
    uneven = replace(record(1), chunk_times=(52.0, 52.0, 52.0, 52.0), ended_at=52.0, usage_output_tokens=4)
    summary = summarize(result(record(0), uneven))
    assert summary.itl_ms is not None
    assert summary.itl_ms.mean == 1000.0 / 5
    assert summary.tpot_ms is not None
    assert summary.tpot_ms.mean == 500.0 / 2


def test_failed_requests_count_as_failures_and_for_nothing_else() -> None:
    summary = summarize(result(record(0), failed(1, TIMEOUT)))
    assert (summary.num_requests, summary.num_succeeded) == (2, 1)
    assert summary.output_tokens == 3
    assert summary.e2el_ms == Distribution(2000.0, 2000.0, 2000.0, 2000.0)


def test_failures_are_counted_by_label_most_frequent_first_with_the_first_message() -> None:
    summary = summarize(result(failed(0, TIMEOUT), failed(1, BUSY), failed(2, BUSY_AGAIN)))
    assert summary.failures == (
        FailureCount("HTTP 503", 2, "queue is full"),
        FailureCount("timeout", 1, "no complete reply within 9 s"),
    )


def test_where_all_failed_nothing_was_measured() -> None:
    summary = summarize(result(failed(0, BUSY), goodput="ttft:1000"))
    assert summary.num_succeeded == 0
    assert summary.request_throughput == 0.0
    assert summary.ttft_ms is summary.tpot_ms is summary.itl_ms is summary.e2el_ms is None
    assert summary.output_token_source is summary.prompt_token_source is None
    assert (summary.peak_output_token_throughput, summary.peak_running) == (0.0, 0)
    assert summary.goodput == Goodput(0.0, 0.0)


def test_the_summary_says_who_counted_the_tokens() -> None:
    by_chunks = replace(record(1), usage_prompt_tokens=None, usage_output_tokens=None)
    assert summarize(result(record(0))).output_token_source is TokenSource.USAGE
    assert summarize(result(by_chunks)).output_token_source is TokenSource.CHUNKS
    assert summarize(result(record(0), by_chunks)).output_token_source is TokenSource.MIXED
    assert summarize(result(by_chunks)).prompt_token_source is TokenSource.REQUESTED


def test_without_usage_prompts_are_as_long_as_asked_for() -> None:
    summary = summarize(result(record(0), replace(record(1), usage_prompt_tokens=None)))
    assert summary.prompt_tokens == 10 + 12


def test_replies_shorter_than_asked_for_are_counted() -> None:
    summary = summarize(result(record(0), replace(record(1), usage_output_tokens=2)))
    assert summary.num_short_replies == 1


@pytest.mark.parametrize(
    ("limits", "goodput"),
    [
        ("ttft:1000,tpot:500", Goodput(0.5, 2 / 3)),
        ("ttft:1000,tpot:499", Goodput(0.0, 0.0)),
        ("e2el:2000", Goodput(0.5, 2 / 3)),
    ],
)
def test_goodput_is_what_succeeded_within_the_limits_of_all_that_was_sent(limits: str, goodput: Goodput) -> None:
    summary = summarize(result(record(0), record(1), failed(2, BUSY), goodput=limits))
    assert summary.goodput == goodput


def test_without_limits_there_is_no_goodput() -> None:
    assert summarize(result(record(0))).goodput is None


def test_queueing_in_the_client_is_reported_for_a_schedule_alone() -> None:
    late = replace(record(0), sent_at=50.25)
    assert summarize(result(late)).client.queue_ms is None
    assert summarize(result(late, request_rate=2.0)).client.queue_ms == Distribution(250.0, 250.0, 250.0, 250.0)


@pytest.mark.parametrize(
    ("own_load", "has_fallen_behind"),
    [
        (OwnLoad(lags=(0.009,), busy_share=0.89), False),
        (OwnLoad(lags=(0.011,), busy_share=0.1), True),
        (OwnLoad(lags=(0.001,), busy_share=0.91), True),
        (OwnLoad(lags=(), busy_share=0.1), False),
    ],
)
def test_a_late_or_a_fully_busy_client_has_fallen_behind(own_load: OwnLoad, has_fallen_behind: bool) -> None:
    client = summarize(result(record(0), own_load=own_load)).client
    assert client.has_fallen_behind is has_fallen_behind
    assert client.busy_share == own_load.busy_share
