"""The report file: one HTML page that loads nothing from elsewhere.

Needs matplotlib, which is imported only when figures are drawn, and without pyplot: no window system, no global state.
"""

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from chairlift.loadtest.records import MS_PER_S, BenchError
from chairlift.loadtest.report import Table, lag_warning, result_tables, sweep_tables
from chairlift.loadtest.summary import BenchResult, Summary, Sweep, running_at, token_rates

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS_PER_INCH = 144
NUM_BINS = 60
BLUE, ORANGE, RED, GREY = "#2563eb", "#d97706", "#dc2626", "#6b7280"

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
h1 {{ font-size: 1.5rem; }}
table {{ border-collapse: collapse; margin: 1.5rem 0; }}
th, td {{ padding: .25rem .9rem; border-bottom: 1px solid #8884; }}
th {{ font-weight: 600; text-align: left; }}
.columns td, .columns tr:first-child th + th {{ text-align: right; font-variant-numeric: tabular-nums; }}
.note {{ border-left: 4px solid #d97706; padding: .5rem 1rem; }}
.tables {{ overflow-x: auto; }}
img {{ width: 100%; border-radius: 6px; }}
</style>
</head>
<body>
<h1>{title}</h1>
{notes}
<img src="data:image/png;base64,{image}" alt="Plots of the figures in the tables below">
<div class="tables">
{tables}
</div>
</body>
</html>
"""


def require_matplotlib() -> None:
    """Raises `BenchError` if it is absent: better before a run than after it."""
    if find_spec("matplotlib") is None:
        raise BenchError("--report needs matplotlib: pip install 'chairlift[bench]', or leave --report out")


def write_test_report(path: Path, result: BenchResult, summary: Summary) -> None:
    """The report of one test in which something succeeded."""
    notes = [lag_warning(summary.client)] if summary.client.has_fallen_behind else []
    tables = result_tables(result.config, summary)
    _write(path, f"Load test of {result.config.model}", tables, notes, result_figure(result, summary))


def write_sweep_report(path: Path, sweep: Sweep) -> None:
    """The report of a sweep."""
    notes = [
        f"{sweep.values.name} {step.value:g}: {lag_warning(step.summary.client)}"
        for step in sweep.steps
        if step.summary.client.has_fallen_behind
    ]
    title = f"Load test of {sweep.steps[0].result.config.model}: sweep of {sweep.values.name}"
    _write(path, title, sweep_tables(sweep), notes, sweep_figure(sweep))


def _write(path: Path, title: str, tables: Sequence[Table], notes: Sequence[str], figure: "Figure") -> None:
    image = BytesIO()
    figure.savefig(image, format="png", dpi=DOTS_PER_INCH)
    page = _PAGE.format(
        title=escape(title),
        notes="\n".join(f'<p class="note">{escape(note)}</p>' for note in notes),
        image=b64encode(image.getvalue()).decode(),
        tables="\n".join(map(_html_table, tables)),
    )
    path.write_text(page, encoding="utf-8")


def _html_table(table: Table) -> str:
    rows = "\n".join(_html_row(row, "td") for row in table.rows)
    if not table.heading:
        return f"<table>\n{rows}\n</table>"
    return f'<table class="columns">\n{_html_row(table.heading, "th")}\n{rows}\n</table>'


def _html_row(row: Sequence[str], tag: str) -> str:
    cells = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row[1:])
    return f"<tr><th>{escape(row[0])}</th>{cells}</tr>"


def result_figure(result: BenchResult, summary: Summary) -> "Figure":
    """The share of requests below each latency, throughput over time, TTFT against arrival. Something succeeded."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 11), layout="constrained")
    (ttft, tpot), (itl, e2el), (throughput, arrivals) = figure.subplots(3, 2)
    limits, good = result.config.limits, result.succeeded
    latencies = {
        ("Time to first token (TTFT)", ttft, limits.get("ttft")): [record.ttft for record in good],
        ("Time per output token (TPOT)", tpot, limits.get("tpot")): [r.tpot for r in good if r.tpot is not None],
        ("Inter-token latency (ITL)", itl, None): [gap for record in good for gap in record.inter_token_latencies],
        ("Whole request (E2EL)", e2el, limits.get("e2el")): [record.latency for record in good],
    }
    for (title, axes, limit_ms), seconds in latencies.items():
        if seconds:
            axes.ecdf(np.asarray(seconds) * MS_PER_S, color=BLUE)
        if any(seconds):
            axes.set_xscale("log")  # long tails and far limits stay readable
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("")
        _draw_limit(axes, limit_ms, is_upright=True)
        _finish(axes, title, "ms", "share of them within")
    _plot_throughput(throughput, result)
    moments: dict[str, list[float]] = {kind: [] for kind in ("succeeded", "failed")}
    for record in result.records:
        kind = "succeeded" if record.failure is None else "failed"
        moments[kind].append(record.intended_at - result.started_at)
    arrivals.scatter(moments["succeeded"], [r.ttft * MS_PER_S for r in good], s=8, color=BLUE, label="succeeded")
    arrivals.scatter(moments["failed"], [0.0] * len(moments["failed"]), s=24, color=RED, marker="x", label="failed")
    _draw_limit(arrivals, limits.get("ttft"), is_upright=False)
    _finish(arrivals, "TTFT against arrival", "s, when the request was due", "ms")
    figure.suptitle(f"{result.config.model}: {summary.num_succeeded} of {summary.num_requests} requests succeeded")
    return figure


def sweep_figure(sweep: Sweep) -> "Figure":
    """TTFT, TPOT, throughput and the share of good requests against what was swept."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    (ttft, tpot), (throughput, share) = figure.subplots(2, 2)
    config, name = sweep.steps[0].result.config, sweep.values.name
    values = [step.value for step in sweep.steps]
    latencies = ((ttft, "ttft", "Time to first token (TTFT)"), (tpot, "tpot", "Time per output token (TPOT)"))
    for axes, latency, title in latencies:
        for percentile, style in (("p50", "-"), ("p90", "--"), ("p99", ":")):
            heights = [getattr(getattr(step.summary, f"{latency}_ms"), percentile, np.nan) for step in sweep.steps]
            axes.plot(values, heights, color=BLUE, linestyle=style, marker="o", label=percentile)
        _draw_limit(axes, config.limits.get(latency), is_upright=False)
        _finish(axes, title, name, "ms")
    throughput.plot(values, [step.summary.output_token_throughput for step in sweep.steps], color=BLUE, marker="o")
    _finish(throughput, "Output throughput", name, "tokens/s")
    share.plot(values, [100 * step.good_share for step in sweep.steps], color=BLUE, marker="o")
    share.axhline(100 * config.goodput_share, color=RED, label="wanted")
    _finish(share, "Requests within the limits", name, "%")
    found = "none meets the limits"
    if sweep.highest is not None:
        found = f"{sweep.highest:g} is the highest within the limits"
        for axes in (ttft, tpot, throughput, share):
            axes.axvline(sweep.highest, color=GREY, linestyle=":")
    figure.suptitle(f"{config.model}: sweep of {name}, {found}")
    return figure


def _plot_throughput(axes: "Axes", result: BenchResult) -> None:
    width_s = result.duration_s / NUM_BINS
    moments = np.arange(0.5, NUM_BINS, dtype=np.float64) * width_s
    rates = token_rates(result.succeeded, result.started_at, NUM_BINS, width_s)
    axes.fill_between(moments, rates, step="mid", color=BLUE, alpha=0.5)
    _finish(axes, "Throughput over time", "s", "output tokens/s")
    axes.yaxis.label.set_color(BLUE)
    running = axes.twinx()
    running.plot(moments, running_at(result.records, result.started_at + moments), color=ORANGE)
    _finish(running, "", "", "requests in flight")
    running.yaxis.label.set_color(ORANGE)


def _draw_limit(axes: "Axes", limit_ms: float | None, is_upright: bool) -> None:
    if limit_ms is not None:
        draw = axes.axvline if is_upright else axes.axhline
        draw(limit_ms, color=RED, label=f"limit {limit_ms:g} ms")


def _finish(axes: "Axes", title: str, x_label: str, y_label: str) -> None:
    """Called once all is drawn: the axis then reaches from 0 to the largest value."""
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.spines["top"].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend()
