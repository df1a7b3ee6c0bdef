"""Runs `chairlift bench`: makes one test or a sweep, and reports it.

Exit codes: 0 if every request succeeded, or a sweep found a load that meets the limits; else 1. A test that cannot be
made says why on stderr.
"""

import asyncio
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from chairlift.loadtest.config import BenchConfig
from chairlift.loadtest.records import BenchError
from chairlift.loadtest.report import report_sweep, report_test
from chairlift.loadtest.runner import make_test
from chairlift.loadtest.summary import Sweep
from chairlift.loadtest.values import SWEPT_FIELDS, SweepValues


def run(config: BenchConfig, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> int:
    """Makes the test that `config` describes, and reports it; returns the process's exit code."""
    try:
        if config.report is not None and find_spec("matplotlib") is None:  # better said before a test than after it
            raise BenchError("--report needs matplotlib: pip install 'chairlift[bench]', or leave --report out")
        with asyncio.Runner(loop_factory=loop_factory) as loop:
            report = (
                report_test(loop.run(make_test(config)))
                if config.sweep is None
                else report_sweep(_sweep(loop, config, config.sweep))
            )
    except BenchError as problem:
        sys.stderr.write(f"error: {problem}\n")
        return 1
    sys.stdout.write(f"{report}\n")
    for warning in report.warnings:
        sys.stderr.write(f"warning: {warning}\n")
    writes = ((config.json_file, report.write_json), (config.report, report.write_page))
    are_written = [_is_written(path, write) for path, write in writes if path is not None]
    return 0 if report.is_good and all(are_written) else 1


def sweep_configs(config: BenchConfig, sweep: SweepValues) -> list[BenchConfig]:
    """The test of each value. Each has a seed of its own, so that no prompt is in a cache from an earlier test."""
    field, convert = SWEPT_FIELDS[sweep.name], int if sweep.name == "concurrency" else float
    return [
        config.model_copy(update={field: convert(value), "sweep": None, "seed": config.seed + position})
        for position, value in enumerate(sweep.values)
    ]


def _sweep(loop: asyncio.Runner, config: BenchConfig, typed: str) -> Sweep:
    sweep, tests = SweepValues.parse(typed), {}
    for value, test_config in zip(sweep.values, sweep_configs(config, sweep), strict=True):
        sys.stderr.write(f"{sweep.name} {value:g}\n")
        tests[value] = loop.run(make_test(test_config))
    return Sweep(config, sweep.name, tests)


def _is_written(path: Path, write: Callable[[Path], None]) -> bool:
    try:
        write(path)
    except OSError as problem:
        sys.stderr.write(f"error: cannot write {path}: {problem.strerror}\n")
        return False
    return True
