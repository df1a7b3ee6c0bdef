"""Measures what structured output costs: a batch of free rows, the same batch with half of its rows under a JSON
schema.

    python benchmarks/structured_output.py --rows 16

A random 135 M model with a tokenizer of 32,768 byte-pair tokens, which is trained here on Python's own library. Both
batches take turns; figures are medians of the time per step. The masks of the last token are computed beside the
forward pass, so both should take the same. The last line is JSON. It is the figure of docs/speed.md.
"""

import argparse
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import parser_of, print_report
from shapes import make_checkpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from chairlift import EngineConfig, SamplingParams
from chairlift.engine.core import EngineCore
from chairlift.engine.text.inputs import InputProcessor
from chairlift.params import StructuredOutputs

_SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "details": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["title", "tags", "details"],
}


def main() -> None:
    """Measures, prints a table, and as the last line all figures as JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = make_checkpoint("135m", Path(scratch) / "model", "bfloat16")
        train_tokenizer(directory)
        config = EngineConfig(model=str(directory), max_batch_size=arguments.rows, max_seq_len=1024)
        core = EngineCore(config)
        inputs = InputProcessor(core.config, core.vocab_size)
        rounds = [
            [step_time(core, inputs, arguments, num_constrained) for num_constrained in (0, arguments.rows // 2)]
            for _ in range(arguments.rounds)
        ]
    free, mixed = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratio = statistics.median(after / before for before, after in rounds)
    print(f"{arguments.rows} free rows: {1e3 * free:.1f} ms a step; half of them under a schema: {1e3 * mixed:.1f} ms")
    print_report(arguments, free_s=free, mixed_s=mixed, ratio=round(ratio, 3), rounds=rounds)


def train_tokenizer(directory: Path) -> None:
    """Puts a byte-pair tokenizer into the checkpoint."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2**15,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(str(path) for path in Path(sysconfig.get_path("stdlib")).glob("*.py"))
    tokenizer.train(sources, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")  # type: ignore[no-untyped-call]
    wrapped.save_pretrained(directory)


def step_time(core: EngineCore, inputs: InputProcessor, arguments: argparse.Namespace, num_constrained: int) -> float:
    """Median seconds of a step in which every row decodes."""
    free: dict[str, Any] = {"max_tokens": arguments.steps + 8, "ignore_eos": True, "temperature": 1.0, "seed": 1}
    for row in range(arguments.rows):
        structure = StructuredOutputs(json=_SCHEMA) if row < num_constrained else None
        params = SamplingParams(**free, structured_outputs=structure)
        core.add(*inputs.prepare(str(row), "def main", params).requests)
    core.step()
    times = []
    for _ in range(arguments.steps):
        start = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - start)
    while core.has_work:
        core.step()
    return statistics.median(times)


if __name__ == "__main__":
    main()
