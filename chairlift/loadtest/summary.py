"""From records to figures, of one test or of a sweep.

Definitions are those of `vllm bench serve` (vllm/benchmarks/serve.py): latencies and throughput are of the
requests that ended well, throughput is over the wall-clock time of the whole test, percentiles interpolate
linearly (NumPy's default).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from chairlift.loadtest.config import BenchConfig, SweepValues
from chairlift.loadtest.records import MS_PER_S, RequestRecord, TokenSource

# The lag that is still small beside the latencies of a served model, and the busy share that leaves no room for bursts.
TOLERABLE_LAG_MS = 10.0
TOLERABLE_BUSY_SHARE = 0.9

Series = NDArray[np.float64]


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
        return cls(float(milliseconds.mean()), *np.percentile(milliseconds, (50, 90, 99)).tolist())


@dataclass(frozen=True, slots=True)
class FailureCount:
    """All failures of one label, with the first one's message."""

    label: str
    count: int
    first_message: str


@dataclass(frozen=True, slots=True)
class ClientFigures:
    """How the load test itself fared: one that falls behind sees tokens late that had arrived in time.

    `queue_ms`: from due to sent, None without a schedule.
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

    The peak is of whole seconds, so a test of less than one has none. `num_short_replies` counts replies with fewer
    tokens than were asked for. `goodput` is None without limits.
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
    """A finished test. `config` is resolved; `started_at` is on the records' clock.

    `lags` are seconds by which the client's timers fired late, `busy_share` its thread's share of one core.
    """

    config: BenchConfig
    records: tuple[RequestRecord, ...]
    started_at: float
    duration_s: float
    lags: tuple[float, ...]
    busy_share: float

    @property
    def succeeded(self) -> list[RequestRecord]:
        return [record for record in self.records if record.failure is None]


@dataclass(frozen=True, slots=True)
class SweepStep:
    """One test of a sweep."""

    value: float
    result: BenchResult
    summary: Summary

    @property
    def good_share(self) -> float:
        """The share of requests within the limits."""
        assert self.summary.goodput is not None, "a sweep has limits"
        return self.summary.goodput.share

    @property
    def is_good(self) -> bool:
        """Whether that is the share that was wanted."""
        return self.good_share >= self.result.config.goodput_share


@dataclass(frozen=True, slots=True)
class Sweep:
    """Steps in ascending order of their values."""

    values: SweepValues
    steps: Sequence[SweepStep]

    @property
    def highest(self) -> float | None:
        """The highest value whose test is good; None if none is."""
        return max((step.value for step in self.steps if step.is_good), default=None)


def summarize(result: BenchResult) -> Summary:
    """The figures of a finished test."""
    good, duration_s = result.succeeded, result.duration_s
    prompt_tokens = sum(record.prompt_tokens for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    return Summary(
        num_requests=len(result.records),
        num_succeeded=len(good),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        prompt_token_source=_shared_source(record.prompt_token_source for record in good),
        output_tokens=output_tokens,
        output_token_source=_shared_source(record.output_token_source for record in good),
        num_short_replies=sum(record.is_short for record in good),
        request_throughput=len(good) / duration_s,
        output_token_throughput=output_tokens / duration_s,
        peak_output_token_throughput=None if duration_s < 1 else peak_token_rate(good),
        total_token_throughput=(prompt_tokens + output_tokens) / duration_s,
        peak_running=peak_running(good),
        goodput=_goodput(result) if result.config.limits else None,
        ttft_ms=Distribution.of_seconds([record.ttft for record in good]),
        tpot_ms=Distribution.of_seconds([record.tpot for record in good if record.tpot is not None]),
        itl_ms=Distribution.of_seconds([gap for record in good for gap in record.inter_token_latencies]),
        e2el_ms=Distribution.of_seconds([record.latency for record in good]),
        client=ClientFigures(
            Distribution.of_seconds([r.queue_time for r in result.records] if result.config.is_open_loop else []),
            Distribution.of_seconds(result.lags),
            result.busy_share,
        ),
        failures=_count_failures(result.records),
    )


def keeps_limits(record: RequestRecord, limits: dict[str, float]) -> bool:
    """Whether a request ended well with every limited latency at or below its limit in ms.

    A reply of fewer than two tokens has no time per output token and keeps every limit on it.
    """
    if record.failure is not None:
        return False
    seen = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
    return all(seen[name] * MS_PER_S <= limit for name, limit in limits.items())


def token_rates(records: Sequence[RequestRecord], started_at: float, num_bins: int, width_s: float) -> Series:
    """Output tokens per second in each of `num_bins` bins of `width_s` seconds, shape `(num_bins,)`.

    A chunk counts when it arrived; where a reply's chunks carry several tokens, each for as many on average.
    """
    totals = np.zeros(num_bins)
    for record in records:
        if record.chunk_times:
            bins = ((np.asarray(record.chunk_times) - started_at) / width_s).astype(np.int64)
            weight = record.output_tokens / len(record.chunk_times)
            np.add.at(totals, np.clip(bins, 0, num_bins - 1), weight)
    return totals / width_s


def peak_token_rate(records: Sequence[RequestRecord]) -> float:
    """Most output tokens in any second, seconds counting from the first request sent (as in `vllm bench serve`)."""
    if not records:
        return 0.0
    started_at = min(record.sent_at for record in records)
    ended_at = max(record.ended_at for record in records)
    return float(token_rates(records, started_at, int(ended_at - started_at) + 1, 1.0).max())


def running_at(records: Sequence[RequestRecord], moments: Series) -> Series:
    """How many requests are in flight at each of these times, shape as `moments`."""
    sent = np.sort([record.sent_at for record in records])
    ended = np.sort([record.ended_at for record in records])
    return (np.searchsorted(sent, moments, side="right") - np.searchsorted(ended, moments, side="right")).astype(float)


def peak_running(records: Sequence[RequestRecord]) -> int:
    """Most requests in flight at once. One that ends when another is sent does not overlap with it."""
    return int(running_at(records, np.asarray([record.sent_at for record in records])).max()) if records else 0


def _goodput(result: BenchResult) -> Goodput:
    num_good = sum(keeps_limits(record, result.config.limits) for record in result.records)
    return Goodput(num_good / result.duration_s, num_good / len(result.records))


def _shared_source(sources: Iterable[TokenSource]) -> TokenSource | None:
    distinct = set(sources)
    if len(distinct) > 1:
        return "mixed"
    return distinct.pop() if distinct else None


def _count_failures(records: Iterable[RequestRecord]) -> tuple[FailureCount, ...]:
    """Most frequent first."""
    messages: dict[str, list[str]] = {}
    for record in records:
        if record.failure is not None:
            messages.setdefault(record.failure.label, []).append(record.failure.message)
    counts = [FailureCount(label, len(found), found[0]) for label, found in messages.items()]
    return tuple(sorted(counts, key=lambda failure: -failure.count))
