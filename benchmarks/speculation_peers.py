"""Measures what guessing from the text gains each engine: the prompts of benchmarks/speculation.py, with and without,
in turns.

    python benchmarks/speculation_peers.py --model smollm2 --rows 1 8 \\
        --peer llama.cpp=llama.cpp/bin/llama-server,gguf=SmolLM2-135M-Instruct.Q4_1.gguf \\
        --peer openvino=openvino/bin/python,model=models/smollm2-openvino-int4

Peers are named as for benchmarks/compare.py. Each engine runs twice, the second time with its own guesses from the
text: Chairlift's `ngram`, llama.cpp's `ngram-map-k`, OpenVINO's prompt lookup. All others are stopped meanwhile. The
requests of a batch are the same, decoded greedily past any end of text; no engine reuses a prompt or an earlier answer.

Figures are medians of the ratios of pairs. The last line is JSON; the exit code is 1 if an engine failed.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from comparison.contest import Entrant, Limits
from machine import format_table, parser_of, print_report, usable_cores
from peers.engines import Engine, UsageError, exit_on_signals, take_part
from peers.worker import WorkerError
from peers.workers.protocol import Settings
from speculation import PROMPTS

from chairlift.engine.text.chat_template import ChatOptions
from chairlift.engine.text.tokenizer import Tokenizer
from chairlift.models.checkpoint import find_model

_GUESSES = {
    "chairlift": {"speculation": "ngram"},
    "llama.cpp": {"spec_type": "ngram-map-k"},
    "openvino": {"prompt_lookup": "5"},  # tokens a step, as its documentation has it
}
_OF_BOTH = {"chairlift": {"enable_prefix_caching": "false"}}
_KINDS = ("copy", "json", "code", "free")
_SLOT_TOKENS = 1024
_LIMITS = Limits(start_up=300, answer=120)  # a server that crashes with requests under way may leave connections open


class Pair:
    """An engine without guesses, and the same one with."""

    def __init__(self, engine: Engine, settings: Settings, directory: Path) -> None:
        self.name = engine.name
        options = engine.options | _OF_BOTH.get(engine.kind, {})
        self.entrants = [
            Entrant(replace(engine, options=options | guesses), settings, directory / f"{engine.name}-{i}.log", _LIMITS)
            for i, guesses in enumerate(({}, _GUESSES[engine.kind]))
        ]

    def measure(self, prompts: list[list[int]], num_tokens: int, num_rounds: int) -> dict[str, Any]:
        """Returns how many times as fast guesses make it, and the seconds; or why it failed."""
        try:
            rounds = [[each.generate(prompts, num_tokens) for each in self.entrants] for _ in range(num_rounds + 1)]
        except WorkerError as error:
            return {"failure": str(error)}
        pairs = rounds[1:]  # the first one warms up, and learns
        ratio = statistics.median(without / guessing for without, guessing in pairs)
        return {"ratio": round(ratio, 3), "seconds": pairs}


def main() -> int:
    """Measures, prints a table, and as the last line all figures as JSON."""
    arguments, engines = _parse()
    exit_on_signals()
    tokenizer = Tokenizer(find_model(arguments.model))
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        pairs = [Pair(engine, _settings(arguments), Path(directory)) for engine in engines]
        for entrant in itertools.chain.from_iterable(pair.entrants for pair in pairs):
            stack.callback(entrant.close)
        for kind, num_rows, pair in itertools.product(arguments.kinds, arguments.rows, pairs):
            messages = [{"role": "user", "content": PROMPTS[kind]}]
            prompts = [tokenizer.encode_chat(messages, ChatOptions(), _SLOT_TOKENS)] * num_rows
            found = pair.measure(prompts, arguments.tokens, arguments.rounds)
            print(f"{kind}, {num_rows} rows, {pair.name}: {found}", file=sys.stderr, flush=True)
            figures.append({"kind": kind, "rows": num_rows, "engine": pair.name, **found})
        about = {pair.name: pair.entrants[1].standing.about for pair in pairs}
    print(_table(figures))
    print_report(arguments, engines=about, figures=figures)
    return int(any("failure" in each for each in figures))


def _parse() -> tuple[argparse.Namespace, list[Engine]]:
    """The flags, and who takes part."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--model", default="smollm2", help="what Chairlift serves, and whose tokenizer all prompts have"
    )
    parser.add_argument("--peer", dest="peers", action="append", default=[], metavar="KIND[=PATH][,key=value...]")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--kinds", nargs="+", choices=_KINDS, default=list(_KINDS))
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    try:
        engines = take_part(arguments.peers)
    except UsageError as error:
        parser.error(str(error))
    if strangers := [engine.name for engine in engines if engine.kind not in _GUESSES]:
        parser.error(f"--peer {strangers[0]}: it does not guess from the text; those that do are {', '.join(_GUESSES)}")
    return arguments, engines


def _settings(arguments: argparse.Namespace) -> Settings:
    return Settings(
        model=arguments.model,
        dtype="bfloat16",
        quantization=None,
        num_threads=usable_cores(),
        max_requests=max(arguments.rows),
        max_prompt_tokens=_SLOT_TOKENS - arguments.tokens,
        max_tokens=_SLOT_TOKENS,
        cache_gigabytes=1,
    )


def _table(figures: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(each["engine"] for each in figures))
    rows = [["", *names]]
    for (kind, num_rows), group in itertools.groupby(figures, lambda each: (each["kind"], each["rows"])):
        rows.append(
            [f"{kind}, {num_rows} rows", *(f"{each['ratio']:.2f}" if "ratio" in each else "failed" for each in group)]
        )
    return format_table(rows)


if __name__ == "__main__":
    sys.exit(main())
