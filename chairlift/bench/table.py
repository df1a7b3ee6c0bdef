"""The figures as sections of labelled rows, and these as text for a terminal."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

from chairlift.bench.config import BenchConfig
from chairlift.bench.summary import ClientFigures, Distribution, Summary
from chairlift.bench.sweep import Sweep, SweepStep

LABEL_WIDTH = 26
COLUMN_WIDTH = 12
LATENCY_COLUMNS = tuple(field.name for field in fields(Distribution))
SWEEP_COLUMNS = ("requests/s", "tokens/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "failed", "good")
MISSING = "-"


@dataclass(frozen=True, slots=True)
class Row:
    """A label, and one cell or as many as its section has columns."""

    label: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """Rows that belong together. `heading` is what the labels are of, where there are columns."""

    rows: tuple[Row, ...]
    heading: str = ""
    columns: tuple[str, ...] = ()


def result_sections(config: BenchConfig, summary: Summary) -> list[Section]:
    """Settings, throughput, latencies and failures of one test; `config` is resolved."""
    sections = [_settings(config), _throughput(config, summary), _latencies(summary)]
    if summary.failures:
        failures = ((f"failed: {each.label}", f"{each.count} ({each.first_message})") for each in summary.failures)
        sections.append(_facts(*failures))
    return sections


def sweep_sections(sweep: Sweep) -> list[Section]:
    """A row for each test, and what was found."""
    unit = {"rate": "requests/s asked for", "concurrency": "requests in flight"}[sweep.values.name]
    rows = tuple(Row(f"{step.value:g}", _sweep_cells(step)) for step in sweep.steps)
    config = sweep.steps[0].result.config
    wanted = f"{config.limits} for {config.goodput_share:.0%} of requests"
    found = "none" if sweep.highest is None else f"{sweep.highest:g}"
    return [Section(rows, unit, SWEEP_COLUMNS), _facts(("limits", wanted), (f"highest {sweep.values.name}", found))]


def format_sections(sections: Sequence[Section]) -> str:
    """Text in columns, with a blank line between sections."""
    return "\n\n".join("\n".join(_lines(section)) for section in sections)


def fell_behind(client: ClientFigures) -> str:
    """What to say of a client that is part of what it measured."""
    lag = 0.0 if client.lag_ms is None else client.lag_ms.p99
    return (
        f"the load test itself fell behind: its event loop was {lag:.0f} ms late (p99) and {client.busy_share:.0%} of "
        "a core busy, which is in the latencies above; give it a core of its own, or lower the load"
    )


def _lines(section: Section) -> list[str]:
    rows = [_line(row, is_wide=not section.columns) for row in section.rows]
    if section.columns:
        rows.insert(0, _line(Row(section.heading, section.columns), is_wide=False))
    return rows


def _line(row: Row, is_wide: bool) -> str:
    cells = row.cells[0] if is_wide else "".join(f"{cell:>{COLUMN_WIDTH}}" for cell in row.cells)
    return f"{row.label:<{LABEL_WIDTH}}{cells}"


def _facts(*facts: tuple[str, str]) -> Section:
    return Section(tuple(Row(label, (value,)) for label, value in facts))


def _settings(config: BenchConfig) -> Section:
    return _facts(("server", config.endpoint_url), ("model", str(config.model)), ("arrivals", _arrivals(config)))


def _arrivals(config: BenchConfig) -> str:
    if not config.is_open_loop:
        return f"{config.concurrency} in flight (closed loop)"
    text = f"trace {config.trace}, {config.trace_speedup:g} times as fast"
    if config.trace is None:
        kind = "Poisson" if config.burstiness == 1 else f"gamma with burstiness {config.burstiness:g}"
        text = f"{kind}, {_rate(config)} per second"
    limit = "" if config.concurrency is None else f", at most {config.concurrency} in flight"
    return f"{text}{limit} (open loop)"


def _rate(config: BenchConfig) -> str:
    return f"{config.request_rate:g}" if config.ramp is None else "{:g} growing to {:g}".format(*config.ramp)


def _throughput(config: BenchConfig, summary: Summary) -> Section:
    facts = [
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
        facts.append(("most output in a second", f"{summary.peak_output_token_throughput:.0f} tokens"))
    if summary.num_short_replies:
        facts.append(("short replies", f"{summary.num_short_replies} with fewer tokens than asked for"))
    if summary.goodput is not None:
        good = f"{summary.goodput.request_goodput:.2f} requests/s, {summary.goodput.share:.1%} of requests"
        facts.append(("goodput", f"{good} within {config.limits}"))
    return _facts(*facts)


def _latencies(summary: Summary) -> Section:
    latencies = {
        "TTFT, first token": summary.ttft_ms,
        "TPOT, per output token": summary.tpot_ms,
        "ITL, between chunks": summary.itl_ms,
        "E2EL, whole request": summary.e2el_ms,
        "queued in the client": summary.client.queue_ms,
        "client's own lag": summary.client.lag_ms,
    }
    rows = tuple(
        Row(label, _columns(distribution))
        for label, distribution in latencies.items()
        if distribution is not None or not label.startswith(("queued", "client"))
    )
    return Section(rows, "ms", LATENCY_COLUMNS)


def _columns(distribution: Distribution | None) -> tuple[str, ...]:
    if distribution is None:
        return (MISSING,) * len(LATENCY_COLUMNS)
    return tuple(f"{value:.2f}" for value in astuple(distribution))


def _sweep_cells(step: SweepStep) -> tuple[str, ...]:
    summary = step.summary
    assert summary.goodput is not None, "a sweep has limits"
    return (
        f"{summary.request_throughput:.2f}",
        f"{summary.output_token_throughput:.1f}",
        *(
            MISSING if distribution is None else f"{value:.1f}"
            for distribution in (summary.ttft_ms, summary.tpot_ms)
            for value in ((distribution.p50, distribution.p99) if distribution else (0.0, 0.0))
        ),
        f"{summary.num_requests - summary.num_succeeded}",
        f"{summary.goodput.share:.1%}",
    )
