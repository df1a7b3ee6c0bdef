"""What statistics cost: the time that the engine's journal takes per step, beside the scheduling of that step.

    python benchmarks/journal_cost.py --rows 256 --steps 2000

No model: rows get made-up tokens, every step all of them, and one request in `--turnover` steps ends and is followed by
another, as in a busy server. The last line is JSON; times are medians in microseconds.
"""

import argparse
import json
import statistics
from time import perf_counter

from chairlift.cache.ledger import SlotLedger
from chairlift.engine.journal import Journal
from chairlift.params import SamplingParams
from chairlift.scheduler import Request, RowResult, Scheduler

_PROMPT_TOKENS = 16
_ROOM = 4096
_WORD = 9


def main() -> None:
    """Measures, and prints a line for people and one for programs."""
    arguments = _parse_arguments()
    journal_us, scheduler_us, reading_us = measure(arguments.rows, arguments.steps, arguments.turnover)
    print(
        f"{arguments.rows} rows: journal {journal_us:.1f} us a step, scheduling {scheduler_us:.1f} us;"
        f" a copy of the statistics {reading_us:.1f} us"
    )
    figures = {"journal_us": journal_us, "scheduler_us": scheduler_us, "reading_us": reading_us}
    print(json.dumps({**vars(arguments), **{name: round(value, 2) for name, value in figures.items()}}))


def measure(num_rows: int, num_steps: int, turnover: int) -> tuple[float, float, float]:
    """Medians: of the journal's share of a step, of the scheduler's, and of reading the statistics."""
    ledger = SlotLedger(num_rows, _ROOM)
    scheduler = Scheduler(ledger, max(num_rows, _PROMPT_TOKENS * num_rows), 1, num_rows)
    journal = Journal(scheduler)
    lengths = [turnover * (row + 1) for row in range(num_rows)]  # so that they end one after another
    scheduler.add(*(_request(row, length) for row, length in enumerate(lengths)))
    journal_s: list[float] = []
    scheduler_s: list[float] = []
    serial = num_rows
    for _ in range(num_steps):
        start = perf_counter()
        plan = scheduler.schedule()
        slots = [row.request.slot for row in plan.rows if row.request.slot is not None]
        scheduler.advance(plan, ledger.reserve(slots, [row.num_new_tokens for row in plan.rows]))
        results = [RowResult([_WORD]) for _ in plan.rows]
        events = scheduler.update(plan, results)
        scheduled = perf_counter()
        journal.note_launch(plan, start)
        journal.note_events(events)
        journal_s.append(perf_counter() - scheduled)
        scheduler_s.append(scheduled - start)
        for _ in range(num_rows - scheduler.num_running - scheduler.num_waiting):
            scheduler.add(_request(serial, turnover * num_rows))
            serial += 1
    reading_s = [_time_reading(journal) for _ in range(100)]
    return (
        1e6 * statistics.median(journal_s),
        1e6 * statistics.median(scheduler_s),
        1e6 * statistics.median(reading_s),
    )


def _request(serial: int, num_tokens: int) -> Request:
    prompt = [serial % 50_000, *range(1, _PROMPT_TOKENS)]
    return Request(f"request-{serial}", prompt, SamplingParams(), min(num_tokens, _ROOM - _PROMPT_TOKENS), seed=0)


def _time_reading(journal: Journal) -> float:
    start = perf_counter()
    journal.read_stats()
    return perf_counter() - start


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--turnover", type=int, default=2, help="steps from one request's end to the next one's")
    return parser.parse_args()


if __name__ == "__main__":
    main()
