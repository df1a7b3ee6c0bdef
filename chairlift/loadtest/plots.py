"""Draws the figures of a test or a sweep.

The plots need matplotlib, which is imported only when figures are drawn, and without pyplot: no window system, no
global state.
"""

from typing import TYPE_CHECKING

import numpy as np

from chairlift.loadtest.records import MS_PER_S
from chairlift.loadtest.summary import BenchResult, Sweep, running_at, token_rates

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


NUM_BINS = 60
BLUE, ORANGE, RED, GREY = "#2563eb", "#d97706", "#dc2626", "#6b7280"


def draw_test(result: BenchResult) -> "Figure":
    """The share of requests below each latency, throughput over time, TTFT against arrival."""
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
        _finish(axes, title, "ms", "share of them within", x_limit=limit_ms)
    _plot_throughput(throughput, result)
    failed = [record.intended_at - result.started_at for record in result.records if record.failure is not None]
    succeeded = [record.intended_at - result.started_at for record in good]
    arrivals.scatter(succeeded, [r.ttft * MS_PER_S for r in good], s=8, color=BLUE, label="succeeded")
    arrivals.scatter(failed, [0.0] * len(failed), s=24, color=RED, marker="x", label="failed")
    _finish(arrivals, "TTFT against arrival", "s, when the request was due", "ms", y_limit=limits.get("ttft"))
    figure.suptitle(f"{result.config.model}: {len(good)} of {len(result.records)} requests succeeded")
    return figure


def draw_sweep(sweep: Sweep) -> "Figure":
    """TTFT, TPOT, throughput and the share of good requests against what was swept."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    (ttft, tpot), (throughput, share) = figure.subplots(2, 2)
    values, summaries = list(sweep.tests), [test.summary for test in sweep.tests.values()]
    for axes, name, title in (
        (ttft, "ttft", "Time to first token (TTFT)"),
        (tpot, "tpot", "Time per output token (TPOT)"),
    ):
        for percentile, style in (("p50", "-"), ("p90", "--"), ("p99", ":")):
            heights = [getattr(getattr(summary, f"{name}_ms"), percentile, np.nan) for summary in summaries]
            axes.plot(values, heights, color=BLUE, linestyle=style, marker="o", label=percentile)
        _finish(axes, title, sweep.name, "ms", y_limit=sweep.config.limits.get(name))
    throughput.plot(values, [summary.output_token_throughput for summary in summaries], color=BLUE, marker="o")
    _finish(throughput, "Output throughput", sweep.name, "tokens/s")
    share.plot(values, [100 * (summary.good_share or 0) for summary in summaries], color=BLUE, marker="o")
    share.axhline(100 * sweep.config.goodput_share, color=RED, label="wanted")
    _finish(share, "Requests within the limits", sweep.name, "%")
    found = "none meets the limits"
    if sweep.highest is not None:
        found = f"{sweep.highest:g} is the highest within the limits"
        for axes in figure.axes:
            axes.axvline(sweep.highest, color=GREY, linestyle=":")
    figure.suptitle(f"sweep of {sweep.name}: {found}")
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


def _finish(
    axes: "Axes", title: str, x_label: str, y_label: str, x_limit: float | None = None, y_limit: float | None = None
) -> None:
    """To be called when all else is drawn: draws limits in ms, and lets the axis reach from 0 to the largest value."""
    for limit_ms, draw in ((x_limit, axes.axvline), (y_limit, axes.axhline)):
        if limit_ms is not None:
            draw(limit_ms, color=RED, label=f"limit {limit_ms:g} ms")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.spines["top"].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend()
