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
import tempfile
from pathlib import Path
from typing import Any

import torch
from bundled_model.evaluation import Result, evaluate, overall
from bundled_model.exchange import HELD_OUT_PERCENT
from bundled_model.fact_skills import OPPOSITES
from bundled_model.training import Budget, Progress, train
from bundled_model.vocabulary import END_OF_TEXT_ID, TURN_END_ID, build_tokenizer
from transformers import GenerationConfig, LlamaForCausalLM

_CARD_TEMPLATE = Path(__file__).parent / "bundled_model" / "card_template.md"
_WEIGHTS_FILE = "model.safetensors"
_READABLE = 0o644
_EVALUATION_SEED = 20240
_SHOWN_MISSES = 4


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    output = Path("chairlift/models/bundled")
    parser.add_argument("--output", type=Path, default=output, help="directory to write (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and training text (%(default)s)")
    parser.add_argument("--steps", type=int, default=5400, help="train for so many steps (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="peak (%(default)s)")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens per step (%(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads (%(default)s)")
    parser.add_argument("--questions", type=int, default=300, help="held-out questions per skill (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="train half as fast again; needs a C++ compiler")
    parser.add_argument("--start-from", type=Path, metavar="DIR", help="go on from the model in DIR: the second stage")
    parser.add_argument("--eval-only", type=Path, metavar="DIR", help="measure the model in DIR and stop")
    engine_help = 'measure through Chairlift with these settings, such as \'{"quantization": "int8"}\''
    parser.add_argument("--engine", type=json.loads, metavar="JSON", help=engine_help)
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
    """Trains, measures what was saved, and moves it over file by file, so that a reader never sees half a file."""
    budget = Budget(
        seed=arguments.seed,
        steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        tokens_per_batch=arguments.batch_tokens,
        compiled=arguments.compile,
        start_from=arguments.start_from,
    )
    model, progress = train(budget, say)
    target = arguments.output
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as name:
        scratch = Path(name)
        save_model(model, scratch)
        results = measure(scratch, arguments.questions)
        card = model_card(model, budget, progress, results, arguments.threads, (scratch / _WEIGHTS_FILE).stat().st_size)
        (scratch / "README.md").write_text(card)
        for path in sorted(scratch.iterdir()):
            path.chmod(_READABLE)
            os.replace(path, target / path.name)
    say(f"written to {target}")


def save_model(model: LlamaForCausalLM, directory: Path) -> None:
    """Saves weights in bfloat16, tokenizer, configurations; no model card."""
    model.bfloat16()
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, eos_token_id=[TURN_END_ID, END_OF_TEXT_ID], pad_token_id=END_OF_TEXT_ID
    )
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)


def model_card(
    model: LlamaForCausalLM, budget: Budget, progress: Progress, results: list[Result], threads: int, size: int
) -> str:
    """Fills in `card_template.md` with what was measured; `size`: bytes of the weights."""
    config = model.config
    rows = [f"| {result.skill} | {result.accuracy:.1f} % |" for result in results]
    return _CARD_TEMPLATE.read_text().format(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        mlp=config.intermediate_size,
        heads=config.num_attention_heads,
        kv=config.num_key_value_heads,
        head_dim=config.head_dim,
        positions=config.max_position_embeddings,
        parameters=model.num_parameters(),
        weights_file=_WEIGHTS_FILE,
        size=size,
        held_out=HELD_OUT_PERCENT,
        samples=results[0].total,
        table="\n".join([*rows, f"| **overall** | **{overall(results).accuracy:.1f} %** |"]),
        command=" ".join(["python", *sys.argv]),
        minutes=progress.seconds / 60,
        steps=progress.step,
        tokens=progress.tokens / 1e6,
        speed=progress.tokens / progress.seconds,
        cores=os.cpu_count(),
        threads=threads,
        opposites=len(OPPOSITES),
        batch=budget.tokens_per_batch,
        rate=budget.learning_rate,
    )


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
