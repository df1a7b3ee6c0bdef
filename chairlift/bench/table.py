"""The summary as text for a terminal."""

from dataclasses import astuple, fields

from chairlift.bench.config import BenchConfig
from chairlift.bench.report import Distribution, FailureCount, Summary

LABEL_WIDTH = 26
COLUMN_WIDTH = 12
COLUMNS = tuple(field.name for field in fields(Distribution))


def format_table(config: BenchConfig, summary: Summary) -> str:
    """Settings, throughput, latencies and failures; `config` is resolved."""
    sections = [_settings(config), _throughput(config, summary), _latencies(summary)]
    if summary.failures:
        sections.append([_failure(failure) for failure in summary.failures])
    return "\n\n".join("\n".join(lines) for lines in sections)


def _failure(failure: FailureCount) -> str:
    return _row(f"failed: {failure.label}", f"{failure.count} ({failure.first_message})")


def _row(label: str, value: str) -> str:
    return f"{label:<{LABEL_WIDTH}}{value}"


def _settings(config: BenchConfig) -> list[str]:
    arrivals = (
        f"{config.concurrency} in flight (closed loop)"
        if config.request_rate is None
        else f"Poisson, {config.request_rate:g} per second (open loop)"
    )
    return [
        _row("server", config.endpoint_url),
        _row("model", str(config.model)),
        _row("arrivals", arrivals),
    ]


def _throughput(config: BenchConfig, summary: Summary) -> list[str]:
    short = summary.num_short_replies
    return [
        _row("requests succeeded", f"{summary.num_succeeded} of {summary.num_requests}"),
        _row("duration", f"{summary.duration_s:.2f} s"),
        _row("prompt tokens", f"{summary.prompt_tokens} ({summary.prompt_token_source})"),
        _row("output tokens", f"{summary.output_tokens} ({summary.output_token_source})"),
        *([_row("short replies", f"{short} with fewer than {config.output_tokens} tokens")] if short else []),
        _row("request throughput", f"{summary.request_throughput:.2f} requests/s"),
        _row("output throughput", f"{summary.output_token_throughput:.2f} tokens/s"),
        _row("total throughput", f"{summary.total_token_throughput:.2f} tokens/s"),
    ]


def _latencies(summary: Summary) -> list[str]:
    rows = {
        "TTFT, first token": summary.ttft_ms,
        "TPOT, per output token": summary.tpot_ms,
        "ITL, between chunks": summary.itl_ms,
        "E2EL, whole request": summary.e2el_ms,
    }
    if summary.lateness_ms is not None:
        rows["client's own lateness"] = summary.lateness_ms
    header = _row("ms", "".join(f"{name:>{COLUMN_WIDTH}}" for name in COLUMNS))
    return [header, *(_row(label, _columns(distribution)) for label, distribution in rows.items())]


def _columns(distribution: Distribution | None) -> str:
    if distribution is None:
        return f"{'-':>{COLUMN_WIDTH}}" * len(COLUMNS)
    return "".join(f"{value:>{COLUMN_WIDTH}.2f}" for value in astuple(distribution))
