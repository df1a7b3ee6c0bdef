"""Measures how long a model takes to load, each time in a new process, in turns with other checkouts of this
repository.

    python benchmarks/loading.py model.gguf other.gguf --tree before=../earlier-checkout --rounds 3

The model's files are in the system's cache, since a round before the others reads them. Printed are medians of seconds:
until Chairlift and torch are imported, from there until the engine is ready, and then until the first token. The last
line is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import parser_of, print_report

_HERE = Path(__file__).resolve().parents[1]
_LOAD = """
import json, sys, time
begin = time.perf_counter()
import torch
from chairlift import LLM, SamplingParams
imported = time.perf_counter()
with LLM(sys.argv[1], max_batch_size=1, max_seq_len=512) as llm:
    ready = time.perf_counter()
    llm.generate(["Hello"], SamplingParams(max_tokens=1))
    told = time.perf_counter()
print(json.dumps({"import_s": imported - begin, "load_s": ready - imported, "first_token_s": told - ready}))
"""


def load(tree: Path, model: Path) -> dict[str, float]:
    """Seconds of the parts of a start of that checkout. RuntimeError with what it says if it fails."""
    command = [sys.executable, "-c", _LOAD, str(model)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tree, env=environment)
    if done.returncode:
        raise RuntimeError(f"{tree} cannot load {model}: {done.stderr.strip()}")
    read: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return read


Load = Callable[[Path, Path], dict[str, float]]
"""Measures a start of a checkout with a model, like `load`."""


def measure(trees: dict[str, Path], model: Path, num_rounds: int, load: Load = load) -> dict[str, Any]:
    """Returns the figures of a model: its medians by checkout, and all rounds."""
    rounds = [{name: load(tree, model) for name, tree in trees.items()} for _ in range(num_rounds + 1)][1:]
    medians = {
        name: {part: round(statistics.median(each[name][part] for each in rounds), 2) for part in rounds[0][name]}
        for name in trees
    }
    return {"model": model.name, "megabytes": round(model.stat().st_size / 1e6), "medians": medians, "rounds": rounds}


def main() -> int:
    """Measures every model, prints a line for each checkout, and as the last line everything as JSON."""
    arguments = _parse_arguments()
    trees = {**dict(arguments.tree), "this": _HERE}
    cases = []
    for model in arguments.models:
        case = measure(trees, model.resolve(), arguments.rounds)
        cases.append(case)
        for name, parts in case["medians"].items():
            print(f"{case['model']}, {name}: {', '.join(f'{part} {seconds}' for part, seconds in parts.items())}")
    settings = {"rounds": arguments.rounds, "models": [case["model"] for case in cases], "trees": list(trees)}
    print_report(arguments, settings=settings, cases=cases)
    return 0


def _tree(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    return name, Path(path).resolve()


def _parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("models", type=Path, nargs="+", help="GGUF files")
    parser.add_argument("--rounds", type=int, default=3, help="besides one to warm up")
    parser.add_argument("--tree", type=_tree, action="append", default=[], help="another checkout: NAME=DIRECTORY")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
