"""From records to figures, and the JSON file that holds both.

Definitions are those of `vllm bench serve` (vllm/benchmarks/serve.py): latencies and throughput are of the
requests that ended well, throughput is over the wall-clock time of the whole test, percentiles interpolate
linearly (NumPy's default).
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from chairlift.bench.config import BenchConfig
from chairlift.bench.records import RequestRecord, TokenSource

MS_PER_S = 1e3


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of a latency, in ms."""

    mean: float
    median: float
    p90: float
    p99: float

    @classmethod
    def of_seconds(cls, seconds: Sequence[float]) -> Self | None:
        """Statistics of values given in seconds; None if there are none."""
        if not seconds:
            return None
        milliseconds = np.asarray(seconds) * MS_PER_S
        median, p90, p99 = np.percentile(milliseconds, (50, 90, 99)).tolist()
        return cls(float(milliseconds.mean()), median, p90, p99)


@dataclass(frozen=True, slots=True)
class FailureCount:
    """All failures of one label, with the first one's message."""

    label: str
    count: int
    first_message: str


@dataclass(frozen=True, slots=True)
class Summary:
    """A test's figures. Times end in their unit; throughputs are per second; None where nothing was measured.

    `num_short_replies` counts replies with fewer tokens than were asked for. `lateness_ms` is the client's
    own delay against the schedule, which only a request rate has.
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
    total_token_throughput: float
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2el_ms: Distribution | None
    lateness_ms: Distribution | None
    failures: tuple[FailureCount, ...]


@dataclass(frozen=True, slots=True)
class BenchResult:
    """A finished test. `config` is resolved; `started_at` is on the records' clock."""

    config: BenchConfig
    records: tuple[RequestRecord, ...]
    started_at: float
    duration_s: float


def summarize(result: BenchResult) -> Summary:
    """The figures of a finished test."""
    config, records = result.config, result.records
    good = [record for record in records if record.failure is None]
    prompt_tokens = sum(_prompt_tokens(record, config) for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    lateness = [record.lateness for record in records] if config.request_rate is not None else []
    return Summary(
        num_requests=len(records),
        num_succeeded=len(good),
        duration_s=result.duration_s,
        prompt_tokens=prompt_tokens,
        prompt_token_source=_common(record.prompt_token_source for record in good),
        output_tokens=output_tokens,
        output_token_source=_common(record.output_token_source for record in good),
        num_short_replies=sum(record.output_tokens < config.output_tokens for record in good),
        request_throughput=len(good) / result.duration_s,
        output_token_throughput=output_tokens / result.duration_s,
        total_token_throughput=(prompt_tokens + output_tokens) / result.duration_s,
        ttft_ms=Distribution.of_seconds([record.ttft for record in good]),
        tpot_ms=Distribution.of_seconds([record.tpot for record in good if record.tpot is not None]),
        itl_ms=Distribution.of_seconds([gap for record in good for gap in record.inter_token_latencies]),
        e2el_ms=Distribution.of_seconds([record.latency for record in good]),
        lateness_ms=Distribution.of_seconds(lateness),
        failures=_count_failures(records),
    )


def write_json(path: Path, result: BenchResult, summary: Summary) -> None:
    """Write the resolved configuration (the API key masked), the summary, and every request's raw figures."""
    document = {
        "config": result.config.model_dump(mode="json"),
        "summary": asdict(summary),
        "requests": [_raw_figures(record, result.started_at) for record in result.records],
    }
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _prompt_tokens(record: RequestRecord, config: BenchConfig) -> int:
    return config.prompt_tokens if record.usage_prompt_tokens is None else record.usage_prompt_tokens


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


def _raw_figures(record: RequestRecord, started_at: float) -> dict[str, Any]:
    """One request as JSON: times in seconds since the test began, so every latency can be computed anew."""
    return {
        "index": record.index,
        "intended_s": record.intended_at - started_at,
        "sent_s": record.sent_at - started_at,
        "chunks_s": [arrived_at - started_at for arrived_at in record.chunk_times],
        "ended_s": record.ended_at - started_at,
        "prompt_tokens": record.usage_prompt_tokens,
        "output_tokens": record.output_tokens,
        "output_token_source": record.output_token_source,
        "error": None if record.failure is None else str(record.failure),
    }
