"""Measures what rounding to fewer bits costs a model, beside llama.cpp's formats of the same numbers.

    python benchmarks/rounding.py --models gemma-3-270m.gguf smollm2 --quantize llama.cpp/bin/llama-quantize

Every format is compared with the numbers in bfloat16, as `chairlift compare` does it. Small models are to be had in
4 to 6 bits only, and rounding such numbers once more would cost their own format nothing. So they are first moved by
random parts of a step of that format, to numbers that it could have been made of. Bits are those of a weight that is
multiplied, in memory for Chairlift's formats and in the file for llama.cpp's: an embedding that is not the head as well
is left out. The last line is JSON, of which a table in docs/speed.md is made. No clock is needed, so other programs do
not disturb it.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from machine import parser_of, print_report
from peers.unrounded import write_unrounded

from chairlift.compare.command import OWN_TEXT, measure
from chairlift.compare.config import CompareConfig
from chairlift.compare.own_model import OwnModel
from chairlift.compare.report import lines_of
from chairlift.config import DType, Quantization
from chairlift.models import load_model, open_checkpoint
from chairlift.models.checkpoint import find_model
from chairlift.models.config import ModelConfig
from chairlift.models.cpu import CpuDecoder
from chairlift.models.loader import count_parameters
from chairlift.models.precision import widths_for

_HEAD, _EMBEDDING = "output.weight", "token_embd.weight"
_CONTEXT = 512  # tokens of a window


@dataclass(frozen=True, slots=True)
class Candidate:
    """A format of a model: settings of an engine, and bits."""

    name: str
    settings: dict[str, str]
    bits: float  # of a weight


def main() -> int:
    """Measures, prints each comparison, and as the last line everything as JSON; returns the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=["smollm2"], help="GGUF files, or smollm2 (%(default)s)")
    parser.add_argument("--formats", nargs="*", default=["int8", "int4"], help="Chairlift's, may be none (%(default)s)")
    parser.add_argument(
        "--quantize", type=Path, default=None, help="llama.cpp's program; none: only Chairlift's formats"
    )
    parser.add_argument("--theirs", nargs="+", default=["Q4_0", "Q4_1", "Q4_K_M"], help="llama.cpp's (%(default)s)")
    parser.add_argument("--text", type=Path, default=OWN_TEXT, help="(the one of chairlift compare)")
    parser.add_argument("--context", type=int, default=_CONTEXT, help="tokens of a window (%(default)s)")
    parser.add_argument("--max-windows", type=int, default=None, help="(all of the text)")
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    for model in arguments.models:
        with tempfile.TemporaryDirectory() as scratch:
            results += _compare(find_model(model), arguments, Path(scratch))
    print_report(arguments, results=results)
    return 0


def _compare(file: Path, arguments: argparse.Namespace, scratch: Path) -> Iterator[dict[str, Any]]:
    """Each format of one model beside its numbers in bfloat16."""
    numbers = scratch / "numbers.gguf"
    write_unrounded(file, numbers)
    text = arguments.text.read_text(encoding="utf-8")
    for candidate in _candidates(numbers, arguments, scratch):
        config = CompareConfig(
            reference=str(numbers),
            candidate=candidate.name,
            context=arguments.context,
            max_windows=arguments.max_windows,
        )
        exact = OwnModel(file.stem, {"model": str(numbers), "dtype": "bfloat16"}, arguments.context)
        report = measure(exact, OwnModel(candidate.name, candidate.settings, arguments.context), text, config)
        print(
            "\n".join([f"{file.stem} as {candidate.name}, {candidate.bits:.2f} bits", *lines_of(report), ""]),
            flush=True,
        )
        yield {"model": file.stem, "format": candidate.name, "bits": candidate.bits, **asdict(report.summary)}


def _candidates(numbers: Path, arguments: argparse.Namespace, scratch: Path) -> Iterator[Candidate]:
    """Chairlift's formats, then llama.cpp's, whose files are written one at a time."""
    plain = {"model": str(numbers), "dtype": "bfloat16"}
    for name in arguments.formats:
        yield Candidate(name, {**plain, "quantization": name}, _bits_in_memory(numbers, Quantization(name)))
    for name in arguments.theirs if arguments.quantize else ():
        file = scratch / f"{name}.gguf"
        subprocess.run([arguments.quantize, numbers, file, name], check=True, capture_output=True)
        yield Candidate(name, {"model": str(file), "dtype": "bfloat16"}, _bits_in_file(file))
        file.unlink()


def _bits_in_memory(numbers: Path, quantization: Quantization) -> float:
    """Bits of a multiplied weight that is rounded at start."""
    checkpoint = open_checkpoint(str(numbers))
    config = checkpoint.config
    assert isinstance(config, ModelConfig), "others are not quantized"
    num_looked_up = 0 if config.is_tied else config.vocab_size * config.hidden_size
    model = load_model(checkpoint, DType.BFLOAT16, "cpu", _CONTEXT)
    num_parameters = count_parameters(config)
    widths = widths_for(quantization, num_parameters)
    num_bytes = CpuDecoder(model, _CONTEXT, widths=widths).weight_bytes - 2 * num_looked_up
    return 8 * num_bytes / (num_parameters - num_looked_up)


def _bits_in_file(file: Path) -> float:
    """Bits of a multiplied weight of a GGUF file."""
    tensors = GGUFReader(file).tensors
    has_head = any(each.name == _HEAD for each in tensors)
    multiplied = [each for each in tensors if not (has_head and each.name == _EMBEDDING)]
    return float(8 * sum(int(each.n_bytes) for each in multiplied) / sum(int(each.n_elements) for each in multiplied))


if __name__ == "__main__":
    sys.exit(main())
