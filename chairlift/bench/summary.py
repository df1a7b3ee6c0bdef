"""From records to figures.

Definitions are those of `vllm bench serve` (vllm/benchmarks/serve.py): latencies and throughput are of the
requests that ended well, throughput is over the wall-clock time of the whole test, percentiles interpolate
linearly (NumPy's default).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from chairlift.bench.config import BenchConfig
from chairlift.bench.own_load import OwnLoad
from chairlift.bench.records import MS_PER_S, RequestRecord, TokenSource
from chairlift.bench.timeline import peak_running, peak_token_rate

# The lag that is still small beside the latencies of a served model, and the busy share that leaves no room for bursts.
TOLERABLE_LAG_MS = 10.0
TOLERABLE_BUSY_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of a latency, in ms."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of_seconds(cls, seconds: Sequence[float]) -> Self | None:
        """Statistics of values given in seconds; None if there are none."""
        if not seconds:
            return None
        milliseconds = np.asarray(seconds) * MS_PER_S
        p50, p90, p99 = np.percentile(milliseconds, (50, 90, 99)).tolist()
        return cls(float(milliseconds.mean()), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class FailureCount:
    """All failures of one label, with the first one's message."""

    label: str
    count: int
    first_message: str


@dataclass(frozen=True, slots=True)
class ClientFigures:
    """How the load test itself fared: its event loop's lag, its thread's share of a core.

    `queue_ms` is how long requests that were due waited to be sent; None without a schedule.
    """

    queue_ms: Distribution | None
    lag_ms: Distribution | None
    busy_share: float

    @property
    def has_fallen_behind(self) -> bool:
        """Whether the client is part of what it measured."""
        is_late = self.lag_ms is not None and self.lag_ms.p99 > TOLERABLE_LAG_MS
        return is_late or self.busy_share > TOLERABLE_BUSY_SHARE


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests within all limits: how many per second, and as a share of all that were to be sent."""

    request_goodput: float
    share: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A test's figures. Times end in their unit; throughputs are per second; None where nothing was measured.

    The peak is of whole seconds, so a test of less than one has none.

    `num_short_replies` counts replies with fewer tokens than were asked for. `goodput` is None without limits.
    """

    num_requests: int
    num_succeeded: int
    duration_s: float
    prompt_tokens: int
    prompt_token_source: TokenSource | None
    output_tokens: int
    output_token_source: TokenSource | None
    num_short_replies: int
    request_throughput: float
    output_token_throughput: float
    peak_output_token_throughput: float | None
    total_token_throughput: float
    peak_running: int
    goodput: Goodput | None
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2el_ms: Distribution | None
    client: ClientFigures
    failures: tuple[FailureCount, ...]


@dataclass(frozen=True, slots=True)
class BenchResult:
    """A finished test. `config` is resolved; `started_at` is on the records' clock."""

    config: BenchConfig
    records: tuple[RequestRecord, ...]
    started_at: float
    duration_s: float
    own_load: OwnLoad

    @property
    def succeeded(self) -> list[RequestRecord]:
        return [record for record in self.records if record.failure is None]


def summarize(result: BenchResult) -> Summary:
    """The figures of a finished test."""
    good = result.succeeded
    prompt_tokens = sum(record.prompt_tokens for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    return Summary(
        num_requests=len(result.records),
        num_succeeded=len(good),
        duration_s=result.duration_s,
        prompt_tokens=prompt_tokens,
        prompt_token_source=_common(record.prompt_token_source for record in good),
        output_tokens=output_tokens,
        output_token_source=_common(record.output_token_source for record in good),
        num_short_replies=sum(record.is_short for record in good),
        request_throughput=len(good) / result.duration_s,
        output_token_throughput=output_tokens / result.duration_s,
        peak_output_token_throughput=None if result.duration_s < 1 else peak_token_rate(good),
        total_token_throughput=(prompt_tokens + output_tokens) / result.duration_s,
        peak_running=peak_running(good),
        goodput=_goodput(result),
        ttft_ms=Distribution.of_seconds([record.ttft for record in good]),
        tpot_ms=Distribution.of_seconds([record.tpot for record in good if record.tpot is not None]),
        itl_ms=Distribution.of_seconds([gap for record in good for gap in record.inter_token_latencies]),
        e2el_ms=Distribution.of_seconds([record.latency for record in good]),
        client=_client_figures(result),
        failures=_count_failures(result.records),
    )


def _goodput(result: BenchResult) -> Goodput | None:
    limits = result.config.limits
    if limits is None:
        return None
    num_good = sum(limits.are_kept(record) for record in result.records)
    return Goodput(num_good / result.duration_s, num_good / len(result.records))


def _client_figures(result: BenchResult) -> ClientFigures:
    queue_times = [record.queue_time for record in result.records] if result.config.is_open_loop else []
    return ClientFigures(
        queue_ms=Distribution.of_seconds(queue_times),
        lag_ms=Distribution.of_seconds(result.own_load.lags),
        busy_share=result.own_load.busy_share,
    )


def _common(sources: Iterable[TokenSource]) -> TokenSource | None:
    distinct = set(sources)
    if len(distinct) > 1:
        return TokenSource.MIXED
    return distinct.pop() if distinct else None


def _count_failures(records: Iterable[RequestRecord]) -> tuple[FailureCount, ...]:
    messages: dict[str, list[str]] = {}
    for record in records:
        if record.failure is not None:
            messages.setdefault(record.failure.label, []).append(record.failure.message)
    counts = [FailureCount(label, len(found), found[0]) for label, found in messages.items()]
    return tuple(sorted(counts, key=lambda failure: -failure.count))
