"""The plots of a report. Imports matplotlib, so only `report` imports this, and only when a report is wanted.

Figures are made without pyplot: no window system, no state that outlives them.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from chairlift.bench.limits import Limits
from chairlift.bench.records import MS_PER_S, RequestRecord
from chairlift.bench.summary import BenchResult, Distribution, Summary
from chairlift.bench.sweep import Sweep
from chairlift.bench.timeline import running_at, token_rates

NUM_BINS = 60
BLUE, ORANGE, RED, GREY = "#2563eb", "#d97706", "#dc2626", "#6b7280"
PERCENTILES = {"p50": ("-", "#1e3a8a"), "p90": ("--", "#7c3aed"), "p99": (":", "#be185d")}
# Above this ratio of the largest to the median a linear axis would show a single bar.
LONG_TAIL = 20.0
# A limit this many times beyond the largest value would press all values into a corner: it is named, not drawn.
FAR_LIMIT = 1.5


def result_figure(result: BenchResult, summary: Summary) -> Figure:
    """Distributions of the four latencies, throughput over time, TTFT against arrival. Something succeeded."""
    figure = Figure(figsize=(12, 11), layout="constrained")
    (ttft, tpot), (itl, e2el), (throughput, arrivals) = figure.subplots(3, 2)
    limits = result.config.limits or Limits()
    good = result.succeeded
    _histogram(ttft, "Time to first token (TTFT)", [r.ttft for r in good], summary.ttft_ms, limits.ttft)
    tpots = [r.tpot for r in good if r.tpot is not None]
    _histogram(tpot, "Time per output token (TPOT)", tpots, summary.tpot_ms, limits.tpot)
    gaps = [gap for r in good for gap in r.inter_token_latencies]
    _histogram(itl, "Inter-token latency (ITL)", gaps, summary.itl_ms, None)
    _histogram(e2el, "Whole request (E2EL)", [r.latency for r in good], summary.e2el_ms, limits.e2el)
    _throughput(throughput, result)
    _arrivals(arrivals, result, limits.ttft)
    figure.suptitle(f"{result.config.model}: {summary.num_succeeded} of {summary.num_requests} requests succeeded")
    return figure


def sweep_figure(sweep: Sweep) -> Figure:
    """TTFT, TPOT, throughput and the share of good requests against what was swept."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    (ttft, tpot), (throughput, share) = figure.subplots(2, 2)
    config = sweep.steps[0].result.config
    limits = config.limits or Limits()
    summaries = [step.summary for step in sweep.steps]
    _percentiles(ttft, sweep, "Time to first token (TTFT)", [each.ttft_ms for each in summaries], limits.ttft)
    _percentiles(tpot, sweep, "Time per output token (TPOT)", [each.tpot_ms for each in summaries], limits.tpot)
    values = [step.value for step in sweep.steps]
    throughput.plot(values, [each.output_token_throughput for each in summaries], color=BLUE, marker="o")
    _dress(throughput, "Output throughput", sweep.values.name, "tokens/s")
    share.plot(values, [_good_percent(each) for each in summaries], color=BLUE, marker="o")
    share.axhline(100 * config.goodput_share, color=RED, label="wanted")
    _dress(share, "Requests within the limits", sweep.values.name, "%")
    share.set_ylim(0, 105)
    for axes in (ttft, tpot, throughput, share):
        if sweep.highest is not None:
            axes.axvline(sweep.highest, color=GREY, linestyle=":")
    found = "none meets the limits" if sweep.highest is None else f"{sweep.highest:g} is the highest within the limits"
    figure.suptitle(f"{config.model}: sweep of {sweep.values.name}, {found}")
    return figure


def _histogram(
    axes: Axes, title: str, seconds: Sequence[float], statistics: Distribution | None, limit_ms: float | None
) -> None:
    if statistics is None:
        axes.text(0.5, 0.5, "nothing to show", ha="center", transform=axes.transAxes, color=GREY)
        _dress(axes, title, "ms", "how many")
        return
    milliseconds = np.asarray(seconds) * MS_PER_S
    most = float(milliseconds.max())
    edges = np.histogram_bin_edges(milliseconds, bins=NUM_BINS)
    if 0 < LONG_TAIL * statistics.p50 < most:
        # Chunks that arrive in one piece have no time between them; a logarithm needs one.
        milliseconds = milliseconds.clip(min=statistics.p50 / LONG_TAIL)
        edges = np.geomspace(milliseconds.min(), most, NUM_BINS + 1)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    axes.hist(milliseconds, bins=edges.tolist(), color=BLUE, alpha=0.6)
    for name, (style, color) in PERCENTILES.items():
        value = getattr(statistics, name)
        axes.axvline(value, color=color, linestyle=style, label=f"{name} {value:,.1f} ms")
    _limit(axes, limit_ms, most, is_upright=True)
    _dress(axes, title, "ms", "how many")


def _throughput(axes: Axes, result: BenchResult) -> None:
    width_s = result.duration_s / NUM_BINS
    moments = np.arange(0.5, NUM_BINS, dtype=np.float64) * width_s
    rates = token_rates(result.succeeded, result.started_at, NUM_BINS, width_s)
    axes.fill_between(moments, rates, step="mid", color=BLUE, alpha=0.5)
    _dress(axes, "Throughput over time", "s", "output tokens/s")
    axes.yaxis.label.set_color(BLUE)
    beside = axes.twinx()
    beside.plot(moments, running_at(result.records, result.started_at + moments), color=ORANGE)
    _dress(beside, "", "", "requests in flight")
    beside.yaxis.label.set_color(ORANGE)


def _arrivals(axes: Axes, result: BenchResult, limit_ms: float | None) -> None:
    def due(records: Sequence[RequestRecord]) -> list[float]:
        return [record.intended_at - result.started_at for record in records]

    good = result.succeeded
    ttfts = [record.ttft * MS_PER_S for record in good]
    axes.scatter(due(good), ttfts, s=8, color=BLUE, alpha=0.6, label="succeeded")
    failed = [record for record in result.records if record.failure is not None]
    if failed:
        axes.scatter(due(failed), [0.0] * len(failed), s=24, color=RED, marker="x", label="failed")
    _limit(axes, limit_ms, max(ttfts), is_upright=False)
    _dress(axes, "TTFT against arrival", "s, when the request was due", "ms")


def _percentiles(
    axes: Axes, sweep: Sweep, title: str, distributions: Sequence[Distribution | None], limit_ms: float | None
) -> None:
    for name, (style, color) in PERCENTILES.items():
        values = [np.nan if each is None else getattr(each, name) for each in distributions]
        axes.plot([step.value for step in sweep.steps], values, color=color, linestyle=style, marker="o", label=name)
    _limit(axes, limit_ms, max((each.p99 for each in distributions if each is not None), default=0.0), False)
    _dress(axes, title, sweep.values.name, "ms")


def _limit(axes: Axes, limit_ms: float | None, most_ms: float, is_upright: bool) -> None:
    if limit_ms is None:
        return
    label = f"limit {limit_ms:g} ms"
    if limit_ms > FAR_LIMIT * most_ms:
        axes.plot([], [], color=RED, label=f"{label}, beyond")
    elif is_upright:
        axes.axvline(limit_ms, color=RED, label=label)
    else:
        axes.axhline(limit_ms, color=RED, label=label)


def _dress(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Called once all is drawn: the axis then reaches from 0 to the largest value."""
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.spines["top"].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend()


def _good_percent(summary: Summary) -> float:
    return 0.0 if summary.goodput is None else 100 * summary.goodput.share
