"""The flags of simulate.py, and what they stand for. Functions raise `ValueError` with one line for the user."""

import argparse
from dataclasses import asdict, fields, replace
from pathlib import Path

from chairlift.bench.lengths import FORMS, Lengths
from simulation.costs import COSTS, CostModel
from simulation.settings import SETTINGS
from simulation.simulation import Machine, Setting
from simulation.synthetic import Synthetic, capacity

_DEFAULT_REQUESTS = 20_000
_DEFAULT_LOAD = 0.8


def parse_arguments(description: str) -> argparse.Namespace:
    """Flags of the command line; argparse itself refuses what it cannot read."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--ageing", type=float, default=30.0, help="seconds of waiting worth a level of priority")
    parser.add_argument("--starved-after", type=float, default=3600.0, help="seconds in the queue; counted")
    parser.add_argument("--window", type=float, default=10.0, help="seconds over which tenants' shares are compared")
    parser.add_argument("--check-every", type=int, help="steps between full checks (1; large workloads: 1000)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--plot", type=Path, help="file for a plot, PNG")
    _add_machine(parser.add_argument_group("the machine"))
    _add_workload(parser.add_argument_group("the workload"))
    _add_requests(parser.add_argument_group("requests of a synthetic workload; lengths are " + FORMS))
    return parser.parse_args()


def _add_machine(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--cost", choices=COSTS, default="135m-cpu", help="how long a step takes")
    group.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=NUMBER", help="other numbers for --cost, in seconds"
    )
    group.add_argument("--slots", type=int, default=64)
    group.add_argument("--slot-tokens", type=int, default=2048)
    group.add_argument("--budgets", type=int, nargs="+", default=[1024], help="tokens of a step; each is simulated")
    group.add_argument("--steps-per-launch", type=int, default=1)
    group.add_argument("--queue", type=int, default=2**31, help="requests that may wait")


def _add_workload(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--workload", type=Path, help="file of one JSON object per line; left out: a synthetic one")
    group.add_argument("--speedup", type=float, default=1.0, help="of the file's times")
    group.add_argument("--requests", type=int, help="left out: all of the file, or 20,000")
    pressure = group.add_mutually_exclusive_group()
    pressure.add_argument("--backlog", type=int, help="so many wait at all times, however fast they are served")
    pressure.add_argument("--rate", type=float, help="conversations a second")
    pressure.add_argument("--load", type=float, default=_DEFAULT_LOAD, help="rate as a share of what can be served")
    group.add_argument("--burstiness", type=float, default=1.0, help="1 is a Poisson process, less comes in bursts")
    group.add_argument("--seed", type=int, default=0)


def _add_requests(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--prompt-tokens", default="lognormal:100,0.9,1000", help="of a turn, without the prefix")
    group.add_argument("--output-tokens", default="lognormal:30,0.8,500")
    group.add_argument("--turns", default="1", help="of a conversation")
    group.add_argument("--pause", type=float, default=5.0, help="mean seconds between turns")
    group.add_argument("--tenants", type=int, default=1)
    group.add_argument("--flood", type=float, default=0.0, help="share of conversations that one tenant sends")
    group.add_argument("--priorities", type=float, nargs="+", default=[1.0], help="shares of the levels 0, 1, ...")
    group.add_argument("--families", type=int, default=0, help="number of shared prefixes")
    group.add_argument("--family-share", type=float, default=0.5, help="share of conversations that begin with one")
    group.add_argument("--family-tokens", default="200", help="length of a shared prefix")
    group.add_argument("--zipf", type=float, default=1.0, help="the k-th prefix is wanted k ** -ZIPF times as often")
    group.add_argument("--impatient", type=float, default=0.0, help="share of requests whose clients go away")
    group.add_argument("--patience", type=float, default=10.0, help="mean seconds until they do")
    group.add_argument("--timeouts", type=float, default=0.0, help="share of requests with a timeout")
    group.add_argument("--timeout", type=float, default=30.0, help="seconds")


def cost_of(arguments: argparse.Namespace) -> CostModel:
    """The preset with the numbers that were set."""
    cost = COSTS[arguments.cost]
    names = [field.name for field in fields(cost)]
    numbers: dict[str, float] = {}
    for assignment in arguments.set:
        name, _, number = assignment.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if name not in names or not value >= 0:
            known = ", ".join(names)
            raise ValueError(f"cannot set {assignment!r}: --set takes NAME=NUMBER, not below 0, with a NAME of {known}")
        numbers[name] = value
    return type(cost)(**{**asdict(cost), **numbers})


def machine_of(arguments: argparse.Namespace, budget: int) -> Machine:
    """The engine's sizes with that budget."""
    if budget < arguments.slots:
        raise ValueError(f"a budget of {budget} tokens cannot feed {arguments.slots} slots: raise --budgets")
    if arguments.backlog is not None and not 0 < arguments.backlog <= arguments.queue:
        raise ValueError(f"--backlog must be above 0 and at most --queue, not {arguments.backlog}")
    return Machine(arguments.slots, arguments.slot_tokens, budget, arguments.steps_per_launch, arguments.queue)


def settings_of(arguments: argparse.Namespace) -> list[Setting]:
    """In the order in which they were given."""
    return [SETTINGS[name](arguments.ageing) for name in arguments.settings]


def synthetic_of(arguments: argparse.Namespace, machine: Machine, cost: CostModel) -> Synthetic:
    """The synthetic workload that was asked for."""
    settings = Synthetic(
        num_requests=_DEFAULT_REQUESTS if arguments.requests is None else arguments.requests,
        slot_tokens=machine.slot_tokens,
        rate=arguments.rate,
        burstiness=arguments.burstiness,
        prompt_tokens=Lengths.parse(arguments.prompt_tokens),
        output_tokens=Lengths.parse(arguments.output_tokens),
        turns=Lengths.parse(arguments.turns),
        pause=arguments.pause,
        num_tenants=arguments.tenants,
        flood_share=arguments.flood,
        priorities=tuple(arguments.priorities),
        num_families=arguments.families,
        family_share=arguments.family_share,
        family_tokens=Lengths.parse(arguments.family_tokens),
        zipf=arguments.zipf,
        impatient_share=arguments.impatient,
        patience=arguments.patience,
        timeout_share=arguments.timeouts,
        timeout=arguments.timeout,
        seed=arguments.seed,
    )
    if arguments.backlog is None and arguments.rate is None:
        return replace(settings, rate=arguments.load * capacity(settings, machine.num_slots, cost))
    return settings
