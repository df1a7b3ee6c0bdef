"""Computes the figures of a test or of a sweep.

Definitions are those of `vllm bench serve` (vllm/benchmarks/serve.py), so figures compare: latencies and throughput are
of the requests that succeeded, throughput is over the wall-clock time of the whole test, percentiles interpolate
linearly (NumPy's default).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from chairlift.loadtest.config import BenchConfig
from chairlift.loadtest.records import MS_PER_S, RequestRecord

# The lag that is still small beside the latencies of a served model, and the busy share that leaves no room for bursts.
TOLERABLE_LAG_MS = 10.0
TOLERABLE_BUSY_SHARE = 0.9

Series = NDArray[np.float64]


@dataclass(frozen=True)
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

    @cached_property
    def succeeded(self) -> list[RequestRecord]:
        return [record for record in self.records if record.failure is None]

    @cached_property
    def summary(self) -> "Summary":
        return summarize(self)


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


@dataclass(slots=True)
class FailureCount:
    """All failures of one label, with the first one's message."""

    label: str
    count: int
    first_message: str


@dataclass(frozen=True, slots=True)
class Summary:
    """A test's figures; metadata has the row of each in the tables: a label, and how to format (summary, figure).

    Times end in their unit; throughputs are per second; None where nothing was measured. Sources say who counted the
    tokens. Guessed tokens are None where the server reports none. The peak is of whole seconds, so a test of less than
    one has none. Short replies have fewer tokens than were asked for. `goodput` is of requests within the limits,
    `good_share` their share of all. `client_*` describe the load test itself: if it falls behind, it sees tokens later
    than they arrive.
    """

    num_requests: int
    num_succeeded: int = field(metadata={"requests succeeded": "{1} of {0.num_requests}"})
    peak_running: int = field(metadata={"most in flight": "{1}"})
    duration_s: float = field(metadata={"duration": "{1:.2f} s"})
    prompt_tokens: int = field(metadata={"prompt tokens": "{1} ({0.prompt_token_source})"})
    prompt_token_source: str
    output_tokens: int = field(metadata={"output tokens": "{1} ({0.output_token_source})"})
    output_token_source: str
    guessed_tokens: int | None = field(metadata={"guessed tokens": "{1}, of which {0.accepted_tokens} are output"})
    accepted_tokens: int | None
    num_short_replies: int = field(metadata={"short replies": "{1}"})
    request_throughput: float = field(metadata={"request throughput": "{1:.2f} requests/s"})
    output_token_throughput: float = field(metadata={"output throughput": "{1:.2f} tokens/s"})
    total_token_throughput: float = field(metadata={"total throughput": "{1:.2f} tokens/s"})
    peak_output_token_throughput: float | None = field(metadata={"most output in a second": "{1:.0f} tokens"})
    limits: str | None
    good_share: float | None
    goodput: float | None = field(
        metadata={"goodput": "{1:.2f} requests/s, {0.good_share:.1%} of requests within {0.limits}"}
    )
    ttft_ms: Distribution | None = field(metadata={"TTFT, first token": ""})
    tpot_ms: Distribution | None = field(metadata={"TPOT, per output token": ""})
    itl_ms: Distribution | None = field(metadata={"ITL, between chunks": ""})
    e2el_ms: Distribution | None = field(metadata={"E2EL, whole request": ""})
    client_queue_ms: Distribution | None = field(metadata={"queued in the client": ""})
    client_lag_ms: Distribution | None = field(metadata={"client's own lag": ""})
    client_busy_share: float
    failures: list[FailureCount]

    @property
    def has_lagging_client(self) -> bool:
        """Returns true if the client distorted its own measurement."""
        is_late = self.client_lag_ms is not None and self.client_lag_ms.p99 > TOLERABLE_LAG_MS
        return is_late or self.client_busy_share > TOLERABLE_BUSY_SHARE


@dataclass(frozen=True, slots=True)
class Sweep:
    """The settings of the whole, what was swept, and the test of each of its values, which ascend."""

    config: BenchConfig
    name: str
    tests: Mapping[float, BenchResult]

    @property
    def highest(self) -> float | None:
        """The highest value at which the wanted share of requests was good; None if there is none."""
        wanted = self.config.goodput_share
        return max(
            (value for value, test in self.tests.items() if (test.summary.good_share or 0) >= wanted), default=None
        )


def summarize(result: BenchResult) -> Summary:
    """The figures of a finished test."""
    good, config, duration_s = result.succeeded, result.config, result.duration_s
    prompt_tokens = sum(record.prompt_tokens for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    guessed_tokens = sum(record.guessed_tokens for record in good) or None
    num_good = sum(keeps_limits(record, config.limits) for record in result.records) if config.limits else None
    return Summary(
        num_requests=len(result.records),
        num_succeeded=len(good),
        peak_running=peak_running(good),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        prompt_token_source=_who_counted(record.prompt_token_source for record in good),
        output_tokens=output_tokens,
        output_token_source=_who_counted(record.output_token_source for record in good),
        guessed_tokens=guessed_tokens,
        accepted_tokens=guessed_tokens and sum(record.usage_accepted_tokens or 0 for record in good),
        num_short_replies=sum(record.output_tokens < (record.asked_output_tokens or 0) for record in good),
        request_throughput=len(good) / duration_s,
        output_token_throughput=output_tokens / duration_s,
        total_token_throughput=(prompt_tokens + output_tokens) / duration_s,
        peak_output_token_throughput=None if duration_s < 1 else peak_token_rate(good),
        limits=config.goodput,
        good_share=None if num_good is None else num_good / len(result.records),
        goodput=None if num_good is None else num_good / duration_s,
        ttft_ms=Distribution.of_seconds([record.ttft for record in good]),
        tpot_ms=Distribution.of_seconds([record.tpot for record in good if record.tpot is not None]),
        itl_ms=Distribution.of_seconds([gap for record in good for gap in record.inter_token_latencies]),
        e2el_ms=Distribution.of_seconds([record.latency for record in good]),
        client_queue_ms=Distribution.of_seconds([r.queue_time for r in result.records if config.is_open_loop]),
        client_lag_ms=Distribution.of_seconds(result.lags),
        client_busy_share=result.busy_share,
        failures=_count_failures(result.records),
    )


def keeps_limits(record: RequestRecord, limits: dict[str, float]) -> bool:
    """Returns true if a request succeeded with every limited latency at or below its limit in ms.

    A reply of fewer than two tokens has no time per output token and keeps every limit on it.
    """
    if record.failure is not None:
        return False
    seen = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
    return all(seen[name] * MS_PER_S <= limit for name, limit in limits.items())


def token_rates(records: Sequence[RequestRecord], started_at: float, num_bins: int, width_s: float) -> Series:
    """Output tokens per second in each of `num_bins` bins of `width_s` seconds, shape `(num_bins,)`.

    A chunk counts at its arrival; where a reply's chunks carry several tokens, each counts as their mean number.
    """
    totals = np.zeros(num_bins)
    for record in records:
        if record.chunk_times:
            bins = ((np.asarray(record.chunk_times) - started_at) / width_s).astype(np.int64)
            np.add.at(totals, np.clip(bins, 0, num_bins - 1), record.output_tokens / len(record.chunk_times))
    return totals / width_s


def peak_token_rate(records: Sequence[RequestRecord]) -> float:
    """Most output tokens in any second, seconds counting from the first request sent (as in `vllm bench serve`)."""
    if not records:
        return 0.0
    started_at = min(record.sent_at for record in records)
    ended_at = max(record.ended_at for record in records)
    return float(token_rates(records, started_at, int(ended_at - started_at) + 1, 1.0).max())


def running_at(records: Sequence[RequestRecord], moments: Series) -> Series:
    """Counts the requests in flight at each of these times, shape as `moments`."""
    sent = np.sort([record.sent_at for record in records])
    ended = np.sort([record.ended_at for record in records])
    return (np.searchsorted(sent, moments, side="right") - np.searchsorted(ended, moments, side="right")).astype(float)


def peak_running(records: Sequence[RequestRecord]) -> int:
    """Most requests in flight at once. One that ends when another is sent does not overlap with it."""
    return int(running_at(records, np.asarray([record.sent_at for record in records])).max(initial=0))


def _who_counted(sources: Iterable[str]) -> str:
    return " and ".join(sorted(set(sources))) or "no replies"


def _count_failures(records: Iterable[RequestRecord]) -> list[FailureCount]:
    """Most frequent first."""
    counts: dict[str, FailureCount] = {}
    for failure in filter(None, (record.failure for record in records)):
        counts.setdefault(failure.label, FailureCount(failure.label, 0, failure.message)).count += 1
    return sorted(counts.values(), key=lambda failure: -failure.count)
