"""Measures how far a model in fewer bits is from itself in float32: `chairlift compare`, for several models and
formats.

    python benchmarks/divergence.py --models smollm2 bundled --max-windows 20

Formats are bfloat16, int8 and int4, into which a GGUF file's numbers are rounded, and `file`, the file's own. The last
line is JSON. README's table of divergences is made of it. No clock is needed, so other programs do not disturb it.
"""

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from machine import parser_of, print_report
from shapes import write_numbers

from chairlift.compare.command import OWN_TEXT, measure
from chairlift.compare.config import CompareConfig
from chairlift.compare.own_model import OwnModel
from chairlift.compare.report import lines_of
from chairlift.models import open_checkpoint

FORMATS: dict[str, dict[str, str]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}


def main() -> int:
    """Measures, prints each comparison, and as the last line everything as JSON; returns the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=["smollm2", "bundled"], help="(%(default)s)")
    parser.add_argument("--text", type=Path, default=OWN_TEXT, help="(the one of chairlift compare)")
    parser.add_argument("--context", type=int, default=512, help="tokens of a window (%(default)s)")
    parser.add_argument("--max-windows", type=int, default=None, help="(all of the text)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        results = [result for model in arguments.models for result in _compare(model, arguments, Path(scratch) / model)]
    print_report(arguments, results=results)
    return 0


def _compare(model: str, arguments: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """All formats of one model beside its numbers in float32."""
    is_file = open_checkpoint(model).gguf is not None
    numbers = str(write_numbers(model, scratch)) if is_file else model
    own = {"model": numbers, "tokenizer": model}
    formats = {name: {**own, **settings} for name, settings in FORMATS.items()}
    if is_file:
        formats["file"] = {"model": model, "dtype": "bfloat16"}
    results = []
    text = arguments.text.read_text(encoding="utf-8")
    for name, settings in formats.items():
        config = CompareConfig(
            reference=model, candidate=name, context=arguments.context, max_windows=arguments.max_windows
        )
        reference = OwnModel(f"{model} in float32", {**own, "dtype": "float32"}, arguments.context)
        report = measure(reference, OwnModel(f"{model} as {name}", settings, arguments.context), text, config)
        print("\n".join([*lines_of(report), ""]), flush=True)
        results.append({"model": model, "format": name, **asdict(report.summary)})
    return results


if __name__ == "__main__":
    sys.exit(main())
