"""Figures of several settings as text: a row for each figure, a column for each setting."""

from collections.abc import Callable, Sequence

from simulation.figures import Figures, GroupFigures, Spread

_LABEL_WIDTH, _COLUMN_WIDTH = 34, 22
_NOTHING = "-"

Cell = Callable[[Figures], str]

_ROWS: tuple[tuple[str, Cell], ...] = (
    ("requests", lambda f: f"{f.num_requests:,}"),
    ("finished", lambda f: f"{f.fates['finished']:,}"),
    (
        "left / expired / timed out",
        lambda f: f"{f.fates['left']:,} / {f.fates['expired']:,} / {f.fates['timed_out']:,}",
    ),
    ("refused, queue full", lambda f: f"{f.fates['refused']:,}"),
    ("starved", lambda f: f"{f.num_starved:,}"),
    ("simulated hours", lambda f: f"{f.simulated_s / 3600:.2f}"),
    ("steps (full checks)", lambda f: f"{f.num_steps:,} ({f.num_checks:,})"),
    ("output tokens/s", lambda f: f"{f.output_tokens_per_s:,.0f}"),
    ("queueing, s: p50 p90 p99", lambda f: _quantiles(f.queueing, 1)),
    ("longest wait, s", lambda f: _NOTHING if f.queueing is None else f"{f.queueing.max:,.1f}"),
    ("TTFT, s: p50 p90 p99", lambda f: _quantiles(f.ttft, 1)),
    ("TPOT, ms: p50 p90 p99", lambda f: _quantiles(f.tpot, 1000)),
    ("slots in use under backlog", lambda f: _NOTHING if f.slot_use is None else f"{f.slot_use:.1%}"),
    ("time under backlog", lambda f: f"{f.backlogged_share:.1%}"),
    ("prefix hit rate, tokens", lambda f: f"{f.prefix_hit_rate:.1%}"),
    ("copied tokens", lambda f: f"{f.num_copied_tokens:,}"),
    ("preemptions", lambda f: f"{f.num_preemptions:,}"),
    ("Jain, tokens over fair share", lambda f: f"{f.jain_served:.3f}"),
    ("Jain, mean slowdown", lambda f: f"{f.jain_slowdown:.3f}"),
    ("largest tenant's TTFT, s", lambda f: _ttft(f.largest_tenant)),
    ("other tenants' TTFT, s", lambda f: _ttft(f.other_tenants)),
    ("largest tenant's slowdown", lambda f: _slowdown(f.largest_tenant)),
    ("other tenants' slowdown", lambda f: _slowdown(f.other_tenants)),
    ("most urgent requests' TTFT, s", lambda f: _ttft(f.most_urgent)),
    ("less urgent requests' TTFT, s", lambda f: _ttft(f.less_urgent)),
    ("overtaken by at most, s", lambda f: f"{f.longest_overtaking_s:,.1f}"),
    ("a tenant waits at most, s", lambda f: f"{f.longest_tenant_gap_s:,.1f}"),
)


def format_table(figures: Sequence[Figures]) -> str:
    """The table, without a line break at its end."""
    lines = [" " * _LABEL_WIDTH + "".join(f"{each.setting:>{_COLUMN_WIDTH}}" for each in figures)]
    for label, cell in _ROWS:
        lines.append(f"{label:<{_LABEL_WIDTH}}" + "".join(f"{cell(each):>{_COLUMN_WIDTH}}" for each in figures))
    return "\n".join(lines)


def _quantiles(spread: Spread | None, factor: float) -> str:
    if spread is None:
        return _NOTHING
    return " ".join(f"{factor * value:.3g}" for value in (spread.p50, spread.p90, spread.p99))


def _ttft(group: GroupFigures | None) -> str:
    return _NOTHING if group is None else _quantiles(group.ttft, 1)


def _slowdown(group: GroupFigures | None) -> str:
    return _NOTHING if group is None or group.slowdown is None else f"{group.slowdown:.1f}"
