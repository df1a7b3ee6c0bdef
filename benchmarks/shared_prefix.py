"""Time to first token of users who share a system prompt: with reuse of prefixes, without, and beside other servers.

    python benchmarks/shared_prefix.py --peer vllm=vllm/bin/python,preload=TCMALLOC:IOMP --arrivals all 0.5

Users come all at once or at a rate, each with a conversation of several turns after one system prompt; turn 2 repeats
turn 1 and its answer. The load test (`chairlift bench`) plays them through /v1/chat/completions, streaming, greedy,
past any end of text. Every server takes part with the same weights, tokenizer and chat template
(shapes.py), so prompts have the same lengths, and serves all users at the same time if they so come.
Chairlift takes part twice, with `--enable-prefix-caching` and without ("no-reuse"). A peer is
KIND=PYTHON[,key=value...] as for compare.py; options are flags of its server.

All servers are up for the whole run, but stopped while another is measured. Each first serves all users once with other
texts, which is not counted; then rounds, the order rotating, with texts new to all. Ratios are medians of the rounds'
ratios: how many times as late as Chairlift's a server's median first token comes. The last line is JSON; the exit code
is 1 if any request failed.
Its figures are those of docs/prefix-reuse.md.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import uvloop
from comparison.ceiling import ModelShape
from machine import parser_of, print_report, usable_cores
from peers.engines import Engine, UsageError, exit_on_signals, take_part
from peers.server import Host
from peers.worker import WorkerError
from peers.workers.protocol import Settings
from prefix_visits import Arrival, Round, Series, Trial, Visits, record, table
from shapes import SHAPES, make_checkpoint, make_servable

from chairlift.loadtest.records import BenchError
from chairlift.loadtest.runner import make_test

_NO_REUSE = Engine("no-reuse", "chairlift", sys.executable, {"enable_prefix_caching": "false"})
_BYTES_PER_NUMBER = {"bfloat16": 2, "float32": 4}
_WARM_UP_SEED = 0  # rounds have those from 1 on


def main() -> int:
    """Measures, prints a table, and as the last line everything as JSON; returns the exit code."""
    arguments = _parse_arguments()
    with tempfile.TemporaryDirectory() as scratch:
        logs = arguments.logs or Path(scratch) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        try:
            report = measure(take_part(arguments.peer, _NO_REUSE), _settings(arguments, Path(scratch)), logs, arguments)
        except (UsageError, WorkerError) as error:
            print(f"shared_prefix.py: {error}", file=sys.stderr)
            return 2
    print_report(arguments, **report)
    return 1 if report["failed"] else 0


def measure(engines: Sequence[Engine], settings: Settings, logs: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs all rounds, prints the table; returns the JSON. Raises `WorkerError` if a server does not get ready."""
    visits = _visits(arguments)
    with ExitStack() as closing:
        hosts = []
        for engine in engines:
            host = Host(engine, settings, logs / f"{engine.name}.log")
            closing.callback(host.close)
            hosts.append(host)
            host.start(arguments.start_limit)
            _tell(f"{host.name}: healthy after {host.standing.healthy_s:.1f} s")
        trials = [Trial(arrival, {host.name: Series() for host in hosts}) for arrival in arguments.arrivals]
        for host in hosts:
            _warm_up(host, visits)
        for trial in trials:
            _run(trial, hosts, visits, arguments.rounds)
    print(table(trials, visits.num_turns))
    return {
        "settings": _described(arguments, settings),
        "servers": {host.name: asdict(host.standing) for host in hosts},
        "results": [record(trial) for trial in trials],
        "failed": any(series.failure for trial in trials for series in trial.series.values()),
    }


def _warm_up(host: Host, visits: Visits) -> None:
    trial = Trial(Arrival(), {host.name: Series()})
    _take_turn(host, visits, trial, _WARM_UP_SEED)
    if failure := trial.series[host.name].failure:
        raise WorkerError(f"{host.name}: its warm-up failed: {failure}")


def _run(trial: Trial, hosts: Sequence[Host], visits: Visits, num_rounds: int) -> None:
    """Rounds, the order rotating."""
    for number in range(num_rounds):
        first = number % len(hosts)
        for host in [*hosts[first:], *hosts[:first]]:
            _take_turn(host, visits, trial, _WARM_UP_SEED + 1 + number)


def _take_turn(host: Host, visits: Visits, trial: Trial, seed: int) -> None:
    series = trial.series[host.name]
    if series.failure is not None:
        return
    try:
        with host.turn(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(make_test(visits.test(host.url, trial.arrival, seed)))
    except BenchError as error:
        series.failure = str(error)
        return
    seen = Round.of(result, visits.num_turns)
    series.rounds.append(seen)
    if seen.failure is not None:
        series.failure = f"{seen.num_failed} requests, the first: {seen.failure}"
    turn = "warm-up" if seed == _WARM_UP_SEED else f"round {seed}"
    _tell(f"{trial.arrival.name}, {turn}, {host.name}: {seen.duration_s:.1f} s{_complaint(series)}")


def _complaint(series: Series) -> str:
    return "" if series.failure is None else f", FAILED: {series.failure}"


def _parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="135m", help="random weights of this shape")
    parser.add_argument("--model", type=Path, help="a Llama checkpoint directory whose weights to use instead")
    parser.add_argument("--dtype", choices=list(_BYTES_PER_NUMBER), default="bfloat16")
    parser.add_argument("--peer", action="append", default=[], metavar="KIND[=PATH][,key=value...]")
    parser.add_argument("--arrivals", type=_arrival, nargs="+", default=[Arrival(), Arrival(0.5)], metavar="all|RATE")
    parser.add_argument("--users", dest="num_users", type=_count, default=64)
    parser.add_argument("--turns", dest="num_turns", type=_count, default=2, help="of each user")
    parser.add_argument("--prefix-tokens", type=_count, default=1500, help="of the system prompt that all share")
    parser.add_argument("--question-tokens", type=_count, default=40, help="of a user's message")
    parser.add_argument("--output-tokens", type=_count, default=32, help="of an answer")
    parser.add_argument("--think-time", type=float, default=1.0, help="seconds from an answer to the next question")
    parser.add_argument("--rounds", type=_count, default=3)
    parser.add_argument("--threads", type=_count, default=usable_cores(), help="of every server (default: cores)")
    parser.add_argument("--start-limit", type=float, default=900.0, help="seconds that a start-up may take")
    parser.add_argument("--logs", type=Path, help="folder that keeps what the servers print")
    return parser.parse_args()


def _arrival(text: str) -> Arrival:
    try:
        return Arrival.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no count: write a whole number from 1 on")
    return int(text)


def _visits(arguments: argparse.Namespace) -> Visits:
    return Visits(**{each.name: getattr(arguments, each.name) for each in fields(Visits)})


def _settings(arguments: argparse.Namespace, scratch: Path) -> Settings:
    """Returns what every server is to be ready for: all users at the same time, nothing shared between them."""
    visits = _visits(arguments)
    weights = arguments.model or make_checkpoint(arguments.shape, scratch / "weights", arguments.dtype)
    model = make_servable(weights.absolute(), scratch / "model", visits.max_tokens)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    num_bytes = _BYTES_PER_NUMBER[arguments.dtype]
    cached_bytes = ModelShape.of(config, num_bytes, num_bytes).cached_bytes(visits.num_users * visits.max_tokens)
    return Settings(
        model=str(model),
        dtype=arguments.dtype,
        quantization=None,
        num_threads=arguments.threads,
        max_requests=visits.num_users,
        max_prompt_tokens=visits.max_tokens - visits.output_tokens,
        max_tokens=visits.max_tokens,
        cache_gigabytes=1 + cached_bytes // 10**9,
    )


def _described(arguments: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    return {
        "shape": arguments.model.name if arguments.model else arguments.shape,
        "visits": asdict(_visits(arguments)),
        "max_tokens": settings.max_tokens,
        "dtype": arguments.dtype,
        "rounds": arguments.rounds,
        "threads": arguments.threads,
        "cache_gigabytes": settings.cache_gigabytes,
        "peers": arguments.peer,
    }


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
