"""The scheduler under a simulated load: the real policy and the cache's books, a formula for the time of a step.

    python benchmarks/simulate.py --requests 1000000 --backlog 512 --tenants 8 --families 20

Plays the same workload under each setting and prints what came of it: queueing time, TTFT, TPOT, use of the slots,
reuse of prefixes, fairness. Whatever must always hold is checked at every step, and a breach ends the run. The workload
is synthetic, or a file in the load test's trace format (docs/scheduling.md). The last line is JSON.
"""

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter

from simulation.arguments import cost_of, machine_of, parse_arguments, settings_of, synthetic_of
from simulation.costs import CostModel
from simulation.figures import Figures, figures_of
from simulation.replay import read_workload
from simulation.simulation import Machine, Setting, Simulation
from simulation.synthetic import conversations
from simulation.table import format_table
from simulation.watch import Breach
from simulation.workload import Workload

from chairlift.bench.failures import BenchError

_SMALL = 20_000  # requests: up to here everything is checked at every step
_SELDOM = 1000


def main() -> int:
    """Simulates, prints a table, and as the last line all figures as JSON.

    The exit code is 2 for input that cannot be used, 1 if the scheduler did what it must not.
    """
    arguments = parse_arguments(__doc__)
    try:
        figures = _simulate_all(arguments)
    except (BenchError, ValueError) as error:
        print(f"simulate.py: {error}", file=sys.stderr)
        return 2
    except Breach as breach:
        print(f"WRONG: {breach}", file=sys.stderr)
        return 1
    print(format_table(figures))
    report = json.dumps({"arguments": _named(arguments), "results": [each.as_json() for each in figures]})
    if arguments.json is not None:
        arguments.json.write_text(report + "\n", encoding="utf-8")
    if arguments.plot is not None:
        from simulation.plot import write_plot  # matplotlib comes with an extra of the package

        write_plot(figures, arguments.plot)
    print(report)
    return 0


def _simulate_all(arguments: argparse.Namespace) -> list[Figures]:
    cost, figures = cost_of(arguments), []
    for budget in arguments.budgets:
        machine = machine_of(arguments, budget)
        for setting in settings_of(arguments):
            begin = perf_counter()
            result = _simulate(setting, machine, cost, arguments)
            print(
                f"{result.setting}: {result.num_requests} requests in {perf_counter() - begin:.0f} s", file=sys.stderr
            )
            figures.append(result)
    return figures


def _simulate(setting: Setting, machine: Machine, cost: CostModel, arguments: argparse.Namespace) -> Figures:
    workload, num_requests = _workload(arguments, machine, cost)
    simulation = Simulation(
        workload,
        machine,
        setting,
        cost,
        depth=arguments.backlog,
        check_every=arguments.check_every or (1 if num_requests <= _SMALL else _SELDOM),
        window=arguments.window,
    )
    outcome = simulation.run()
    budget = f" {machine.max_num_batched_tokens}" if len(arguments.budgets) > 1 else ""
    return figures_of(setting.name + budget, outcome, arguments.starved_after)


def _workload(arguments: argparse.Namespace, machine: Machine, cost: CostModel) -> tuple[Workload, int]:
    if arguments.workload is None:
        settings = synthetic_of(arguments, machine, cost)
        return conversations(settings), settings.num_requests
    lines = read_workload(arguments.workload, machine.slot_tokens, arguments.requests, arguments.speedup)
    return iter(lines), len(lines)


def _named(arguments: argparse.Namespace) -> dict[str, object]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}


if __name__ == "__main__":
    sys.exit(main())
