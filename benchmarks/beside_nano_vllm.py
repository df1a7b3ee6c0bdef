"""Chairlift beside nano-vllm on one GPU: output tokens a second on nano-vllm's own benchmark, and two smaller loads.

    python benchmarks/beside_nano_vllm.py --nano DIR                     DIR holds the package nanovllm
    python benchmarks/beside_nano_vllm.py --engines chairlift --shape tiny --device cpu        (the way through)

nano-vllm's benchmark sends 256 prompts of 100 to 1,024 random tokens at once and asks for as many tokens back, at a
temperature of 0.6. Here both engines get the same prompts, and random weights of the same shape: nano-vllm knows Qwen3
alone, so that is what both run. Prompts are new in each round, as both reuse prefixes. Each engine has a process of its
own and its default settings, except that Chairlift is told how many requests there will be. nano-vllm needs flash-attn.
The last line is JSON.
"""

import argparse
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import format_table, parser_of, print_report
from shapes import SHAPES, word_tokenizer

_QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "dtype": "bfloat16",
}
_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
_MODELS: dict[str, dict[str, Any]] = {
    "0.6b": _QWEN3 | SHAPES["qwen3-0.6b"] | {"tie_word_embeddings": True},
    "8b": _QWEN3  # the sizes of Llama 3.1 8B
    | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336}
    | {"vocab_size": 128256, "tie_word_embeddings": False},
    "tiny": _QWEN3 | _TINY | {"intermediate_size": 96, "vocab_size": 512, "tie_word_embeddings": True},
}
_LARGEST_ID = 10_000  # as in nano-vllm's benchmark
_TEMPERATURE = 0.6
_WARM_UP_SEED = 999


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are sent at once. Lengths are drawn evenly between two."""

    num_requests: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]

    @property
    def name(self) -> str:
        """For instance 256x100..1024+100..1024."""
        prompt, output = (
            str(low) if low == high else f"{low}..{high}" for low, high in (self.prompt_tokens, self.output_tokens)
        )
        return f"{self.num_requests}x{prompt}+{output}"

    def draw(self, seed: int, vocab_size: int) -> tuple[list[list[int]], list[int]]:
        """The prompts, and how many tokens each is to be followed by."""
        generator = random.Random(seed)
        limit = min(vocab_size, _LARGEST_ID)
        lengths = [generator.randint(*self.prompt_tokens) for _ in range(self.num_requests)]
        prompts = [[generator.randrange(limit) for _ in range(length)] for length in lengths]
        return prompts, [generator.randint(*self.output_tokens) for _ in prompts]


_FEW = (Load(1, (128, 128), (128, 128)), Load(32, (1024, 1024), (128, 128)))
_LOADS = {
    "0.6b": (Load(256, (100, 1024), (100, 1024)), *_FEW),
    "8b": (Load(96, (100, 1024), (100, 512)), *_FEW),
    "tiny": (Load(8, (5, 20), (5, 20)), Load(1, (8, 8), (8, 8))),
}

Generate = Callable[[Sequence[list[int]], Sequence[int]], list[int]]
"""Answers prompts with so many tokens each; returns how many each got."""


def main() -> int:
    """Measures both engines, prints a table, and as the last line everything as JSON; returns the exit code."""
    arguments = _parse_arguments()
    if arguments.engine is not None:
        print(json.dumps(measure(arguments)), flush=True)
        os._exit(0)  # nano-vllm's exit handlers wait for its process group
    figures = {name: figure for name in arguments.engines if (figure := _run(name, arguments))}
    print(_table(figures, [load.name for load in _LOADS[arguments.shape]]))
    print_report(arguments, figures=figures)
    return 0 if len(figures) == len(arguments.engines) else 1


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """One engine's figures: output tokens a second of each load, for each round."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    start = time.perf_counter()
    loads, fields = _LOADS[arguments.shape], _MODELS[arguments.shape]
    generate, about = _ENGINES[arguments.engine](arguments, loads)
    generate(*loads[-1].draw(_WARM_UP_SEED, fields["vocab_size"]))
    started = time.perf_counter() - start
    rates: dict[str, list[float]] = {load.name: [] for load in loads}
    for seed in range(arguments.rounds):
        for load in loads:
            prompts, lengths = load.draw(seed, fields["vocab_size"])
            begin = time.perf_counter()
            counts = generate(prompts, lengths)
            rates[load.name].append(sum(lengths) / (time.perf_counter() - begin))
            print(f"{arguments.engine} {load.name}: {rates[load.name][-1]:.0f} tokens/s", file=sys.stderr, flush=True)
            if counts != lengths:
                raise RuntimeError(f"{arguments.engine} gave {counts} tokens for {lengths}")
    return {"about": about, "start_s": started, "tokens_per_s": rates}


def _run(name: str, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The figures of an engine in a process of its own; None if it fails, which it says itself."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, __file__, "--engine", name, "--scratch", scratch, "--shape", arguments.shape]
        command += ["--device", arguments.device, "--rounds", str(arguments.rounds), "--nano", str(arguments.nano)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return None
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}: {json.dumps(figures)}", file=sys.stderr, flush=True)  # the other may never end
    return figures


def _chairlift(arguments: argparse.Namespace, loads: Sequence[Load]) -> tuple[Generate, str]:
    from chairlift import LLM, SamplingParams

    llm = LLM(
        str(_write_model(arguments)),
        load_format="dummy",
        device=arguments.device,
        max_batch_size=max(load.num_requests for load in loads),
        max_seq_len=_longest(loads),
    )

    def generate(prompts: Sequence[list[int]], lengths: Sequence[int]) -> list[int]:
        params = [SamplingParams(temperature=_TEMPERATURE, ignore_eos=True, max_tokens=each) for each in lengths]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [len(each.outputs[0].token_ids) for each in outputs]

    return generate, f"{llm.config.attention_backend}, {llm.config.max_num_batched_tokens} tokens a step"


def _nano(arguments: argparse.Namespace, loads: Sequence[Load]) -> tuple[Generate, str]:
    sys.path.insert(0, str(arguments.nano))
    import torch

    nanovllm: Any = importlib.import_module("nanovllm")
    llm = nanovllm.LLM(str(_write_model(arguments)), max_model_len=max(4096, _longest(loads)))
    # It found no file of weights. Its graphs hold the addresses of these, which stay.
    for weight in llm.model_runner.model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight.data, std=weight.shape[1] ** -0.5)

    def generate(prompts: Sequence[list[int]], lengths: Sequence[int]) -> list[int]:
        params = [
            nanovllm.SamplingParams(temperature=_TEMPERATURE, ignore_eos=True, max_tokens=each) for each in lengths
        ]
        outputs = llm.generate(list(prompts), params, use_tqdm=False)
        return [len(each["token_ids"]) for each in outputs]

    return generate, "flash_attn, 16384 tokens a step"


_ENGINES: dict[str, Callable[[argparse.Namespace, Sequence[Load]], tuple[Generate, str]]] = {
    "chairlift": _chairlift,
    "nano-vllm": _nano,
}


def _longest(loads: Sequence[Load]) -> int:
    """The tokens of the longest prompt with its answer."""
    return max(load.prompt_tokens[1] + load.output_tokens[1] for load in loads)


def _write_model(arguments: argparse.Namespace) -> Path:
    """A directory with a config and a tokenizer, as both engines turn tokens into text."""
    fields = _MODELS[arguments.shape]
    directory: Path = arguments.scratch / "model"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    word_tokenizer(fields["vocab_size"]).save_pretrained(directory)
    return directory


def _table(figures: dict[str, dict[str, Any]], loads: Sequence[str]) -> str:
    """The best round of each engine, and how many times as fast Chairlift is."""
    best = {name: {load: max(each["tokens_per_s"][load]) for load in loads} for name, each in figures.items()}
    rows = [["output tokens/s", *best, "times"]]
    for load in loads:
        rates = [each[load] for each in best.values()]
        times = f"{rates[0] / rates[1]:.2f}" if len(rates) > 1 else ""
        rows.append([load, *(f"{rate:.0f}" for rate in rates), times])
    return format_table(rows)


def _parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--nano", type=Path, default=Path(), help="directory that holds the package nanovllm")
    parser.add_argument("--engines", choices=_ENGINES, nargs="+", default=list(_ENGINES), metavar="ENGINE")
    parser.add_argument("--shape", choices=_MODELS, default="0.6b")
    parser.add_argument("--device", default="cuda", help="of Chairlift; nano-vllm runs on CUDA alone")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--engine", choices=_ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
