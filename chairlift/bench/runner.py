"""A whole test: find the model, make what is to be sent, warm up, measure."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

from chairlift.bench.arrivals import Arrivals, closed_loop, open_loop
from chairlift.bench.client import StreamClient, allow_many_connections, first_model, open_session
from chairlift.bench.config import DEFAULT_CONCURRENCY, BenchConfig
from chairlift.bench.failures import BenchError, FailureKind
from chairlift.bench.own_load import OwnLoadWatch
from chairlift.bench.player import Player
from chairlift.bench.progress import ProgressLine
from chairlift.bench.records import RequestRecord
from chairlift.bench.sources import Conversation
from chairlift.bench.summary import BenchResult
from chairlift.bench.workload import Workload, build_workload


async def make_test(config: BenchConfig) -> BenchResult:
    """Make the test that `config` describes. Raises `BenchError` if it cannot be made."""
    allow_many_connections()
    workload = build_workload(config)
    async with open_session(config) as session:
        resolved = config.resolved(config.model or await first_model(session, config.url))
        client = StreamClient(session, resolved.endpoint_url)
        await _warm_up(client, workload.warm_up, resolved)
        return await _measure(client, workload, resolved)


async def _warm_up(client: StreamClient, conversations: Sequence[Conversation], config: BenchConfig) -> None:
    """Raises `BenchError` if any of them fails: a test of a server that is not ready shows nothing.

    A stream that breaks off is left to the measurement, which counts how many do.
    """
    records: list[RequestRecord] = []
    player = Player(client, config, conversations, records.append)
    await closed_loop(len(conversations), DEFAULT_CONCURRENCY, player.play)
    for record in records:
        if record.failure is not None and record.failure.kind is not FailureKind.INCOMPLETE_STREAM:
            raise BenchError(f"the warm-up request to {config.endpoint_url} failed: {record.failure}")


async def _measure(client: StreamClient, workload: Workload, config: BenchConfig) -> BenchResult:
    records: list[RequestRecord] = []
    progress = ProgressLine(workload.num_requests, client.live)

    def take(record: RequestRecord) -> None:
        records.append(record)
        progress.take(record)

    player = Player(client, config, workload.conversations, take)
    with _quiet_heap():
        async with progress, OwnLoadWatch() as watch:
            started_at = perf_counter()
            await _arrivals(config, workload)(player.play)
            duration_s = perf_counter() - started_at
            own_load = watch.read()
    records.sort(key=lambda record: record.index)
    return BenchResult(config, tuple(records), started_at, duration_s, own_load)


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


def _arrivals(config: BenchConfig, workload: Workload) -> Arrivals:
    offsets, concurrency = workload.offsets, config.concurrency
    if offsets is not None:
        return lambda send: open_loop(offsets, send)
    assert concurrency is not None, "the configuration is not resolved"
    return lambda send: closed_loop(len(workload.conversations), concurrency, send)
