"""What `chairlift bench` does with its settings: one test or a sweep, printed, and written where that was asked for.

Exit codes: 0 if every request succeeded, or a sweep found a load that meets the limits; else 1. A test that cannot be
made, or in which nothing succeeded, says why on stderr in a line for each kind of failure, and prints no table.
"""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from chairlift.loadtest.config import SWEPT_FIELDS, BenchConfig, SweepValues
from chairlift.loadtest.html_report import require_matplotlib, write_sweep_report, write_test_report
from chairlift.loadtest.records import BenchError
from chairlift.loadtest.report import format_tables, lag_warning, result_tables, sweep_tables, write_sweep, write_test
from chairlift.loadtest.runner import make_test
from chairlift.loadtest.summary import Summary, Sweep, SweepStep, summarize


def run(config: BenchConfig, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> int:
    """Make the test that `config` describes and report it; returns the process's exit code."""
    try:
        if config.report is not None:
            require_matplotlib()
        values = config.sweep_values
        with asyncio.Runner(loop_factory=loop_factory) as loop:
            return _run_test(loop, config) if values is None else _run_sweep(loop, config, values)
    except BenchError as problem:
        _complain(str(problem))
        return 1


def sweep_configs(config: BenchConfig, values: SweepValues) -> list[BenchConfig]:
    """The test of each value. Each has a seed of its own, so that no prompt is in a cache from an earlier test."""
    convert = int if values.name == "concurrency" else float
    return [
        config.model_copy(
            update={SWEPT_FIELDS[values.name]: convert(value), "sweep": None, "seed": config.seed + position}
        )
        for position, value in enumerate(values.values)
    ]


def _run_test(loop: asyncio.Runner, config: BenchConfig) -> int:
    result = loop.run(make_test(config))
    summary = summarize(result)
    if summary.num_succeeded:
        sys.stdout.write(format_tables(result_tables(result.config, summary)) + "\n")
        _warn_of_lag(summary)
    else:
        for failure in summary.failures:
            count = f"{failure.count} of {summary.num_requests} requests failed"
            _complain(f"{count}: {failure.label}: {failure.first_message}")
    is_saved = _save(config.json_file, lambda path: write_test(path, result, summary))
    if summary.num_succeeded:
        is_saved &= _save(config.report, lambda path: write_test_report(path, result, summary))
    return 0 if is_saved and summary.num_succeeded == summary.num_requests else 1


def _run_sweep(loop: asyncio.Runner, config: BenchConfig, values: SweepValues) -> int:
    steps = []
    for value, step_config in zip(values.values, sweep_configs(config, values), strict=True):
        sys.stderr.write(f"{values.name} {value:g}\n")
        result = loop.run(make_test(step_config))
        steps.append(SweepStep(value, result, summarize(result)))
    sweep = Sweep(values, tuple(steps))
    sys.stdout.write(format_tables(sweep_tables(sweep)) + "\n")
    for step in steps:
        _warn_of_lag(step.summary, f"{values.name} {step.value:g}: ")
    is_saved = _save(config.json_file, lambda path: write_sweep(path, config, sweep))
    is_saved &= _save(config.report, lambda path: write_sweep_report(path, sweep))
    return 0 if is_saved and sweep.highest is not None else 1


def _warn_of_lag(summary: Summary, where: str = "") -> None:
    if summary.client.has_fallen_behind:
        sys.stderr.write(f"warning: {where}{lag_warning(summary.client)}\n")


def _save(path: Path | None, write: Callable[[Path], None]) -> bool:
    if path is None:
        return True
    try:
        write(path)
    except OSError as problem:
        _complain(f"cannot write {path}: {problem.strerror}")
        return False
    return True


def _complain(line: str) -> None:
    sys.stderr.write(f"error: {line}\n")
