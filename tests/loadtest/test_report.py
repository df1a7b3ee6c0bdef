"""The figures as text and as JSON."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chairlift.loadtest import BenchConfig
from chairlift.loadtest.config import SweepValues
from chairlift.loadtest.report import format_tables, lag_warning, result_tables, sweep_tables, write_sweep, write_test
from chairlift.loadtest.summary import BenchResult, Sweep, summarize

from .samples import BUSY, failed, record, result, sweep_step


def table(bench: BenchResult) -> list[str]:
    return format_tables(result_tables(bench.config, summarize(bench))).splitlines()


def test_the_table_of_a_closed_loop() -> None:
    assert table(result(record(0), record(1), concurrency=2)) == [
        "server                    http://host:8000/v1/completions",
        "model                     tiny",
        "arrivals                  2 in flight (closed loop)",
        "",
        "requests succeeded        2 of 2",
        "most in flight            2",
        "duration                  4.00 s",
        "prompt tokens             20 (server's usage)",
        "output tokens             6 (server's usage)",
        "request throughput        0.50 requests/s",
        "output throughput         1.50 tokens/s",
        "total throughput          6.50 tokens/s",
        "most output in a second   3 tokens",
        "",
        "ms                                mean         p50         p90         p99",
        "TTFT, first token              1000.00     1000.00     1000.00     1000.00",
        "TPOT, per output token          500.00      500.00      500.00      500.00",
        "ITL, between chunks             500.00      500.00      500.00      500.00",
        "E2EL, whole request            2000.00     2000.00     2000.00     2000.00",
        "client's own lag                  1.00        1.00        1.00        1.00",
    ]


def test_the_table_of_an_open_loop_shows_how_long_requests_waited_in_the_client() -> None:
    lines = table(result(replace(record(0), sent_at=50.5), request_rate=2.5))
    assert "queued in the client            500.00      500.00      500.00      500.00" in lines


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"request_rate": 2.5}, "Poisson, 2.5 per second (open loop)"),
        ({"request_rate": 2.5, "burstiness": 0.5}, "gamma with burstiness 0.5, 2.5 per second (open loop)"),
        ({"ramp": (1, 20)}, "Poisson, 1 growing to 20 per second (open loop)"),
        ({"request_rate": 2.5, "concurrency": 4}, "Poisson, 2.5 per second, at most 4 in flight (open loop)"),
        ({"trace": "a.jsonl"}, "trace a.jsonl, 1 times as fast (open loop)"),
    ],
)
def test_arrivals_are_named(settings: dict[str, Any], said: str) -> None:
    assert table(result(record(0), **settings))[2] == f"arrivals                  {said}"


def test_the_table_shows_short_replies_failures_and_gaps() -> None:
    single = replace(record(0), chunk_times=[51.0], ended_at=51.0, usage_output_tokens=1)
    lines = table(result(single, failed(1, BUSY)))
    assert "short replies             1 with fewer tokens than asked for" in lines
    assert "TPOT, per output token               -           -           -           -" in lines
    assert lines[-2:] == ["", "failed: HTTP 503          1 (queue is full)"]


def test_the_table_shows_the_goodput() -> None:
    lines = table(result(record(0), failed(1, BUSY), goodput="ttft:1500,e2el:2000"))
    assert "goodput                   0.25 requests/s, 50.0% of requests within ttft 1500 ms, e2el 2000 ms" in lines


def test_what_is_said_of_a_client_that_fell_behind() -> None:
    client = summarize(result(record(0), lag=0.025, busy_share=0.97)).client
    assert lag_warning(client) == (
        "the load test itself fell behind: its event loop was 25 ms late (p99) and 97% of a core busy, which is in the "
        "latencies above; give it a core of its own, or lower the load"
    )


def written(path: Path, bench: BenchResult) -> dict[str, Any]:
    write_test(path, bench, summarize(bench))
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def test_it_holds_settings_summary_and_raw_figures(tmp_path: Path) -> None:
    bench = result(replace(record(0), sent_at=50.5), failed(1, BUSY), request_rate=2.0, goodput="ttft:1000")
    document = written(tmp_path / "result.json", bench)
    assert list(document) == ["config", "summary", "requests"]
    assert document["config"]["model"] == "tiny"
    assert document["config"]["request_rate"] == 2.0
    assert document["summary"]["ttft_ms"] == {"mean": 1000.0, "p50": 1000.0, "p90": 1000.0, "p99": 1000.0}
    assert document["summary"]["output_token_source"] == "server's usage"
    assert document["summary"]["goodput"] == {"request_goodput": 0.25, "share": 0.5}
    assert document["summary"]["client"] == {
        "queue_ms": {"mean": 250.0, "p50": 250.0, "p90": 450.0, "p99": 495.0},
        "lag_ms": {"mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0},
        "busy_share": 0.25,
    }
    assert document["summary"]["failures"] == [
        {"label": "HTTP 503", "count": 1, "first_message": "queue is full"},
    ]


def test_raw_figures_are_seconds_since_the_test_began(tmp_path: Path) -> None:
    bench = result(replace(record(0), sent_at=50.5, turn=2, usage_cached_tokens=4), failed(1, BUSY))
    assert written(tmp_path / "result.json", bench)["requests"] == [
        {
            "index": 0,
            "turn": 2,
            "intended_s": 0.0,
            "sent_s": 0.5,
            "chunks_s": [1.0, 1.5, 2.0],
            "ended_s": 2.0,
            "prompt_tokens": 10,
            "cached_tokens": 4,
            "output_tokens": 3,
            "output_token_source": "server's usage",
            "error": None,
        },
        {
            "index": 1,
            "turn": 0,
            "intended_s": 1.0,
            "sent_s": 1.0,
            "chunks_s": [],
            "ended_s": 10.0,
            "prompt_tokens": None,
            "cached_tokens": None,
            "output_tokens": 0,
            "output_token_source": "chunks received",
            "error": "HTTP 503: queue is full",
        },
    ]


def test_the_api_key_is_masked(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert written(path, result(record(0), api_key="sk-secret"))["config"]["api_key"] == "**********"
    assert "sk-secret" not in path.read_text(encoding="utf-8")


def test_a_sweep_has_its_tests_and_what_was_found(tmp_path: Path) -> None:
    config = BenchConfig(sweep="rate=1,2", goodput="ttft:1000")
    steps = [sweep_step(value, record(0)) for value in (1.0, 2.0)]
    path = tmp_path / "sweep.json"
    write_sweep(path, config, Sweep(SweepValues.parse("rate=1,2"), steps))
    document = json.loads(path.read_text(encoding="utf-8"))
    assert (document["highest"], document["config"]["sweep"]) == (2.0, "rate=1,2")
    assert [test["value"] for test in document["tests"]] == [1.0, 2.0]
    assert [list(test) for test in document["tests"]] == [["value", "config", "summary", "requests"]] * 2
    assert [test["config"]["request_rate"] for test in document["tests"]] == [1.0, 2.0]


def test_the_table_of_a_sweep() -> None:
    sweep = Sweep(SweepValues("rate", (1.0, 2.0)), [sweep_step(1.0, record(0)), sweep_step(2.0, failed(0, BUSY))])
    assert format_tables(sweep_tables(sweep)).splitlines() == [
        "requests/s asked for        requests/s    tokens/s    TTFT p50    TTFT p99    TPOT p50    TPOT p99      failed"
        "        good",
        "1                                 0.25         0.8      1000.0      1000.0       500.0       500.0           0"
        "      100.0%",
        "2                                 0.00         0.0           -           -           -           -           1"
        "        0.0%",
        "",
        "limits                    ttft 1000 ms for 90% of requests",
        "highest rate              1",
    ]
