"""Make the small model that is bundled with Chairlift: train it, measure it, write its directory.

Needs torch and transformers, a CPU core or two, and about an hour. There are two stages; the second one has more of
what the first one leaves weakest. The model's card says with which arguments it was made. From the repository root:

    python tools/train_bundled_model.py --output build/first-stage
    python tools/train_bundled_model.py --output chairlift/models/bundled --start-from build/first-stage

The text to train on is generated here (see `bundled_model`); nothing is downloaded. With `--eval-only DIR`
nothing is trained: the model in DIR is measured and its accuracy printed.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from bundled_model.card import Run, model_card
from bundled_model.evaluation import Result, evaluate, overall
from bundled_model.saving import CARD_FILE, discard, move_into_place, save_model, scratch_beside
from bundled_model.training import Budget, train

DEFAULT_OUTPUT = Path("chairlift/models/bundled")
DEFAULT_STEPS = 5400
DEFAULT_LEARNING_RATE = 2e-3
DEFAULT_TOKENS_PER_BATCH = 4096
DEFAULT_QUESTIONS = 300
_EVALUATION_SEED = 20240
_SHOWN_MISSES = 4


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="directory to write (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and training text (%(default)s)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help=f"train for so many steps (default {DEFAULT_STEPS})")
    length.add_argument("--minutes", type=float, help="train for so many minutes instead; not reproducible")
    parser.add_argument("--learning-rate", type=float, default=DEFAULT_LEARNING_RATE, help="peak (%(default)s)")
    parser.add_argument(
        "--batch-tokens", type=int, default=DEFAULT_TOKENS_PER_BATCH, help="tokens per step (%(default)s)"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads (%(default)s)")
    parser.add_argument(
        "--questions", type=int, default=DEFAULT_QUESTIONS, help="held-out questions per skill (%(default)s)"
    )
    parser.add_argument("--compile", action="store_true", help="train half as fast again; needs a C++ compiler")
    parser.add_argument("--start-from", type=Path, metavar="DIR", help="go on from the model in DIR: the second stage")
    parser.add_argument("--eval-only", type=Path, metavar="DIR", help="measure the model in DIR and stop")
    parser.add_argument(
        "--engine",
        type=json.loads,
        metavar="JSON",
        help='measure through Chairlift with these settings, such as \'{"quantization": "int8"}\'',
    )
    return parser.parse_args()


def say(text: str) -> None:
    """Print at once, for logs that are followed."""
    print(text, flush=True)


def measure(directory: Path, questions: int, settings: dict[str, Any] | None = None) -> list[Result]:
    """Evaluate a model directory and print the table with a few wrong answers."""
    results = evaluate(directory, _EVALUATION_SEED, questions, settings)
    for result in [*results, overall(results)]:
        say(f"{result.skill:16} {result.right:5}/{result.total:<5} {result.accuracy:6.1f} %")
        for question, answer in result.misses[:_SHOWN_MISSES]:
            say(f"    {question!r} -> {answer!r}")
    return results


def train_and_write(arguments: argparse.Namespace) -> None:
    """Train, measure what was saved, and put it in place."""
    steps = DEFAULT_STEPS if arguments.steps is None and arguments.minutes is None else arguments.steps
    budget = Budget(
        seed=arguments.seed,
        steps=steps,
        minutes=arguments.minutes,
        learning_rate=arguments.learning_rate,
        tokens_per_batch=arguments.batch_tokens,
        compiled=arguments.compile,
        start_from=arguments.start_from,
    )
    model, progress = train(budget, say)
    scratch = scratch_beside(arguments.output)
    try:
        save_model(model, scratch)
        results = measure(scratch, arguments.questions)
        command = " ".join(["python", *sys.argv])
        run = Run(budget, progress, model.num_parameters(), arguments.threads, command)
        (scratch / CARD_FILE).write_text(model_card(run, results, scratch))
        move_into_place(scratch, arguments.output)
    finally:
        discard(scratch)
    say(f"written to {arguments.output}")


def main() -> None:
    """Run the command line."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    if arguments.eval_only is not None:
        measure(arguments.eval_only, arguments.questions, arguments.engine)
    else:
        train_and_write(arguments)


if __name__ == "__main__":
    main()
