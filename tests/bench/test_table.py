"""The figures as text."""

from dataclasses import replace
from typing import Any

import pytest

from chairlift.bench.own_load import OwnLoad
from chairlift.bench.summary import BenchResult, summarize
from chairlift.bench.table import fell_behind, format_sections, result_sections

from .samples import BUSY, failed, record, result


def table(bench: BenchResult) -> list[str]:
    return format_sections(result_sections(bench.config, summarize(bench))).splitlines()


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
    single = replace(record(0), chunk_times=(51.0,), ended_at=51.0, usage_output_tokens=1)
    lines = table(result(single, failed(1, BUSY)))
    assert "short replies             1 with fewer tokens than asked for" in lines
    assert "TPOT, per output token               -           -           -           -" in lines
    assert lines[-2:] == ["", "failed: HTTP 503          1 (queue is full)"]


def test_the_table_shows_the_goodput() -> None:
    lines = table(result(record(0), failed(1, BUSY), goodput="ttft:1500,e2el:2000"))
    assert "goodput                   0.25 requests/s, 50.0% of requests within ttft 1500 ms, e2el 2000 ms" in lines


def test_what_is_said_of_a_client_that_fell_behind() -> None:
    client = summarize(result(record(0), own_load=OwnLoad(lags=(0.025,), busy_share=0.97))).client
    assert fell_behind(client) == (
        "the load test itself fell behind: its event loop was 25 ms late (p99) and 97% of a core busy, which is in the "
        "latencies above; give it a core of its own, or lower the load"
    )
