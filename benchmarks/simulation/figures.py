"""The figures of a simulation, latencies, use of the slots, reuse of prefixes, fairness; and as a table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulation.meter import jain
from simulation.requests import Fate, Records
from simulation.simulation import Played

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Floats) -> "Spread | None":
        """The spread of the values that are numbers; None if there are none."""
        known = values[~np.isnan(values)]
        if not known.size:
            return None
        p50, p90, p99 = np.quantile(known, _QUANTILES).tolist()
        return cls(float(known.mean()), p50, p90, p99, float(known.max()))


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """Says how some of the requests were served. Times in seconds; TTFT and slowdown of those that finished."""

    num_requests: int
    queueing: Spread | None
    ttft: Spread | None
    slowdown: float | None  # mean of time taken over time needed alone


@dataclass(frozen=True, slots=True)
class Figures:
    """Holds what one setting came to. Latencies are of requests that finished, queueing times of all that got a
    slot.
    """

    setting: str
    num_requests: int
    fates: dict[str, int]
    num_starved: int  # requests that waited longer for a slot than the limit, whether they got one or not
    simulated_s: float
    num_steps: int
    num_checks: int
    output_tokens_per_s: float
    prompt_tokens_per_s: float  # those that were computed or reused
    queueing: Spread | None
    ttft: Spread | None
    tpot: Spread | None
    longest_overtaking_s: float
    longest_tenant_gap_s: float
    slot_use: float | None  # share of the slots' time in use while somebody waited; None: nobody ever did
    backlogged_share: float  # of the steps' time
    prefix_hit_rate: float  # of prompt tokens, those that need not be computed
    num_copied_tokens: int
    num_preemptions: int
    jain_served: float  # of tokens received over the fair share, in windows of time
    jain_slowdown: float  # of tenants' mean slowdowns
    largest_tenant: GroupFigures  # the one with the most requests
    other_tenants: GroupFigures | None
    most_urgent: GroupFigures  # the requests of the lowest priority number
    less_urgent: GroupFigures | None


def figures_of(setting: str, played: Played, starved_after: float) -> Figures:
    """`starved_after`: seconds of waiting for a slot that count as starving."""
    records, use = played.meter.records, played.meter.use
    fate = records.column("fate")
    is_finished = fate == Fate.FINISHED
    tenant = records.column("tenant").astype(int)
    counts = np.bincount(tenant, minlength=1)
    is_largest = tenant == counts.argmax()
    priority = records.column("priority")
    is_urgent = priority == priority.min()
    slowdowns = _slowdowns(records)
    prompts, outputs = records.column("num_prompt_tokens"), records.column("num_output_tokens")
    was_admitted = ~np.isnan(records.column("admission"))
    return Figures(
        setting=setting,
        num_requests=len(records),
        fates={each.name.lower(): int((fate == each).sum()) for each in Fate},
        num_starved=int((_waits(records) > starved_after).sum()),
        simulated_s=played.duration,
        num_steps=played.num_steps,
        num_checks=played.num_checks,
        output_tokens_per_s=outputs.sum() / played.duration,
        prompt_tokens_per_s=prompts[was_admitted].sum() / played.duration,
        queueing=Spread.of(records.column("admission") - records.column("arrival")),
        ttft=Spread.of(_ttfts(records)[is_finished]),
        tpot=Spread.of(_tpots(records)[is_finished]),
        longest_overtaking_s=use.longest_overtaking,
        longest_tenant_gap_s=played.meter.shares.longest_gap,
        slot_use=_slot_use(played),
        backlogged_share=use.backlogged / use.busy if use.busy else 0.0,
        prefix_hit_rate=float(records.column("num_cached_tokens").sum() / max(1.0, prompts[was_admitted].sum())),
        num_copied_tokens=use.num_copied_tokens,
        num_preemptions=int(records.column("num_preemptions").sum()),
        jain_served=played.meter.shares.jain,
        jain_slowdown=jain([float(slowdowns[(tenant == i) & is_finished].mean()) for i in set(tenant[is_finished])]),
        largest_tenant=_group_figures(records, is_largest, slowdowns),
        other_tenants=None if is_largest.all() else _group_figures(records, ~is_largest, slowdowns),
        most_urgent=_group_figures(records, is_urgent, slowdowns),
        less_urgent=None if is_urgent.all() else _group_figures(records, ~is_urgent, slowdowns),
    )


def _ttfts(records: Records) -> Floats:
    return records.column("first_token") - records.column("arrival")


def _waits(records: Records) -> Floats:
    """Seconds until the first slot, or until the end without one."""
    admission = records.column("admission")
    until = np.where(np.isnan(admission), records.column("end"), admission)
    return until - records.column("arrival")


def _tpots(records: Records) -> Floats:
    """Seconds for each token after the first; not a number for those of a single one."""
    num_further = records.column("num_output_tokens") - 1
    return (records.column("end") - records.column("first_token")) / np.where(num_further > 0, num_further, np.nan)


def _slowdowns(records: Records) -> Floats:
    return (records.column("end") - records.column("arrival")) / records.column("ideal")


def _slot_use(played: Played) -> float | None:
    use = played.meter.use
    if not use.backlogged:
        return None
    return use.backlogged_slots / use.backlogged / played.num_slots


def _group_figures(records: Records, chosen: Bools, slowdowns: Floats) -> GroupFigures:
    finished = chosen & (records.column("fate") == Fate.FINISHED)
    return GroupFigures(
        num_requests=int(chosen.sum()),
        queueing=Spread.of((records.column("admission") - records.column("arrival"))[chosen]),
        ttft=Spread.of(_ttfts(records)[finished]),
        slowdown=float(slowdowns[finished].mean()) if finished.any() else None,
    )


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


def rows_of(figures: Sequence[Figures]) -> list[list[str]]:
    """The table: a column for each."""
    return [["", *(each.setting for each in figures)], *([label, *map(cell, figures)] for label, cell in _ROWS)]


def _quantiles(spread: Spread | None, factor: float) -> str:
    if spread is None:
        return _NOTHING
    return " ".join(f"{factor * value:.3g}" for value in (spread.p50, spread.p90, spread.p99))


def _ttft(group: GroupFigures | None) -> str:
    return _NOTHING if group is None else _quantiles(group.ttft, 1)


def _slowdown(group: GroupFigures | None) -> str:
    return _NOTHING if group is None or group.slowdown is None else f"{group.slowdown:.1f}"
