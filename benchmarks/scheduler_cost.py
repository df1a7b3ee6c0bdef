"""Measures what the scheduler itself costs, in microseconds of one core: per step, per verb, per waiting request, per
match.

    python benchmarks/scheduler_cost.py --json benchmarks/results/scheduler-cost-2-cores.json

rows       a step in which all rows decode, and steps in which rows are admitted and end
waiting    a step in which slots come and go, against the number of requests that wait
queue      add, abort and expire with a long queue; newcomers to a full one that are refused, or displace somebody
journal    what the engine's statistics take per step, beside a step in which all rows decode and some end
prefixes   finding the longest prefix among 256 slots of 8,192 tokens, in its worst cases; `schedule` is all that it
           takes to admit such a prompt

A figure is the lowest median of some rounds: other programs can only make it worse. The last line is JSON, which
names the commit and the machine. They are the figures of docs/scheduling.md and docs/metrics.md.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from random import Random
from statistics import median

from harness import US_PER_S, make_request, medians, time_calls, timed_step
from machine import parser_of, print_report
from simulation.simulation import Clock
from simulation.workload import text

from chairlift.cache.ledger import SlotLedger
from chairlift.cache.prefixes import PrefixIndex, pack_tokens
from chairlift.engine.journal import Journal
from chairlift.errors import QueueFull
from chairlift.params import DEFAULT_OPTIONS, RequestOptions
from chairlift.scheduler import Policy, Request, Scheduler

Figures = dict[str, float]

_ENDLESS = 2**31
_SLOT_TOKENS = 8192
_WARM_UP = 50  # steps


def main() -> int:
    """Measures, prints a line for each figure, and as the last line all figures as JSON."""
    arguments = _parse_arguments()
    report = {}
    for name in arguments.parts:
        report[name] = _lowest([_PARTS[name](arguments) for _ in range(arguments.rounds)])
        for case, figures in report[name].items():
            print(f"{case:<44}" + "  ".join(f"{verb} {cost:,.1f}" for verb, cost in figures.items()))
    print_report(arguments, microseconds=report)
    return 0


def _lowest(rounds: list[dict[str, Figures]]) -> dict[str, Figures]:
    return {
        case: {name: min(each[case][name] for each in rounds) for name in figures}
        for case, figures in rounds[0].items()
    }


def measure_rows(arguments: argparse.Namespace) -> dict[str, Figures]:
    """Steps of decode rows alone; and the largest number of rows with half, or all, of them new in every step."""
    figures = {f"{num_rows} decode rows": _decode(num_rows, arguments.steps) for num_rows in arguments.rows}
    most = max(arguments.rows)
    figures[f"{most} rows, half of them new"] = _churn(most, most // 2, arguments.steps)
    figures[f"{most} rows, all of them new"] = _churn(most, most, arguments.steps)
    return figures


def _decode(num_rows: int, num_steps: int) -> Figures:
    slots = SlotLedger(num_rows, _SLOT_TOKENS)
    scheduler = Scheduler(slots, 8 * num_rows, 1, max_queue_size=0)
    scheduler.add(*[make_request(8, num_steps + _WARM_UP) for _ in range(num_rows)])
    for _ in range(_WARM_UP):
        timed_step(scheduler, slots)
    return medians([timed_step(scheduler, slots) for _ in range(num_steps - 1)])


def _churn(num_rows: int, num_new: int, num_steps: int) -> Figures:
    """`num_new` rows are admitted, prefilled with 32 tokens and end in every step; the others decode."""
    slots = SlotLedger(num_rows, _SLOT_TOKENS)
    scheduler = Scheduler(slots, 32 * num_rows, 1, max_queue_size=num_rows)
    scheduler.add(*[make_request(8, num_steps + _WARM_UP) for _ in range(num_rows - num_new)])
    times = []
    for _ in range(num_steps):
        scheduler.add(*[make_request(32, 1) for _ in range(num_new)])
        times.append(timed_step(scheduler, slots))
    return medians(times[_WARM_UP:])


def measure_waiting(arguments: argparse.Namespace) -> dict[str, Figures]:
    """64 slots, requests of 1 to 31 steps: about four come and go in a step."""
    tenants = [RequestOptions(tenant=f"t{i}") for i in range(1000)]
    priorities = [RequestOptions(priority=i) for i in range(100)]
    both = [RequestOptions(tenant=f"t{i % 100}", priority=i % 7) for i in range(700)]
    kinds = {
        "alike": [DEFAULT_OPTIONS],
        "1,000 tenants": tenants,
        "100 priorities": priorities,
        "100 tenants x 7": both,
        "one salt": [RequestOptions(cache_salt="salt")],
    }
    return {
        f"{num_waiting} waiting, {kind}": _with_queue(num_waiting, options, arguments.steps)
        for kind, options in kinds.items()
        for num_waiting in arguments.waiting
    }


def _with_queue(num_waiting: int, options: list[RequestOptions], num_steps: int) -> Figures:
    slots = SlotLedger(64, _SLOT_TOKENS)
    scheduler = Scheduler(slots, 1024, 1, _ENDLESS)
    requests = _requests(options)
    times = []
    for _ in range(num_steps):
        while scheduler.num_waiting + scheduler.num_running < num_waiting + slots.num_slots:
            scheduler.add(next(requests))
        times.append(timed_step(scheduler, slots))
    return medians(times[_WARM_UP:])


def _requests(options: list[RequestOptions]) -> Iterator[Request]:
    drawn = Random(0)
    while True:
        yield make_request(16, drawn.randrange(1, 32), drawn.choice(options))


def measure_queue(arguments: argparse.Namespace) -> dict[str, Figures]:
    """With a deadline for each of the waiting requests; no slot is free."""
    return {f"{num_waiting} waiting": _queue(num_waiting) for num_waiting in arguments.waiting if num_waiting}


def _queue(num_waiting: int) -> Figures:
    clock = Clock()
    slots = SlotLedger(1, _SLOT_TOKENS)
    scheduler = Scheduler(slots, 8, 1, _ENDLESS, Policy(queue_timeout=100.0), clock)
    waiting = _some(num_waiting)
    scheduler.add(make_request(8, 1000), *waiting)
    scheduler.schedule()
    clock.now = 50.0
    chosen = [request.request_id for request in Random(0).sample(waiting, min(1000, num_waiting // 2))]
    figures = {
        "add": time_calls(scheduler.add, _some(1000)),
        "abort": time_calls(scheduler.abort, chosen),
        "expire none": time_calls(lambda _: scheduler.expire(), range(1000)),
    }
    clock.now = 101.0
    num_before = scheduler.num_waiting
    all_at_once = time_calls(lambda _: scheduler.expire(), [None])
    each_expired = round(all_at_once / (num_before - scheduler.num_waiting), 2)
    return {**figures, "expire each of many": each_expired, **_full_queue(num_waiting)}


def _full_queue(num_waiting: int) -> Figures:
    """No place is left: newcomers that are refused, and newcomers for whom somebody leaves."""
    slots = SlotLedger(1, _SLOT_TOKENS)
    scheduler = Scheduler(slots, 8, 1, num_waiting)
    scheduler.add(make_request(8, 1000))
    scheduler.schedule()
    for request in _some(num_waiting):
        scheduler.add(request)

    def refuse(request: Request) -> None:
        try:
            scheduler.add(request)
        except QueueFull:
            return
        raise AssertionError("there was a place")

    count = max(1, min(1000, num_waiting // 2))
    return {
        "refuse": time_calls(refuse, _some(count, priority=1)),
        "displace": time_calls(scheduler.add, _some(count, priority=-1)),
    }


def _some(count: int, priority: int = 0) -> list[Request]:
    options = [RequestOptions(tenant=f"t{i}", priority=priority) for i in range(10)]
    return [make_request(16, 16, options[i % len(options)]) for i in range(count)]


def measure_journal(arguments: argparse.Namespace) -> dict[str, Figures]:
    """The largest number of rows; every other step one of them ends and another request takes its place."""
    num_rows = max(arguments.rows)
    slots = SlotLedger(num_rows, _SLOT_TOKENS)
    scheduler = Scheduler(slots, 32 * num_rows, 1, max_queue_size=num_rows)
    journal, times = Journal(scheduler), []
    scheduler.add(*[make_request(16, 2 * (row + 1)) for row in range(num_rows)])
    for _ in range(arguments.steps):
        times.append(timed_step(scheduler, slots, journal))
        scheduler.add(*[make_request(16, 2 * num_rows) for _ in range(num_rows - scheduler.num_running)])
    noted = round(US_PER_S * median(each.journal for each in times), 2)
    reading = time_calls(lambda _: journal.read_stats(), range(100))
    return {f"{num_rows} rows": {"note a step": noted, "read": reading, **medians(times)}}


def measure_prefixes(arguments: argparse.Namespace) -> dict[str, Figures]:
    """Measures prompts that share from nothing to all but its last token with the slots."""
    num_slots, num_tokens = arguments.prefix_slots, arguments.prefix_tokens
    wanted, ids = text(0, num_tokens), range(1, num_slots + 1)
    cases = {
        "nothing alike": [text(i, num_tokens) for i in ids],
        "all but the last token alike": [[*wanted[:-1], i] for i in ids],
        "all but the last 100 alike": [[*wanted[:-100], *text(i, 100)] for i in ids],
        "each one token more alike": [[*wanted[:i], *text(i, num_tokens - i)] for i in ids],
        "a chain over the whole length": [[*wanted[: i * num_tokens // num_slots - 1], i] for i in ids],
    }
    return {f"{num_slots} slots, {case}": _prefixes(contents, wanted) for case, contents in cases.items()}


def _prefixes(contents: list[list[int]], wanted: list[int]) -> Figures:
    index = PrefixIndex()
    packed = [pack_tokens(tokens) for tokens in contents]
    for slot, tokens in enumerate(packed):
        index.insert(slot, tokens)
    slots = range(len(packed))
    return {
        "pack": time_calls(pack_tokens, [wanted] * 20),
        "match": time_calls(lambda tokens: list(index.match(tokens)), [pack_tokens(wanted)] * 20),
        "remove": time_calls(index.remove, slots),
        "insert": time_calls(lambda slot: index.insert(slot, packed[slot]), slots),
        "schedule": _admission(contents, wanted),
    }


def _admission(contents: list[list[int]], wanted: list[int]) -> float:
    """Microseconds of a `schedule` that admits one prompt when every slot is warm."""
    num_tokens = 2 * len(wanted)
    slots = SlotLedger(len(contents), num_tokens)
    scheduler = Scheduler(slots, num_tokens * len(contents), 1, max_queue_size=0)
    scheduler.add(*[make_request(len(tokens), 1, opening=tokens) for tokens in contents])
    while scheduler.has_work:
        timed_step(scheduler, slots)
    assert len(scheduler.warm) == len(contents), "a prompt has no slot of its own"
    scheduler.add(make_request(len(wanted), 1, opening=wanted))
    return round(US_PER_S * timed_step(scheduler, slots).schedule, 2)


_PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Figures]]] = {
    "rows": measure_rows,
    "waiting": measure_waiting,
    "queue": measure_queue,
    "journal": measure_journal,
    "prefixes": measure_prefixes,
}


def _parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 128, 256])
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 100, 10_000, 100_000])
    parser.add_argument("--steps", type=int, default=1000, help="measured for each figure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefix-slots", type=int, default=256)
    parser.add_argument("--prefix-tokens", type=int, default=8192)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
