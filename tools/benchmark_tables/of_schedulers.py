"""The tables of docs/scheduling.md and docs/scaling.md: simulations, and what the scheduler costs."""

from .cells import chosen, counted, figures, percent, text
from .records import at, named, waiting
from .source import Source
from .table import Column, Table

SCHEDULING, SCALING = "docs/scheduling.md", "docs/scaling.md"
COST = Source("scheduler-cost-2-cores")

_setting = chosen(
    "",
    "setting",
    {
        "first-come": "first come",
        "prefixes": "+ prefix reuse",
        "fair": "+ tenants",
        "priorities": "+ priorities",
        "preemption": "+ preemption",
    },
)
_output = figures("output tokens/s", "output_tokens_per_s")
_not_computed = percent("prompt tokens not computed", "prefix_hit_rate")
_preemptions = figures("preemptions", "num_preemptions")
_starved = figures("requests that starved", "num_starved")
_longest = figures("longest wait for a slot, s", "queueing/max", ".1f")
_urgent = figures("TTFT of the most urgent, s: p50, p99", "most_urgent/ttft/p50,most_urgent/ttft/p99", ".2f")
_others = figures("TTFT of the others, s: p50, p99", "other_tenants/ttft/p50,other_tenants/ttft/p99", ".2f")
_ttft = figures("TTFT, s: p50, p99", "ttft/p50,ttft/p99", ".3f")


def _simulated(mark: str, name: str, recorded: str, *columns: Column, is_transposed: bool = False) -> Table:
    source = Source(name, where="Simulated", recorded=recorded)
    return Table(SCHEDULING, mark, source, at("results"), (_setting, *columns), is_transposed)


TABLES = (
    _simulated(
        "million",
        "simulation-million-backlog",
        "b56b716",
        percent("slots in use", "slot_use"),
        _output,
        _not_computed,
        figures("TPOT, ms: p50, p99", "tpot/p50,tpot/p99", factor=1000),
        figures("TTFT of the flooding tenant, s: p50, p99", "largest_tenant/ttft/p50,largest_tenant/ttft/p99", ".1f"),
        figures("TTFT of the seven others, s: p50, p99", "other_tenants/ttft/p50,other_tenants/ttft/p99", ".3f"),
        _longest,
        figures("longest time in which a waiting tenant got no slot, s", "longest_tenant_gap_s", ".1f"),
        figures("Jain's index of tokens over fair share", "jain_served", ".3f"),
        figures("TTFT of the urgent tenth, s: p50, p99", "most_urgent/ttft/p50,most_urgent/ttft/p99", ".3f"),
        _preemptions,
        _starved,
        is_transposed=True,
    ),
    _simulated(
        "tight-memory",
        "simulation-million-tight-memory",
        "2db139b",
        percent("slots in use", "slot_use"),
        figures("requests that ended", "fates/finished"),
        _longest,
        _preemptions,
        _starved,
    ),
    _simulated("flood", "simulation-flood", "0931be5", _others, _output),
    _simulated("urgent", "simulation-urgent", "0931be5", _urgent, _output),
    _simulated("turns", "simulation-turns", "0931be5", _ttft, _not_computed),
    Table(
        SCHEDULING,
        "cost-rows",
        COST,
        named("microseconds", "rows"),
        (
            counted("", "name"),
            figures("`schedule`", "schedule", ",.1f"),
            figures("`advance`", "advance", ",.1f"),
            figures("`update`", "update", ",.1f"),
            figures("all", "total", ",.1f"),
        ),
    ),
    Table(
        SCHEDULING,
        "cost-waiting",
        COST,
        waiting,
        (
            text("waiting", "name"),
            *(figures(f"{int(length):,}", length) for length in ("0", "100", "10000", "100000")),
        ),
    ),
    Table(
        SCHEDULING,
        "cost-queue",
        COST,
        named("microseconds", "queue"),
        (
            counted("", "name"),
            figures("`add`", "add", ".1f"),
            figures("`abort`", "abort", ".1f"),
            figures("`expire`, nothing due", "expire none", ".1f"),
            figures("`expire`, many due at once, each", "expire each of many", ".1f"),
        ),
    ),
    Table(
        SCHEDULING,
        "cost-prefixes",
        COST,
        named("microseconds", "prefixes"),
        (
            text("what the slots share with the prompt", "name"),
            figures("packing the tokens", "pack"),
            figures("`match`", "match", ".1f"),
            figures("`insert`", "insert", ".1f"),
            figures("`remove`", "remove", ".1f"),
            figures("`schedule`, all of it", "schedule"),
        ),
    ),
    Table(
        SCALING,
        "fleet",
        Source("simulation-fleet", where="Simulated"),
        at("results"),
        (
            text("", "router"),
            percent("prompt tokens reused", "hit_rate"),
            Column(
                "of those computed before", lambda run: f"{run['hit_rate'] / run['known_rate']:.1%}".replace("%", " %")
            ),
            figures("TTFT p50, s", "ttft/p50", ".3f"),
            figures("TTFT p99, s", "ttft/p99", ".3f"),
            figures("TTFT p99 while a replica is away, s", "ttft_after_loss/p99", ".3f"),
            figures("the busiest replica's steps over the mean", "imbalance", ".2f"),
            percent("replicas' time in steps", "utilization", ".0f"),
            figures("requests asked again after the loss", "num_asked_again"),
            figures("seconds until all were answered", "duration"),
        ),
        is_transposed=True,
    ),
)
