"""Measures what number formats and instruction sets make of a model: bits, perplexity, tokens per second, memory.

    python benchmarks/formats.py --model smollm2 --levels avx512_vnni
    python benchmarks/formats.py --shape 1b --formats int8 int4

Each level with each format is an engine of its own, and they take turns as in compare.py. Formats are bfloat16, int8
and int4, into which a GGUF file's numbers are rounded, and `file`, the file's own. The bits of a weight are what the
packed model takes in memory, with all its scales. The perplexity is that of a text in pieces of 512 tokens, on this
machine's best level; random weights have none. The last line is JSON. The tables of docs/speed.md are made of it.
"""

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from comparison.ceiling import Workload
from comparison.contest import Contest, Entrant, Limits, Standing, Trial
from machine import parser_of, print_report, usable_cores
from peers.engines import OURS, Engine, UsageError, exit_on_signals
from peers.workers.protocol import Settings
from shapes import SHAPES, make_checkpoint, write_numbers

from chairlift import LLM, SamplingParams
from chairlift.config import DType, Quantization
from chairlift.models import load_model, open_checkpoint
from chairlift.models.cpu import CpuDecoder
from chairlift.models.cpu.processor import usable_instruction_sets
from chairlift.models.loader import count_parameters
from chairlift.models.precision import widths_for

FORMATS = ("bfloat16", "int8", "int4", "file")
PROSE = Path(__file__).parents[1] / "tests" / "parity" / "prose.txt"
_WORKLOADS = ("1x128+64", "8x128+64", "32x128+64")
_PIECE = 512  # tokens whose probabilities are asked for at once
_LIMITS = Limits(start_up=600, answer=1800)
_NUM_TOKEN_IDS = 200  # as many as every vocabulary has


@dataclass(frozen=True, slots=True)
class Format:
    """One format of a model: where it and its tokenizer are, and what its weights are rounded to."""

    model: str
    tokenizer: str
    quantization: str | None

    def options(self, level: str) -> dict[str, str]:
        """Those of a worker."""
        rounding = {"quantization": self.quantization} if self.quantization else {}
        own = {"model": self.model, "tokenizer": self.tokenizer, "attention_backend": "cpu", "level": level}
        return own | rounding

    def bits_per_weight(self) -> float:
        """With scales, offsets and what stays in bfloat16."""
        checkpoint = open_checkpoint(self.model)
        model = load_model(checkpoint, DType.BFLOAT16, "cpu", _PIECE, keeps_groups=True)
        num_parameters = count_parameters(checkpoint.config)
        widths = widths_for(Quantization(self.quantization) if self.quantization else None, num_parameters)
        return 8 * CpuDecoder(model, _PIECE, widths=widths).weight_bytes / num_parameters

    def perplexity(self, text: str) -> float:
        """Perplexity of the text in pieces, whose first tokens have no probability."""
        with LLM(
            self.model,
            tokenizer=self.tokenizer,
            dtype="bfloat16",
            quantization=self.quantization,
            attention_backend="cpu",
            max_seq_len=_PIECE + 1,
            max_batch_size=8,
        ) as llm:
            token_ids = llm.inputs.tokenize(text)
            pieces = [token_ids[start : start + _PIECE] for start in range(0, len(token_ids), _PIECE)]
            scored = llm.generate(pieces, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        entries = [
            entry[token].logprob
            for output in scored
            for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
            if entry is not None
        ]
        return math.exp(-statistics.fmean(entries))


def main() -> int:
    """Measures, prints the table, and as the last line everything as JSON; returns the exit code."""
    arguments = _parse_arguments()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            formats = _formats(arguments, Path(scratch))
        except UsageError as error:
            print(f"formats.py: {error}", file=sys.stderr)
            return 2
        facts = {name: _facts(each, arguments) for name, each in formats.items()}
        trials, standings = _contest(formats, arguments, Path(scratch))
    for line in _table(facts, trials, standings):
        print(line)
    failed = any(score.failure for trial in trials for score in trial.scores.values())
    print_report(
        arguments,
        formats=facts,
        engines={name: asdict(standing) for name, standing in standings.items()},
        results=[
            {"workload": trial.workload.name, "rates": {name: trial.round_rates(name) for name in standings}}
            for trial in trials
        ],
        failed=failed,
    )
    return int(failed)


def _formats(arguments: argparse.Namespace, scratch: Path) -> dict[str, Format]:
    """By name. A GGUF file's numbers become a checkpoint first, since `int8` and `int4` round such."""
    model = arguments.model or str(make_checkpoint(arguments.shape, scratch / "model"))
    is_file = open_checkpoint(model).gguf is not None
    numbers = str(write_numbers(model, scratch / "numbers")) if is_file else model
    roundings = {"bfloat16": None, "int8": "int8", "int4": "int4"}
    made = {name: Format(numbers, model, rounding) for name, rounding in roundings.items()}
    if is_file:
        made["file"] = Format(model, model, None)
    if absent := set(arguments.formats) - made.keys():
        raise UsageError(f"--formats {', '.join(absent)}: {model} is no GGUF file")
    return {name: made[name] for name in arguments.formats}


def _facts(each: Format, arguments: argparse.Namespace) -> dict[str, float | None]:
    """Returns what no clock is needed for."""
    text = arguments.text.read_text(encoding="utf-8")
    perplexity = None if arguments.model is None else each.perplexity(text)
    return {"bits": each.bits_per_weight(), "perplexity": perplexity}


def _contest(
    formats: dict[str, Format], arguments: argparse.Namespace, logs: Path
) -> tuple[list[Trial], dict[str, Standing]]:
    """Every format at every level."""
    workloads = [Workload.parse(text) for text in arguments.workloads]
    max_tokens = max(each.prompt_tokens + each.output_tokens for each in workloads)
    settings = Settings(
        model="",
        dtype="bfloat16",
        quantization=None,
        num_threads=arguments.threads,
        max_requests=max(each.num_requests for each in workloads),
        max_prompt_tokens=max(each.prompt_tokens for each in workloads),
        max_tokens=max_tokens,
        cache_gigabytes=1,
    )
    engines = [
        Engine(f"{level} {name}", OURS, sys.executable, each.options(level))
        for level in arguments.levels
        for name, each in formats.items()
    ]
    entrants = [Entrant(each, settings, logs / f"{each.name}.log", _LIMITS) for each in engines]
    with Contest(entrants, None, _NUM_TOKEN_IDS) as contest:
        contest.start([1, 2, 3])
        return [contest.run(workload, arguments.rounds) for workload in workloads], contest.standings


def _table(
    facts: dict[str, dict[str, float | None]], trials: list[Trial], standings: dict[str, Standing]
) -> Iterator[str]:
    """In Markdown."""
    heads = ["level", "format", "bits a weight", "perplexity", *(trial.workload.name for trial in trials)]
    yield _line([*heads, "peak memory, GB"])
    yield _line(["---"] * (len(heads) + 1))
    for name, standing in standings.items():
        level, format_name = name.split()
        known = facts[format_name]
        rates = [_cell(trial.median(name), 1) for trial in trials]
        memory = _cell(standing.peak_bytes / 1e9 or None, 2)
        yield _line([level, format_name, _cell(known["bits"], 1), _cell(known["perplexity"], 2), *rates, memory])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: float | None, decimals: int) -> str:
    return "" if value is None else f"{value:,.{decimals}f}"


def _parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", help="a checkpoint directory, a GGUF file, or smollm2")
    parser.add_argument("--shape", choices=SHAPES, default="135m", help="random weights of this shape, without --model")
    parser.add_argument("--formats", choices=FORMATS, nargs="+", default=list(FORMATS[:3]))
    parser.add_argument("--levels", choices=usable_instruction_sets(), nargs="+", default=usable_instruction_sets()[:1])
    parser.add_argument("--workloads", nargs="+", default=list(_WORKLOADS), metavar="REQUESTSxPROMPT+OUTPUT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--text", type=Path, default=PROSE, help="whose perplexity is computed")
    return parser.parse_args()


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
