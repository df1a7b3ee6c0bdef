"""The figures as tables for a terminal, and as the JSON file of a run."""

import json
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from chairlift.loadtest.config import BenchConfig
from chairlift.loadtest.records import RequestRecord
from chairlift.loadtest.summary import BenchResult, ClientFigures, Summary, Sweep, SweepStep

LABEL_WIDTH = 26
COLUMN_WIDTH = 12
LATENCY_COLUMNS = ("mean", "p50", "p90", "p99")
SWEEP_COLUMNS = ("requests/s", "tokens/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "failed", "good")
MISSING = "-"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of a label and its cells. Without `columns` each row has one cell, of any width."""

    rows: tuple[tuple[str, ...], ...]
    heading: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.heading:
            return "\n".join(f"{label:<{LABEL_WIDTH}}{cell}" for label, cell in self.rows)
        return "\n".join(
            f"{label:<{LABEL_WIDTH}}" + "".join(f"{cell:>{COLUMN_WIDTH}}" for cell in cells)
            for label, *cells in (self.heading, *self.rows)
        )


def result_tables(config: BenchConfig, summary: Summary) -> list[Table]:
    """Settings, throughput, latencies and failures of one test; `config` is resolved."""
    settings = (("server", config.endpoint_url), ("model", str(config.model)), ("arrivals", _arrivals(config)))
    tables = [Table(settings), _throughput(config, summary), _latencies(summary)]
    if summary.failures:
        failures = ((f"failed: {each.label}", f"{each.count} ({each.first_message})") for each in summary.failures)
        tables.append(Table(tuple(failures)))
    return tables


def sweep_tables(sweep: Sweep) -> list[Table]:
    """A row for each test, and what was found."""
    unit = {"rate": "requests/s asked for", "concurrency": "requests in flight"}[sweep.values.name]
    config = sweep.steps[0].result.config
    found = "none" if sweep.highest is None else f"{sweep.highest:g}"
    return [
        Table(tuple(_sweep_row(step) for step in sweep.steps), (unit, *SWEEP_COLUMNS)),
        Table(
            (
                ("limits", f"{_limits(config)} for {config.goodput_share:.0%} of requests"),
                (f"highest {sweep.values.name}", found),
            )
        ),
    ]


def format_tables(tables: Sequence[Table]) -> str:
    """Text in columns, with a blank line between tables."""
    return "\n\n".join(map(str, tables))


def lag_warning(client: ClientFigures) -> str:
    """What to say of a client that is part of what it measured."""
    lag = 0.0 if client.lag_ms is None else client.lag_ms.p99
    return (
        f"the load test itself fell behind: its event loop was {lag:.0f} ms late (p99) and {client.busy_share:.0%} of "
        "a core busy, which is in the latencies above; give it a core of its own, or lower the load"
    )


def write_test(path: Path, result: BenchResult, summary: Summary) -> None:
    """Write one test as JSON: `config` (the key masked), `summary`, `requests`."""
    _write(path, _test(result, summary))


def write_sweep(path: Path, config: BenchConfig, sweep: Sweep) -> None:
    """Write a sweep as JSON: `config`, the `highest` value that met the limits (or null), and `tests`.

    Each test has its `value` beside what one test alone has.
    """
    tests = [{"value": step.value, **_test(step.result, step.summary)} for step in sweep.steps]
    _write(path, {"config": config.model_dump(mode="json"), "highest": sweep.highest, "tests": tests})


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _test(result: BenchResult, summary: Summary) -> dict[str, Any]:
    return {
        "config": result.config.model_dump(mode="json"),
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


def _arrivals(config: BenchConfig) -> str:
    if not config.is_open_loop:
        return f"{config.concurrency} in flight (closed loop)"
    if config.trace is not None:
        schedule = f"trace {config.trace}, {config.trace_speedup:g} times as fast"
    else:
        kind = "Poisson" if config.burstiness == 1 else f"gamma with burstiness {config.burstiness:g}"
        rate = f"{config.request_rate:g}" if config.ramp is None else "{:g} growing to {:g}".format(*config.ramp)
        schedule = f"{kind}, {rate} per second"
    limit = "" if config.concurrency is None else f", at most {config.concurrency} in flight"
    return f"{schedule}{limit} (open loop)"


def _limits(config: BenchConfig) -> str:
    return ", ".join(f"{name} {limit:g} ms" for name, limit in config.limits.items())


def _throughput(config: BenchConfig, summary: Summary) -> Table:
    rows = [
        ("requests succeeded", f"{summary.num_succeeded} of {summary.num_requests}"),
        ("most in flight", f"{summary.peak_running}"),
        ("duration", f"{summary.duration_s:.2f} s"),
        ("prompt tokens", f"{summary.prompt_tokens} ({summary.prompt_token_source})"),
        ("output tokens", f"{summary.output_tokens} ({summary.output_token_source})"),
        ("request throughput", f"{summary.request_throughput:.2f} requests/s"),
        ("output throughput", f"{summary.output_token_throughput:.2f} tokens/s"),
        ("total throughput", f"{summary.total_token_throughput:.2f} tokens/s"),
    ]
    if summary.peak_output_token_throughput is not None:
        rows.append(("most output in a second", f"{summary.peak_output_token_throughput:.0f} tokens"))
    if summary.num_short_replies:
        rows.append(("short replies", f"{summary.num_short_replies} with fewer tokens than asked for"))
    if summary.goodput is not None:
        good = f"{summary.goodput.request_goodput:.2f} requests/s, {summary.goodput.share:.1%} of requests"
        rows.append(("goodput", f"{good} within {_limits(config)}"))
    return Table(tuple(rows))


def _latencies(summary: Summary) -> Table:
    served = {
        "TTFT, first token": summary.ttft_ms,
        "TPOT, per output token": summary.tpot_ms,
        "ITL, between chunks": summary.itl_ms,
        "E2EL, whole request": summary.e2el_ms,
    }
    own = {"queued in the client": summary.client.queue_ms, "client's own lag": summary.client.lag_ms}
    shown = served | {label: distribution for label, distribution in own.items() if distribution is not None}
    rows = (
        (label, *(f"{value:.2f}" for value in astuple(distribution))) if distribution else (label, *[MISSING] * 4)
        for label, distribution in shown.items()
    )
    return Table(tuple(rows), ("ms", *LATENCY_COLUMNS))


def _sweep_row(step: SweepStep) -> tuple[str, ...]:
    summary = step.summary
    latencies = [
        MISSING if distribution is None else f"{getattr(distribution, percentile):.1f}"
        for distribution in (summary.ttft_ms, summary.tpot_ms)
        for percentile in ("p50", "p99")
    ]
    return (
        f"{step.value:g}",
        f"{summary.request_throughput:.2f}",
        f"{summary.output_token_throughput:.1f}",
        *latencies,
        f"{summary.num_requests - summary.num_succeeded}",
        f"{step.good_share:.1%}",
    )
