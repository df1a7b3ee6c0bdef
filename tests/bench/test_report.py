"""From records to figures, to the table, and to the JSON file."""

import json
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from chairlift.bench import BenchConfig
from chairlift.bench.failures import Failure, FailureKind
from chairlift.bench.records import RequestRecord, TokenSource
from chairlift.bench.report import BenchResult, Distribution, FailureCount, summarize, write_json
from chairlift.bench.table import format_table


def record(index: int) -> RequestRecord:
    """A reply of three tokens, a second for the first and half a second for each other."""
    start = 50.0 + index
    return RequestRecord(
        index=index,
        intended_at=start,
        sent_at=start,
        ended_at=start + 2.0,
        chunk_times=(start + 1.0, start + 1.5, start + 2.0),
        usage_prompt_tokens=10,
        usage_output_tokens=3,
    )


def failed(index: int, failure: Failure) -> RequestRecord:
    start = 50.0 + index
    return RequestRecord(index=index, intended_at=start, sent_at=start, ended_at=start + 9.0, failure=failure)


def result(*records: RequestRecord, duration_s: float = 4.0, **settings: object) -> BenchResult:
    fields = {"url": "http://host:8000", "prompt_tokens": 12, "output_tokens": 3} | settings
    config = BenchConfig.model_validate(fields)
    return BenchResult(config.resolved("tiny"), records, started_at=50.0, duration_s=duration_s)


TIMEOUT = Failure(FailureKind.TIMEOUT, "no complete reply within 9 s")
BUSY = Failure(FailureKind.HTTP_STATUS, "queue is full", 503)
BUSY_AGAIN = Failure(FailureKind.HTTP_STATUS, "queue is still full", 503)


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
    summary = summarize(result(failed(0, BUSY)))
    assert summary.num_succeeded == 0
    assert summary.request_throughput == 0.0
    assert summary.ttft_ms is summary.tpot_ms is summary.itl_ms is summary.e2el_ms is None
    assert summary.output_token_source is summary.prompt_token_source is None


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


def test_the_clients_lateness_is_reported_for_a_rate_alone() -> None:
    late = replace(record(0), sent_at=50.25)
    assert summarize(result(late)).lateness_ms is None
    assert summarize(result(late, request_rate=2.0)).lateness_ms == Distribution(250.0, 250.0, 250.0, 250.0)


def test_the_table_of_a_closed_loop() -> None:
    bench = result(record(0), record(1), concurrency=2)
    assert format_table(bench.config, summarize(bench)) == (
        "server                    http://host:8000/v1/completions\n"
        "model                     tiny\n"
        "arrivals                  2 in flight (closed loop)\n"
        "\n"
        "requests succeeded        2 of 2\n"
        "duration                  4.00 s\n"
        "prompt tokens             20 (server's usage)\n"
        "output tokens             6 (server's usage)\n"
        "request throughput        0.50 requests/s\n"
        "output throughput         1.50 tokens/s\n"
        "total throughput          6.50 tokens/s\n"
        "\n"
        "ms                                mean      median         p90         p99\n"
        "TTFT, first token              1000.00     1000.00     1000.00     1000.00\n"
        "TPOT, per output token          500.00      500.00      500.00      500.00\n"
        "ITL, between chunks             500.00      500.00      500.00      500.00\n"
        "E2EL, whole request            2000.00     2000.00     2000.00     2000.00"
    )


def test_the_table_of_an_open_loop_shows_the_clients_lateness() -> None:
    bench = result(replace(record(0), sent_at=50.5), request_rate=2.5)
    lines = format_table(bench.config, summarize(bench)).splitlines()
    assert lines[2] == "arrivals                  Poisson, 2.5 per second (open loop)"
    assert lines[-1] == "client's own lateness           500.00      500.00      500.00      500.00"


def test_the_table_shows_short_replies_failures_and_gaps() -> None:
    single = replace(record(0), chunk_times=(51.0,), ended_at=51.0, usage_output_tokens=1)
    bench = result(single, failed(1, BUSY))
    lines = format_table(bench.config, summarize(bench)).splitlines()
    assert "short replies             1 with fewer than 3 tokens" in lines
    assert "TPOT, per output token               -           -           -           -" in lines
    assert lines[-2:] == ["", "failed: HTTP 503          1 (queue is full)"]


def test_the_json_file_holds_config_summary_and_raw_figures(tmp_path: Path) -> None:
    bench = result(replace(record(0), sent_at=50.5), failed(1, BUSY), request_rate=2.0)
    path = tmp_path / "result.json"
    write_json(path, bench, summarize(bench))
    document = json.loads(path.read_text(encoding="utf-8"))
    assert list(document) == ["config", "summary", "requests"]
    assert document["config"]["model"] == "tiny"
    assert document["config"]["request_rate"] == 2.0
    assert document["summary"]["ttft_ms"] == {"mean": 1000.0, "median": 1000.0, "p90": 1000.0, "p99": 1000.0}
    assert document["summary"]["output_token_source"] == "server's usage"
    assert document["summary"]["failures"] == [
        {"label": "HTTP 503", "count": 1, "first_message": "queue is full"},
    ]
    assert document["requests"] == [
        {
            "index": 0,
            "intended_s": 0.0,
            "sent_s": 0.5,
            "chunks_s": [1.0, 1.5, 2.0],
            "ended_s": 2.0,
            "prompt_tokens": 10,
            "output_tokens": 3,
            "output_token_source": "server's usage",
            "error": None,
        },
        {
            "index": 1,
            "intended_s": 1.0,
            "sent_s": 1.0,
            "chunks_s": [],
            "ended_s": 10.0,
            "prompt_tokens": None,
            "output_tokens": 0,
            "output_token_source": "chunks received",
            "error": "HTTP 503: queue is full",
        },
    ]


def test_the_json_file_masks_the_api_key(tmp_path: Path) -> None:
    bench = result(record(0), api_key="sk-secret")
    path = tmp_path / "result.json"
    write_json(path, bench, summarize(bench))
    assert "sk-secret" not in path.read_text(encoding="utf-8")
