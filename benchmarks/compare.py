"""Chairlift beside other engines: the same workloads, each engine in a process of its own, taking turns.

    python benchmarks/compare.py --shape 135m --peer transformers --peer transformers-batch \\
        --peer vllm=vllm/bin/python \\
        --peer openvino=openvino/bin/python,model=models/135m-openvino-bf16 \\
        --peer llama.cpp=llama.cpp/bin/llama-server,gguf=models/135m-bf16.gguf

A peer is KIND[=PATH][,key=value...]: PATH is its Python (llama.cpp: its llama-server), the rest are options of its
worker in benchmarks/peers/workers, and `as=NAME` lets one kind take part twice, ourselves as well
(`chairlift,as=int8,quantization=int8`). docs/comparing.md says how to make their environments. Workloads are
REQUESTSxPROMPT+OUTPUT tokens, all requests sent at once, decoded greedily past any end of text; the clock runs over
prefill and decode, and a workload of one output token counts prompt tokens. Prompts are random, the same for all
engines, new in each round. All others are stopped meanwhile. An engine that gives too few tokens has failed.

Figures are medians over rounds, ratios medians of the rounds' ratios (how many times as fast Chairlift is), the ceiling
what the machine's memory and matrix products allow, as measured in between (comparison/ceiling.py). "Best peer" is
the fastest of vLLM, OpenVINO GenAI and llama.cpp. The last line is JSON; the exit code is 1 if anything failed.
The tables of README, docs/performance.md and docs/speed.md are made of it.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from comparison.ceiling import DEFAULT_WORKLOADS, ModelShape, Workload
from comparison.contest import Contest, Entrant, Limits, record, table
from machine import parser_of, print_report, usable_cores
from peers.engines import Engine, UsageError, exit_on_signals, take_part
from peers.workers.protocol import Settings
from shapes import SHAPES, make_checkpoint

_BYTES = {"bfloat16": 2, "float32": 4}
_FIRST_PROMPT_TOKENS = 16  # of the prompt whose first token ends a start-up


def main() -> int:
    """Compares, prints a table, and as the last line everything as JSON; returns the exit code."""
    arguments = _parse_arguments()
    try:
        engines = take_part(arguments.peer)
    except UsageError as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        logs = arguments.logs or Path(scratch) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        model = arguments.model or make_checkpoint(arguments.shape, Path(scratch) / "model", arguments.dtype)
        report = compare(engines, model.absolute(), logs, arguments)
    print_report(arguments, **report)
    return 1 if report["failed"] else 0


def compare(engines: Sequence[Engine], model: Path, logs: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs all workloads, prints the table; returns the JSON."""
    fields = json.loads((model / "config.json").read_text(encoding="utf-8"))
    weight_bytes = fields.get("bytes_per_weight") or (1 if arguments.quantization else _BYTES[arguments.dtype])
    cache_bytes = _BYTES[arguments.dtype]
    shape = ModelShape.of(fields, weight_bytes, cache_bytes)
    settings = _settings(arguments, model, shape)
    limits = Limits(start_up=arguments.start_limit, answer=arguments.limit)
    entrants = [Entrant(each, settings, logs / f"{each.name}.log", limits) for each in engines]
    gauge = Entrant(Engine("rates", "rates", sys.executable), settings, logs / "rates.log", limits)
    with Contest(entrants, gauge, shape.vocab_size) as contest:
        contest.start(list(range(1, 1 + _FIRST_PROMPT_TOKENS)))
        trials = [contest.run(workload, arguments.rounds) for workload in arguments.workloads]
        standings = contest.standings
    print(table(trials, standings, shape))
    return {
        "settings": _described(arguments, settings),
        "engines": {
            name: asdict(each) | {"first_token_s": each.first_token_s, "after_imports_s": each.after_imports_s}
            for name, each in standings.items()
        },
        "results": [record(trial, standings, shape) for trial in trials],
        "failed": any(score.failure for trial in trials for score in trial.scores.values()),
    }


def _parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="135m", help="random weights of this shape")
    parser.add_argument("--model", type=Path, help="a checkpoint directory to use instead")
    parser.add_argument("--dtype", choices=list(_BYTES), default="bfloat16")
    parser.add_argument("--quantization", choices=["int8", "int4"], help="Chairlift's; peers have models of their own")
    parser.add_argument("--workloads", type=_workload, nargs="+", default=[*map(Workload.parse, DEFAULT_WORKLOADS)])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", action="append", default=[], metavar="KIND[=PATH][,key=value...]")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of every engine (default: cores)")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds that one batch may take")
    parser.add_argument("--start-limit", type=float, default=900.0, help="seconds that a start-up may take")
    parser.add_argument("--logs", type=Path, help="folder that keeps what the engines print")
    return parser.parse_args()


def _workload(text: str) -> Workload:
    try:
        return Workload.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _settings(arguments: argparse.Namespace, model: Path, shape: ModelShape) -> Settings:
    workloads: list[Workload] = arguments.workloads
    max_tokens = max(each.prompt_tokens + each.output_tokens for each in workloads)
    most_tokens = max(each.num_requests * (each.prompt_tokens + each.output_tokens) for each in workloads)
    slack = 64 * max(each.num_requests for each in workloads)  # a block of each request may be all but empty
    return Settings(
        model=str(model),
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        num_threads=arguments.threads,
        max_requests=max(each.num_requests for each in workloads),
        max_prompt_tokens=max(each.prompt_tokens for each in workloads),
        max_tokens=max(max_tokens, 2 * _FIRST_PROMPT_TOKENS),
        cache_gigabytes=1 + shape.cached_bytes(most_tokens + slack) // 10**9,
    )


def _described(arguments: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    return {
        **asdict(settings),
        "shape": str(arguments.model.name) if arguments.model else arguments.shape,
        "precision": arguments.quantization or arguments.dtype,
        "workloads": [each.name for each in arguments.workloads],
        "rounds": arguments.rounds,
        "threads": arguments.threads,
        "peers": arguments.peer,
    }


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
