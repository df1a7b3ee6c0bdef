"""What `chairlift bench` does with its settings: one test or a sweep, printed, and written where that was asked for.

Exit codes: 0 if every request succeeded, or a sweep found a load that meets the limits; else 1. A test that cannot be
made, or in which nothing succeeded, says why on stderr in a line for each kind of failure, and prints no table.
"""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from chairlift.bench.config import BenchConfig
from chairlift.bench.failures import BenchError
from chairlift.bench.json_file import write_sweep, write_test
from chairlift.bench.report import require_matplotlib, write_sweep_report, write_test_report
from chairlift.bench.runner import make_test
from chairlift.bench.summary import BenchResult, Summary, summarize
from chairlift.bench.sweep import Sweep, sweep_configs, sweep_step
from chairlift.bench.sweep_values import SweepValues
from chairlift.bench.table import fell_behind, format_sections, result_sections, sweep_sections

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def run_bench(config: BenchConfig, loop_factory: LoopFactory | None = None) -> int:
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


def _run_test(loop: asyncio.Runner, config: BenchConfig) -> int:
    result = loop.run(make_test(config))
    summary = summarize(result)
    _print_test(result, summary)
    is_saved = _save(config.json_file, lambda path: write_test(path, result, summary))
    if summary.num_succeeded:
        is_saved &= _save(config.report, lambda path: write_test_report(path, result, summary))
    return 0 if is_saved and summary.num_succeeded == summary.num_requests else 1


def _run_sweep(loop: asyncio.Runner, config: BenchConfig, values: SweepValues) -> int:
    steps = []
    for value, step_config in zip(values.values, sweep_configs(config, values), strict=True):
        sys.stderr.write(f"{values.name} {value:g}\n")
        result = loop.run(make_test(step_config))
        steps.append(sweep_step(value, result, summarize(result)))
    sweep = Sweep(values, tuple(steps))
    sys.stdout.write(format_sections(sweep_sections(sweep)) + "\n")
    for step in steps:
        _warn_of_lag(step.summary, f"{values.name} {step.value:g}: ")
    is_saved = _save(config.json_file, lambda path: write_sweep(path, config, sweep))
    is_saved &= _save(config.report, lambda path: write_sweep_report(path, sweep))
    return 0 if is_saved and sweep.highest is not None else 1


def _print_test(result: BenchResult, summary: Summary) -> None:
    if summary.num_succeeded:
        sys.stdout.write(format_sections(result_sections(result.config, summary)) + "\n")
        _warn_of_lag(summary)
        return
    for failure in summary.failures:
        count = f"{failure.count} of {summary.num_requests} requests failed"
        _complain(f"{count}: {failure.label}: {failure.first_message}")


def _warn_of_lag(summary: Summary, where: str = "") -> None:
    if summary.client.has_fallen_behind:
        sys.stderr.write(f"warning: {where}{fell_behind(summary.client)}\n")


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
