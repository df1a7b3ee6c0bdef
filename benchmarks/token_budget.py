"""What a step's token budget costs running streams and brings long prompts: the figure behind the default.

    python benchmarks/token_budget.py --budgets 64 256 1024 4096 --plot token-budget.png

Streams decode; then long prompts come in one after another, the next when the last has its first token, so that every
step is a mixed one. For each `max_num_batched_tokens` it shows the gaps between the streams' tokens meanwhile (ITL,
median and p99), the same with no long prompt there ("alone"), the long prompts' time to first token, and what was
computed per second of either. In process, an engine of its own for each budget and round, prefix caching off; budgets
take turns, the order rotating, and figures are medians over rounds. The last line is JSON.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from comparison.machine import describe_commit, describe_machine
from serving.budget_report import RoundFigures, Trial, draw, record, table
from serving.checkpoint import make_servable
from serving.streams import Mix, measure
from shapes import SHAPES, make_checkpoint

_BUDGETS = [64, 128, 256, 512, 1024, 2048, 4096]
_MAX_SEQ_LEN = 8192


def main() -> int:
    """Measures, prints a table, and as the last line everything as JSON; returns the exit code."""
    arguments = _parse_arguments()
    mix = Mix(
        num_streams=arguments.streams,
        stream_prompt_tokens=arguments.stream_prompt_tokens,
        quiet_tokens=arguments.quiet_tokens,
        num_long_prompts=arguments.long_prompts,
        long_prompt_tokens=arguments.long_prompt_tokens,
    )
    if complaint := _complaint(mix, arguments):
        print(f"token_budget.py: {complaint}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        weights = arguments.model or make_checkpoint(arguments.shape, Path(scratch) / "weights", arguments.dtype)
        model = make_servable(weights.absolute(), Path(scratch) / "model", arguments.max_seq_len)
        trials = _run(model, mix, arguments)
    report = {
        "settings": _described(mix, arguments),
        "machine": describe_machine(),
        "commit": describe_commit(Path(__file__).parents[1]),
        "results": [record(trial) for trial in trials],
    }
    print(table(trials))
    print(json.dumps(report))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report) + "\n", encoding="utf-8")
    if arguments.plot is not None:
        draw(report, arguments.plot)
    return 0


def _complaint(mix: Mix, arguments: argparse.Namespace) -> str | None:
    """What cannot be measured, and what to change."""
    if min(arguments.budgets) < mix.num_slots:
        return f"--budgets: {min(arguments.budgets)} is less than a token for each of {mix.num_slots} requests"
    if mix.long_prompt_tokens >= arguments.max_seq_len:
        most = arguments.max_seq_len
        return f"--long-prompt-tokens must be below --max-seq-len, {most}: lower the first, or raise the second"
    return None


def _run(model: Path, mix: Mix, arguments: argparse.Namespace) -> list[Trial]:
    trials = [Trial(budget) for budget in arguments.budgets]
    for number in range(arguments.rounds):
        first = number % len(trials)
        for trial in trials[first:] + trials[:first]:
            measuring = measure(model, arguments.dtype, trial.budget, mix, arguments.max_seq_len, seed=number)
            trial.rounds.append(RoundFigures.of(asyncio.run(measuring), mix))
            print(f"round {number + 1}, budget {trial.budget}: done", file=sys.stderr, flush=True)
    return trials


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="135m", help="random weights of this shape")
    parser.add_argument("--model", type=Path, help="a Llama checkpoint directory whose weights to use instead")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--budgets", type=int, nargs="+", default=_BUDGETS)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--stream-prompt-tokens", type=int, default=128)
    parser.add_argument("--quiet-tokens", type=int, default=32, help="of each stream, before long prompts come")
    parser.add_argument("--long-prompts", type=int, default=8, help="in each round")
    parser.add_argument("--long-prompt-tokens", type=int, default=4096)
    parser.add_argument("--max-seq-len", type=int, default=_MAX_SEQ_LEN)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the JSON too")
    parser.add_argument("--plot", type=Path, help="file for the figure (needs matplotlib)")
    return parser.parse_args()


def _described(mix: Mix, arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "shape": arguments.model.name if arguments.model else arguments.shape,
        "dtype": arguments.dtype,
        "mix": asdict(mix),
        "budgets": arguments.budgets,
        "max_seq_len": arguments.max_seq_len,
        "rounds": arguments.rounds,
    }


if __name__ == "__main__":
    sys.exit(main())
