"""The JSON file of a run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from chairlift.bench import BenchConfig
from chairlift.bench.json_file import write_sweep, write_test
from chairlift.bench.summary import BenchResult, summarize
from chairlift.bench.sweep import Sweep, sweep_step
from chairlift.bench.sweep_values import SweepValues

from .samples import BUSY, failed, record, result


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
    finished = [result(record(0), request_rate=value, goodput="ttft:1000") for value in (1.0, 2.0)]
    steps = [sweep_step(each.config.request_rate or 0.0, each, summarize(each)) for each in finished]
    path = tmp_path / "sweep.json"
    write_sweep(path, config, Sweep(SweepValues.parse("rate=1,2"), steps))
    document = json.loads(path.read_text(encoding="utf-8"))
    assert (document["highest"], document["config"]["sweep"]) == (2.0, "rate=1,2")
    assert [test["value"] for test in document["tests"]] == [1.0, 2.0]
    assert [list(test) for test in document["tests"]] == [["value", "config", "summary", "requests"]] * 2
    assert [test["config"]["request_rate"] for test in document["tests"]] == [1.0, 2.0]
