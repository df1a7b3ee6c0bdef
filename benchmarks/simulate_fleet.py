"""A fleet under a simulated load: replicas behind each of four routers, real schedulers, a formula for a step's time.

    python benchmarks/simulate_fleet.py --requests 1000000 --replicas 16

Prints reuse of prefixes, TTFT, imbalance, and what the loss of a replica costs (docs/scaling.md, whose figures and
picture these are). The last line is JSON.
"""

import argparse
import sys
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from time import perf_counter

from machine import format_table, parser_of, print_report
from simulation.costs import COSTS
from simulation.figures import Spread
from simulation.fleet import ROUTERS, Fleet, FleetFigures, Loss
from simulation.simulation import Machine
from simulation.workload import Synthetic, capacity, conversations


def main() -> int:
    """Simulates every fleet; the exit code is 2 for settings that cannot be used."""
    arguments = _parse_arguments()
    try:
        figures = [_simulate(router, arguments) for router in arguments.routers]
    except ValueError as error:
        print(f"simulate_fleet.py: {error}", file=sys.stderr)
        return 2
    print(_table(figures))
    if arguments.plot is not None:
        _plot(figures, arguments.plot)
    print_report(arguments, results=list(map(asdict, figures)))
    return 0


def _simulate(router: str, arguments: argparse.Namespace) -> FleetFigures:
    cost = COSTS[arguments.cost]
    machine = Machine(arguments.slots, arguments.slot_tokens, arguments.budget, arguments.steps_per_launch)
    synthetic = Synthetic.of_flags(arguments, arguments.requests)
    rate = arguments.load * arguments.replicas * capacity(synthetic, machine.num_slots, cost)
    synthetic = replace(synthetic, rate=rate)
    loss = Loss(arguments.lose_at if arguments.lose_at is not None else inf, arguments.downtime)
    begin = perf_counter()
    figures = Fleet(conversations(synthetic), machine, arguments.replicas, router, cost, loss).run()
    print(f"{router}: {figures.num_requests} requests in {perf_counter() - begin:.0f} s", file=sys.stderr)
    return figures


def _table(figures: list[FleetFigures]) -> str:
    def times(each: FleetFigures, is_after_loss: bool) -> str:
        spread = each.ttft_after_loss if is_after_loss else each.ttft
        return "-" if spread is None else f"{spread.p50:.3f} {spread.p99:.3f}"

    rows = [
        ("requests", [f"{each.num_requests:,}" for each in figures]),
        ("prompt tokens reused", [f"{each.hit_rate:.1%}" for each in figures]),
        ("of those computed before", [f"{each.hit_rate / each.known_rate:.1%}" for each in figures]),
        ("TTFT, s: p50 p99", [times(each, False) for each in figures]),
        ("while a replica is away", [times(each, True) for each in figures]),
        ("requests asked again", [f"{each.num_asked_again:,}" for each in figures]),
        ("busiest replica over the mean", [f"{each.imbalance:.2f}" for each in figures]),
        ("time in steps", [f"{each.utilization:.1%}" for each in figures]),
        ("output tokens/s", [f"{each.output_tokens_per_s:,.0f}" for each in figures]),
    ]
    return format_table([["", *(each.router for each in figures)], *([name, *cells] for name, cells in rows)])


def _plot(figures: list[FleetFigures], file: Path) -> None:
    """A bar of each router for reuse, for the slowest first tokens, and for how unevenly the replicas are used."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    def p99s(spreads: list[Spread | None]) -> list[float]:
        return [each.p99 if each else 0.0 for each in spreads]

    panels = {
        "prompt tokens reused, %": [100 * each.hit_rate for each in figures],
        "TTFT p99, s": p99s([each.ttft for each in figures]),
        "TTFT p99 while one is away, s": p99s([each.ttft_after_loss for each in figures]),
        "busiest replica over the mean": [each.imbalance for each in figures],
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(12, 2.6), layout="constrained", sharey=True)
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        if title.startswith("TTFT") and min(values) > 0:
            axis.set_xscale("log")
        bars = axis.barh([each.router for each in figures], values, color="#4878a8")
        axis.bar_label(bars, fmt="%.3g", padding=3)
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.savefig(file, dpi=110)


def _parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=list(ROUTERS))
    parser.add_argument("--plot", type=Path, help="file for a picture; needs matplotlib")
    group = parser.add_argument_group("the fleet")
    group.add_argument("--replicas", type=int, default=16)
    group.add_argument("--lose-at", type=float, help="second at which a replica is lost")
    group.add_argument("--downtime", type=float, default=60.0, help="seconds until it is back, empty")
    group.add_argument("--cost", choices=COSTS, default="8b-h200", help="how long a step takes")
    group.add_argument("--slots", type=int, default=128)
    group.add_argument("--slot-tokens", type=int, default=4096)
    group.add_argument("--budget", type=int, default=8192, help="tokens of a step")
    group.add_argument("--steps-per-launch", type=int, default=4)
    group = parser.add_argument_group("the workload")
    group.add_argument("--requests", type=int, default=20_000)
    group.add_argument("--load", type=float, default=0.8, help="rate as a share of what is served without reuse")
    parser.add_argument("--rate", type=float, help=argparse.SUPPRESS)
    Synthetic.add_flags(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
