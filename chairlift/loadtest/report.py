"""Reports of a test or a sweep: tables, warnings, the JSON file, and one HTML page that loads nothing else."""

import json
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from html import escape
from io import BytesIO
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.loadtest.records import RequestRecord
from chairlift.loadtest.summary import BenchResult, Distribution, Summary, Sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure


from chairlift.loadtest.plots import draw_sweep, draw_test

LABEL_WIDTH = 26
COLUMN_WIDTH = 12
DOTS_PER_INCH = 144
SWEEP_COLUMNS = ("requests/s", "tokens/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "failed", "good")
SWEPT_UNITS = {"rate": "requests/s asked for", "concurrency": "requests in flight"}

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; margin: 1.5rem 0; }}
th, td {{ padding: .25rem .9rem; border-bottom: 1px solid #8884; text-align: left; }}
tr:has(td + td) td {{ text-align: right; font-variant-numeric: tabular-nums; }}
.note {{ border-left: 4px solid #d97706; padding: .5rem 1rem; }}
img {{ width: 100%; border-radius: 6px; }}
</style>
</head>
<body>
<h1>{title}</h1>
{notes}
<img src="data:image/png;base64,{image}" alt="Plots of the figures in the tables below">
{tables}
</body>
</html>
"""

Table = Sequence[tuple[str, ...]]
"""Rows of a label and one cell of any width; or of more cells, which are columns under the first row."""


@dataclass(frozen=True, slots=True)
class Report:
    """`document` is for JSON; `draw` makes the plots of the page; `is_good` decides the exit code."""

    title: str
    tables: Sequence[Table]
    warnings: Sequence[str]
    document: dict[str, Any]
    draw: "Callable[[], Figure]"
    is_good: bool

    def __str__(self) -> str:
        """The tables as text, with a blank line between them."""
        return "\n\n".join("\n".join(map(_text_row, table)) for table in self.tables)

    def write_page(self, path: Path) -> None:
        image = BytesIO()
        self.draw().savefig(image, format="png", dpi=DOTS_PER_INCH)
        page = _PAGE.format(
            title=escape(self.title),
            notes="\n".join(f'<p class="note">{escape(warning)}</p>' for warning in self.warnings),
            image=b64encode(image.getvalue()).decode(),
            tables="\n".join(f"<table>\n{''.join(map(_html_row, table))}</table>" for table in self.tables),
        )
        path.write_text(page, encoding="utf-8")

    def write_json(self, path: Path) -> None:
        path.write_text(json.dumps(self.document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def report_test(result: BenchResult) -> Report:
    """One test. Its JSON has `config` (the key masked), `summary` and `requests`."""
    summary, config = result.summary, result.config
    rows = list(_rows(summary))
    tables: list[Table] = [
        [("server", config.endpoint_url), ("model", str(config.model)), ("arrivals", config.arrivals)],
        [row for row in rows if len(row) == 2],
        [("ms", "mean", "p50", "p90", "p99"), *(row for row in rows if len(row) > 2)],
        [(f"failed: {each.label}", f"{each.count} ({each.first_message})") for each in summary.failures],
    ]
    return Report(
        f"Load test of {config.model}",
        [table for table in tables if table],
        _warnings(summary),
        _document(result),
        lambda: draw_test(result),
        summary.num_succeeded == summary.num_requests,
    )


def report_sweep(sweep: Sweep) -> Report:
    """A row for each test, and what was found.

    Its JSON has `config`, the `highest` value that met the limits (or null), and `tests`: each has its `value` beside
    what one test alone has.
    """
    found = "none" if sweep.highest is None else f"{sweep.highest:g}"
    limits = f"{sweep.config.goodput} for {sweep.config.goodput_share:.0%} of requests"
    tests = [{"value": value, **_document(result)} for value, result in sweep.tests.items()]
    model = next(iter(sweep.tests.values())).config.model
    return Report(
        f"Load test of {model}: sweep of {sweep.name}",
        [
            [(SWEPT_UNITS[sweep.name], *SWEEP_COLUMNS), *starmap(_sweep_row, sweep.tests.items())],
            [("limits", limits), (f"highest {sweep.name}", found)],
        ],
        [line for value, test in sweep.tests.items() for line in _warnings(test.summary, f"{sweep.name} {value:g}: ")],
        {"config": sweep.config.model_dump(mode="json"), "highest": sweep.highest, "tests": tests},
        lambda: draw_sweep(sweep),
        sweep.highest is not None,
    )


def _text_row(row: tuple[str, ...]) -> str:
    label, *cells = row
    return f"{label:<{LABEL_WIDTH}}" + (cells[0] if len(cells) == 1 else "".join(f"{c:>{COLUMN_WIDTH}}" for c in cells))


def _html_row(row: tuple[str, ...]) -> str:
    label, *cells = map(escape, row)
    return f"<tr><th>{label}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n"


def _rows(summary: Summary) -> Iterator[tuple[str, ...]]:
    """A row for every figure that was measured and has a label: of one text, or of a latency's statistics."""
    for each in fields(summary):
        figure = getattr(summary, each.name)
        for label, text in each.metadata.items() if figure is not None else ():
            if isinstance(figure, Distribution):
                yield label, *(f"{value:.2f}" for value in astuple(figure))
            else:
                yield label, text.format(summary, figure)


def _sweep_row(value: float, result: BenchResult) -> tuple[str, ...]:
    summary = result.summary
    latencies = [
        f"{getattr(latency, percentile):.1f}" if latency else "-"
        for latency in (summary.ttft_ms, summary.tpot_ms)
        for percentile in ("p50", "p99")
    ]
    throughput = (f"{summary.request_throughput:.2f}", f"{summary.output_token_throughput:.1f}")
    num_failed = summary.num_requests - summary.num_succeeded
    return f"{value:g}", *throughput, *latencies, str(num_failed), f"{summary.good_share:.1%}"


def _warnings(summary: Summary, where: str = "") -> list[str]:
    """Warnings about a client that distorted its own measurement."""
    if not summary.has_lagging_client:
        return []
    lag = 0.0 if summary.client_lag_ms is None else summary.client_lag_ms.p99
    busy = f"its event loop was {lag:.0f} ms late (p99) and {summary.client_busy_share:.0%} of a core busy"
    return [
        f"{where}the load test itself fell behind: {busy}, which is in the latencies above; give it a core of its own, "
        "or lower the load"
    ]


def _document(result: BenchResult) -> dict[str, Any]:
    return {
        "config": result.config.model_dump(mode="json"),
        "summary": asdict(result.summary),
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
        "asked_prompt_tokens": record.asked_prompt_tokens,
        "asked_output_tokens": record.asked_output_tokens,
        "prompt_tokens": record.usage_prompt_tokens,
        "cached_tokens": record.usage_cached_tokens,
        "accepted_tokens": record.usage_accepted_tokens,
        "rejected_tokens": record.usage_rejected_tokens,
        "output_tokens": record.output_tokens,
        "output_token_source": record.output_token_source,
        "error": None if record.failure is None else str(record.failure),
    }
