"""The scheduler under a simulated load: the real policy and the cache's books, a formula for the time of a step.

    python benchmarks/simulate.py --requests 1000000 --backlog 512 --tenants 8 --families 20

Plays the same workload under each setting and prints what came of it: queueing time, TTFT, TPOT, use of the slots,
reuse of prefixes, fairness. Whatever must always hold is checked at every step, and a breach ends the run. The workload
is synthetic, or a file in the load test's trace format (docs/scheduling.md, whose figures these are). The last line is
JSON.
"""

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter

from machine import format_table, parser_of, print_report
from simulation.costs import COSTS
from simulation.figures import Figures, figures_of, rows_of
from simulation.meter import Breach
from simulation.simulation import Machine, Setting, Simulation, settings
from simulation.workload import Synthetic, Workload, capacity, conversations, read_workload

from chairlift.loadtest.records import BenchError

_DEFAULT_REQUESTS = 20_000
_DEFAULT_LOAD = 0.8
_SMALL = 20_000  # requests: up to here everything is checked at every step
_SELDOM = 1000


def main() -> int:
    """Simulates, prints a table, and as the last line all figures as JSON.

    The exit code is 2 for input that cannot be used, 1 if the scheduler did what it must not.
    """
    arguments = _parse_arguments()
    try:
        figures = _simulate_all(arguments)
    except (BenchError, ValueError) as error:
        print(f"simulate.py: {error}", file=sys.stderr)
        return 2
    except Breach as breach:
        print(f"WRONG: {breach}", file=sys.stderr)
        return 1
    print(format_table(rows_of(figures)))
    print_report(arguments, results=list(map(asdict, figures)))
    return 0


def _simulate_all(arguments: argparse.Namespace) -> list[Figures]:
    figures = []
    compared = settings()
    for budget in arguments.budgets:
        machine = _machine(arguments, budget)
        for name in arguments.settings:
            begin = perf_counter()
            result = _simulate(compared[name], machine, arguments)
            elapsed = perf_counter() - begin
            print(f"{result.setting}: {result.num_requests} requests in {elapsed:.0f} s", file=sys.stderr)
            figures.append(result)
    return figures


def _simulate(setting: Setting, machine: Machine, arguments: argparse.Namespace) -> Figures:
    workload, num_requests = _workload(arguments, machine)
    simulation = Simulation(
        workload,
        machine,
        setting,
        COSTS[arguments.cost],
        depth=arguments.backlog,
        check_every=arguments.check_every or (1 if num_requests <= _SMALL else _SELDOM),
        window=arguments.window,
    )
    played = simulation.run()
    budget = f" {machine.max_num_batched_tokens}" if len(arguments.budgets) > 1 else ""
    return figures_of(setting.name + budget, played, arguments.starved_after)


def _machine(arguments: argparse.Namespace, budget: int) -> Machine:
    if budget < arguments.slots:
        raise ValueError(f"a budget of {budget} tokens cannot feed {arguments.slots} slots: raise --budgets")
    if arguments.backlog is not None and not 0 < arguments.backlog <= arguments.queue:
        raise ValueError(f"--backlog must be above 0 and at most --queue, not {arguments.backlog}")
    sizes = arguments.slots, arguments.slot_tokens, budget, arguments.steps_per_launch, arguments.queue
    return Machine(*sizes, arguments.cache_tokens, arguments.snapshots)


def _workload(arguments: argparse.Namespace, machine: Machine) -> tuple[Workload, int]:
    if arguments.workload is not None:
        lines = read_workload(arguments.workload, machine.slot_tokens, arguments.requests, arguments.speedup)
        return iter(lines), len(lines)
    num_requests = _DEFAULT_REQUESTS if arguments.requests is None else arguments.requests
    synthetic = Synthetic.of_flags(arguments, num_requests)
    if arguments.backlog is None and arguments.rate is None:
        rate = arguments.load * capacity(synthetic, machine.num_slots, COSTS[arguments.cost])
        synthetic = replace(synthetic, rate=rate)
    return conversations(synthetic), num_requests


def _parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    names = list(settings())
    parser.add_argument("--settings", nargs="+", choices=names, default=names)
    parser.add_argument("--starved-after", type=float, default=3600.0, help="seconds in the queue; counted")
    parser.add_argument("--window", type=float, default=10.0, help="seconds over which tenants' shares are compared")
    parser.add_argument("--check-every", type=int, help="steps between full checks (1; large workloads: 1000)")
    group = parser.add_argument_group("the machine")
    group.add_argument("--cost", choices=COSTS, default="135m-cpu", help="how long a step takes")
    group.add_argument("--slots", type=int, default=64)
    group.add_argument("--slot-tokens", type=int, default=2048)
    group.add_argument("--cache-tokens", type=int, help="that all slots have memory for; by default, all they can hold")
    group.add_argument("--snapshots", type=int, help="recurrent states kept; by default, layers have no such states")
    group.add_argument("--budgets", type=int, nargs="+", default=[1024], help="tokens of a step; each is simulated")
    group.add_argument("--steps-per-launch", type=int, default=1)
    group.add_argument("--queue", type=int, default=2**31, help="requests that may wait")
    group = parser.add_argument_group("the workload")
    group.add_argument("--workload", type=Path, help="file of one JSON object per line; by default a synthetic one")
    group.add_argument("--speedup", type=float, default=1.0, help="of the file's times")
    group.add_argument("--requests", type=int, help="by default all of the file, or 20,000")
    pressure = group.add_mutually_exclusive_group()
    pressure.add_argument("--backlog", type=int, help="so many wait at all times, however fast they are served")
    pressure.add_argument("--rate", type=float, help="conversations a second")
    pressure.add_argument("--load", type=float, default=_DEFAULT_LOAD, help="rate as a share of what can be served")
    Synthetic.add_flags(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
