"""A whole test: find the model, warm up, measure, report.

Exit codes: 0 if every request succeeded, else 1. A test that cannot be made, or in which nothing succeeded,
says why on stderr in a line for each kind of failure, and prints no table.
"""

import asyncio
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from tqdm import tqdm

from chairlift.bench.arrivals import Arrivals, closed_loop, open_loop, poisson_offsets
from chairlift.bench.client import StreamClient, first_model, open_session, request_bodies
from chairlift.bench.config import DEFAULT_CONCURRENCY, BenchConfig
from chairlift.bench.failures import BenchError
from chairlift.bench.records import RequestRecord
from chairlift.bench.report import BenchResult, Summary, summarize, write_json
from chairlift.bench.table import format_table


def run_bench(config: BenchConfig) -> int:
    """Make the test that `config` describes and report it; returns the process's exit code."""
    try:
        result = asyncio.run(_make_test(config))
    except BenchError as problem:
        _complain(str(problem))
        return 1
    summary = summarize(result)
    _print_report(result.config, summary)
    is_saved = _save_report(result, summary)
    return 0 if is_saved and summary.num_succeeded == summary.num_requests else 1


async def _make_test(config: BenchConfig) -> BenchResult:
    async with open_session(config) as session:
        model = config.model or await first_model(session, config.url)
        resolved = config.resolved(model)
        client = StreamClient(session, resolved.endpoint_url)
        bodies = request_bodies(resolved)
        await _warm_up(client, bodies[config.num_requests :], resolved.endpoint_url)
        return await _measure(client, bodies[: config.num_requests], resolved)


async def _warm_up(client: StreamClient, bodies: list[bytes], url: str) -> None:
    """Raises `BenchError` if any of them fails: a test of a server that is not ready shows nothing."""
    records: list[RequestRecord] = []

    async def send(index: int, intended_at: float) -> None:
        records.append(await client.send(index, bodies[index], intended_at))

    await closed_loop(len(bodies), DEFAULT_CONCURRENCY, send)
    for record in records:
        if record.failure is not None:
            raise BenchError(f"the warm-up request to {url} failed: {record.failure}")


async def _measure(client: StreamClient, bodies: list[bytes], config: BenchConfig) -> BenchResult:
    records: list[RequestRecord] = []
    # `disable=None` is tqdm's word for "where stderr is not a terminal".
    progress_bar = tqdm(total=len(bodies), unit="request", disable=None, file=sys.stderr)
    with progress_bar as progress, _quiet_heap():

        async def send(index: int, intended_at: float) -> None:
            records.append(await client.send(index, bodies[index], intended_at))
            progress.update()

        started_at = perf_counter()
        await _arrivals(config)(send)
        duration_s = perf_counter() - started_at
    records.sort(key=lambda record: record.index)
    return BenchResult(config, tuple(records), started_at, duration_s)


@contextmanager
def _quiet_heap() -> Iterator[None]:
    """Take what exists already out of the garbage collector's sight.

    A full collection of what the imports left behind takes tens of milliseconds, in which no chunk is seen
    arriving: the client's pause would be counted as the server's.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _arrivals(config: BenchConfig) -> Arrivals:
    if config.request_rate is not None:
        offsets = poisson_offsets(config.num_requests, config.request_rate, config.seed)
        return lambda send: open_loop(offsets, send)
    concurrency = config.concurrency
    assert concurrency is not None, "the configuration is not resolved"
    return lambda send: closed_loop(config.num_requests, concurrency, send)


def _print_report(config: BenchConfig, summary: Summary) -> None:
    if summary.num_succeeded:
        sys.stdout.write(format_table(config, summary) + "\n")
        return
    for failure in summary.failures:
        count = f"{failure.count} of {summary.num_requests} requests failed"
        _complain(f"{count}: {failure.label}: {failure.first_message}")


def _save_report(result: BenchResult, summary: Summary) -> bool:
    path = result.config.json_file
    if path is None:
        return True
    try:
        write_json(path, result, summary)
    except OSError as problem:
        _complain(f"cannot write {path}: {problem.strerror}")
        return False
    return True


def _complain(line: str) -> None:
    sys.stderr.write(f"error: {line}\n")
