"""The JSON file of a run: settings (the API key masked), figures, and every request's raw ones."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chairlift.bench.config import BenchConfig
from chairlift.bench.records import RequestRecord
from chairlift.bench.summary import BenchResult, Summary
from chairlift.bench.sweep import Sweep


def write_test(path: Path, result: BenchResult, summary: Summary) -> None:
    """Write one test: `config`, `summary`, `requests`."""
    _write(path, {"config": _settings(result.config), **_test(result, summary)})


def write_sweep(path: Path, config: BenchConfig, sweep: Sweep) -> None:
    """Write a sweep: `config`, the `highest` value that met the limits (or null), and `tests`.

    Each test has its `value` beside what one test alone has.
    """
    tests = [
        {"value": step.value, "config": _settings(step.result.config), **_test(step.result, step.summary)}
        for step in sweep.steps
    ]
    _write(path, {"config": _settings(config), "highest": sweep.highest, "tests": tests})


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _settings(config: BenchConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _test(result: BenchResult, summary: Summary) -> dict[str, Any]:
    return {
        "summary": asdict(summary),
        "requests": [_raw_figures(record, result.started_at) for record in result.records],
    }


def _raw_figures(record: RequestRecord, started_at: float) -> dict[str, Any]:
    """One request as JSON: times in seconds since the test began, so every latency can be computed anew."""
    return {
        "index": record.index,
        "turn": record.turn,
        "intended_s": record.intended_at - started_at,
        "sent_s": record.sent_at - started_at,
        "chunks_s": [arrived_at - started_at for arrived_at in record.chunk_times],
        "ended_s": record.ended_at - started_at,
        "prompt_tokens": record.usage_prompt_tokens,
        "cached_tokens": record.usage_cached_tokens,
        "output_tokens": record.output_tokens,
        "output_token_source": record.output_token_source,
        "error": None if record.failure is None else str(record.failure),
    }
