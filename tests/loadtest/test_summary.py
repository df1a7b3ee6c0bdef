"""From records to figures, of one request, of one test or of a sweep, by the definitions of `vllm bench serve`."""

from dataclasses import astuple, replace

import numpy as np
import pytest

from chairlift.loadtest import BenchConfig, SweepValues, parse_limits
from chairlift.loadtest.runner import sweep_configs
from chairlift.loadtest.summary import (
    Distribution,
    FailureCount,
    RequestFailed,
    RequestFailure,
    RequestRecord,
    keeps_limits,
    one_line,
    peak_running,
    peak_token_rate,
    running_at,
    summarize,
    token_rates,
)

from .conftest import BUSY, TIMEOUT, failed, record, result, sweep

FIVE_TOKENS = RequestRecord(
    index=0, intended_at=100.0, sent_at=100.0, ended_at=101.5, chunk_times=[100.5, 100.75, 101.0, 101.375, 101.5]
)


def alike(milliseconds: float) -> Distribution:
    return Distribution(milliseconds, milliseconds, milliseconds, milliseconds)


def test_latencies_of_a_request() -> None:
    assert FIVE_TOKENS.ttft == 0.5  # the first content chunk minus the send time
    assert FIVE_TOKENS.latency == 1.5  # the last chunk minus the send time
    assert FIVE_TOKENS.tpot == (1.5 - 0.5) / 4  # the rest of the latency over the rest of the tokens
    assert FIVE_TOKENS.inter_token_latencies == [0.25, 0.25, 0.375, 0.125]
    single = replace(FIVE_TOKENS, chunk_times=[101.5])
    assert (single.tpot, single.inter_token_latencies) == (None, [])


def test_latencies_count_from_the_intended_send_time_not_the_actual_one() -> None:
    """Coordinated omission: a client that could not send in time must not make the server look faster."""
    late = RequestRecord(index=0, intended_at=10.0, sent_at=12.5, ended_at=14.0, chunk_times=[13.0, 13.5, 14.0])
    assert (late.queue_time, late.ttft, late.latency, late.tpot) == (2.5, 3.0, 4.0, 0.5)
    assert late.inter_token_latencies == [0.5, 0.5]


def test_usage_has_the_word_else_chunks_are_counted_and_a_prompt_is_as_long_as_asked_for_if_that_is_known() -> None:
    assert (FIVE_TOKENS.output_tokens, FIVE_TOKENS.output_token_source) == (5, "chunks received")
    several = replace(FIVE_TOKENS, usage_prompt_tokens=7, usage_output_tokens=9)
    assert (several.output_tokens, several.output_token_source) == (9, "server's usage")
    assert (several.prompt_tokens, several.prompt_token_source) == (7, "server's usage")
    assert (several.tpot, several.inter_token_latencies) == (1.0 / 8, FIVE_TOKENS.inter_token_latencies)
    asked = replace(FIVE_TOKENS, asked_prompt_tokens=12)
    assert (asked.prompt_tokens, asked.prompt_token_source) == (12, "length asked for")
    assert (FIVE_TOKENS.prompt_tokens, FIVE_TOKENS.prompt_token_source) == (0, "not known")


def test_a_failure_keeps_one_line_of_what_was_said() -> None:
    failure = RequestFailed("HTTP 404", "<html>\n  <body>\tno\n").failure
    assert failure == RequestFailure("HTTP 404", "<html> <body> no")
    assert (str(failure), str(RequestFailure("timeout", ""))) == ("HTTP 404: <html> <body> no", "timeout")
    cut = [one_line("x" * length) for length in (200, 201, 5000)]
    assert [(len(line), line[-3:]) for line in cut] == [(200, "xxx"), (200, "..."), (200, "...")]


def test_a_distribution_is_in_milliseconds_with_interpolated_percentiles() -> None:
    distribution = Distribution.of_seconds([step / 1000 for step in range(101)])
    assert distribution is not None
    assert astuple(distribution) == pytest.approx((50.0, 50.0, 90.0, 99.0))
    assert Distribution.of_seconds([1.0, 2.0]) == Distribution(1500.0, 1500.0, 1900.0, 1990.0)
    assert Distribution.of_seconds([]) is None


def test_a_summary_is_of_what_succeeded_over_the_wall_clock_time_of_the_test() -> None:
    summary = summarize(result(record(0), record(1), failed(1, TIMEOUT), duration_s=4.0))
    assert (summary.num_requests, summary.num_succeeded) == (3, 2)
    assert (summary.prompt_tokens, summary.output_tokens) == (20, 6)
    assert (summary.request_throughput, summary.output_token_throughput) == (2 / 4.0, 6 / 4.0)
    assert summary.total_token_throughput == 26 / 4.0
    assert (summary.peak_output_token_throughput, summary.peak_running) == (3.0, 2)
    latencies = (summary.ttft_ms, summary.tpot_ms, summary.itl_ms, summary.e2el_ms)
    assert latencies == (alike(1000.0), alike(500.0), alike(500.0), alike(2000.0))


def test_itl_is_over_all_gaps_and_tpot_over_requests() -> None:
    uneven = replace(record(1), chunk_times=[52.0, 52.0, 52.0, 52.0], ended_at=52.0, usage_output_tokens=4)
    summary = summarize(result(record(0), uneven))
    assert summary.itl_ms is not None
    assert summary.tpot_ms is not None
    assert (summary.itl_ms.mean, summary.tpot_ms.mean) == (1000.0 / 5, 500.0 / 2)


def test_failures_are_counted_by_label_most_frequent_first_with_the_first_message() -> None:
    again = RequestFailure("HTTP 503", "queue is still full")
    assert summarize(result(failed(0, TIMEOUT), failed(1, BUSY), failed(2, again))).failures == [
        FailureCount("HTTP 503", 2, "queue is full"),
        FailureCount("timeout", 1, "no complete reply within 9 s"),
    ]


def test_where_all_failed_nothing_was_measured() -> None:
    summary = summarize(result(failed(0, BUSY), goodput="ttft:1000"))
    assert (summary.num_succeeded, summary.request_throughput) == (0, 0.0)
    assert summary.ttft_ms is summary.tpot_ms is summary.itl_ms is summary.e2el_ms is None
    assert summary.output_token_source == summary.prompt_token_source == "no replies"
    assert (summary.peak_output_token_throughput, summary.peak_running) == (0.0, 0)
    assert (summary.goodput, summary.good_share) == (0.0, 0.0)


def test_the_summary_says_who_counted_the_tokens_and_how_many_replies_were_short() -> None:
    by_chunks = replace(record(1), usage_prompt_tokens=None, usage_output_tokens=None)
    counted, both = summarize(result(by_chunks)), summarize(result(record(0), by_chunks))
    assert summarize(result(record(0))).output_token_source == "server's usage"
    assert (counted.output_token_source, counted.prompt_token_source) == ("chunks received", "length asked for")
    assert both.output_token_source == "chunks received and server's usage"
    assert both.prompt_tokens == 10 + 12
    assert summarize(result(record(0), replace(record(1), usage_output_tokens=2))).num_short_replies == 1


def test_goodput_is_what_succeeded_within_the_limits_of_all_that_was_sent() -> None:
    for limits, goodput, share in [("ttft:1000,tpot:500", 0.5, 2 / 3), ("tpot:499", 0.0, 0.0), (None, None, None)]:
        summary = summarize(result(record(0), record(1), failed(2, BUSY), goodput=limits))
        assert (summary.goodput, summary.good_share, summary.limits) == (goodput, share, limits)


def test_a_good_request_is_at_or_below_every_limit() -> None:
    kept = {text: keeps_limits(FIVE_TOKENS, parse_limits(text)) for text in ("ttft:500", "tpot:250", "e2el:1500")}
    exceeded = ("ttft:499", "tpot:249", "e2el:1499", "ttft:500,tpot:249,e2el:1500")
    assert kept == dict.fromkeys(kept, True)
    assert not any(keeps_limits(FIVE_TOKENS, parse_limits(text)) for text in exceeded)
    assert keeps_limits(replace(FIVE_TOKENS, chunk_times=[101.5]), {"tpot": 0.001})  # no time per further token
    assert not keeps_limits(replace(FIVE_TOKENS, failure=TIMEOUT), {"e2el": 1e9})


def test_queueing_in_the_client_is_reported_for_a_schedule_alone() -> None:
    late = replace(record(0), sent_at=50.25)
    assert summarize(result(late)).client_queue_ms is None
    assert summarize(result(late, request_rate=2.0)).client_queue_ms == alike(250.0)


def test_a_late_or_a_fully_busy_client_lags() -> None:
    for lag, busy_share, is_lagging in [(0.009, 0.89, False), (0.011, 0.1, True), (0.001, 0.91, True)]:
        summary = summarize(result(record(0), lag=lag, busy_share=busy_share))
        assert summary.has_lagging_client is is_lagging
        assert (summary.client_lag_ms, summary.client_busy_share) == (alike(1000 * lag), busy_share)


def test_tokens_count_in_the_bin_in_which_they_arrived_or_in_the_last_and_a_chunk_of_several_for_as_many() -> None:
    # Tokens at 51, 51.5 and 52; and at 52, 52.5 and 53.
    rates = token_rates([record(0), record(1)], started_at=50.0, num_bins=8, width_s=0.5)
    assert rates.tolist() == [0, 0, 2, 2, 4, 2, 2, 0]
    assert token_rates([record(0)], started_at=50.0, num_bins=1, width_s=1.0).tolist() == [3]
    twelve = replace(record(0), usage_output_tokens=12)
    assert token_rates([twelve], started_at=50.0, num_bins=3, width_s=1.0).tolist() == [0, 8, 4]


def test_the_peak_is_that_of_whole_seconds_from_the_first_request_sent() -> None:
    burst = replace(record(1), chunk_times=[52.0, 52.25, 52.75], ended_at=52.75)
    # Seconds from 51: none, the burst, none. From 50: none, two of the first, its last with the burst.
    assert [peak_token_rate(records) for records in ([burst], [record(0), burst], [])] == [3.0, 4.0, 0.0]


def test_requests_are_in_flight_from_being_sent_to_their_end_and_one_sent_then_does_not_overlap() -> None:
    # In flight from 50 to 52 and from 51 to 53.
    moments = np.asarray([49.0, 50.0, 50.5, 51.0, 51.5, 52.0, 52.5, 53.0])
    assert running_at([record(0), record(1)], moments).tolist() == [0, 1, 1, 2, 2, 1, 1, 0]
    starts: list[list[int]] = [[], [0], [0, 1], [0, 2], [0, 1, 2, 3], [0, 0, 0]]
    assert [peak_running(list(map(record, each))) for each in starts] == [0, 1, 2, 1, 2, 3]


GOOD = (record(0),)
NINE_OF_TEN = (*(record(n) for n in range(9)), failed(9, BUSY))
BAD = (*(record(n) for n in range(8)), failed(8, BUSY), failed(9, BUSY))


def test_each_value_of_a_sweep_is_a_test_with_a_seed_of_its_own() -> None:
    config = BenchConfig(sweep="rate=1,2", goodput="ttft:5", seed=7)
    first, second = sweep_configs(config, SweepValues.parse("rate=1,2"))
    assert (first.request_rate, first.seed, first.sweep) == (1.0, 7, None)
    assert (second.request_rate, second.seed) == (2.0, 8)
    [closed] = sweep_configs(config, SweepValues.parse("concurrency=3"))
    assert (closed.concurrency, closed.is_open_loop) == (3, False)


def test_the_highest_value_with_the_wanted_share_of_good_requests_is_found() -> None:
    sweeps = [(GOOD, NINE_OF_TEN, BAD), (BAD, GOOD, BAD), (GOOD, GOOD, GOOD), (BAD, BAD, BAD)]
    assert [sweep(*tests).highest for tests in sweeps] == [2.0, 2.0, 4.0, None]
