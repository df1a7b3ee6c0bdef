"""Output tokens per second of n requests with 128 prompt and 128 output tokens each, all at once, greedy.

    python benchmarks/offline_throughput.py --shape 135m --requests 1 8 32 --peer transformers

Engines take turns within each round, so that a noisy machine disturbs both alike; figures are medians over rounds, and
ratios are medians of the rounds' ratios. The clock runs over prefill and decode. The last line is JSON.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES, make_checkpoint
from transformers import LlamaForCausalLM

import chairlift
from chairlift import LLM, SamplingParams

Engine = Callable[[list[list[int]]], int]
"""Runs prompts to their ends; returns how many tokens it generated."""


def main() -> None:
    """Measures, prints a table, and as the last line all figures as JSON."""
    arguments = _parse_arguments()
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.model or make_checkpoint(arguments.shape, Path(scratch) / "model", arguments.dtype)
        engines = _engines(directory, arguments)
        results = [_measure(engines, num_requests, arguments) for num_requests in arguments.requests]
    print(f"{'requests':>8}  " + "  ".join(f"{name:>14}" for name in engines) + "  ratio")
    for result in results:
        rates = "  ".join(f"{statistics.median(result['rates'][name]):14.1f}" for name in engines)
        print(f"{result['requests']:>8}  {rates}  {result['ratio'] or '':>5}")
    print(json.dumps({"settings": _settings(arguments), "results": results}))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint directory; left out: random weights of --shape")
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--peer",
        choices=["transformers", "batch-invariant"],
        help="also measure this one, in turns; batch-invariant: Chairlift with that setting",
    )
    return parser.parse_args()


def _engines(directory: Path, arguments: argparse.Namespace) -> dict[str, Engine]:
    engines = {"chairlift": _chairlift(directory, arguments)}
    if arguments.peer == "transformers":
        engines["transformers"] = _transformers(directory, arguments)
    if arguments.peer == "batch-invariant":
        engines["batch-invariant"] = _chairlift(directory, arguments, batch_invariant=True)
    return engines


def _chairlift(directory: Path, arguments: argparse.Namespace, **config: Any) -> Engine:
    num_tokens = arguments.output_tokens
    llm = LLM(
        str(directory),
        dtype=arguments.dtype,
        max_batch_size=max(arguments.requests),
        max_seq_len=arguments.prompt_tokens + num_tokens,
        **config,
    )
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)

    def run(prompts: list[list[int]]) -> int:
        return sum(len(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False))

    return run


def _transformers(directory: Path, arguments: argparse.Namespace) -> Engine:
    """`generate` with its static batch: all prompts have one length, so it wastes nothing on padding."""
    model: Any = LlamaForCausalLM.from_pretrained(directory, dtype=getattr(torch, arguments.dtype))
    num_tokens = arguments.output_tokens

    @torch.inference_mode()
    def run(prompts: list[list[int]]) -> int:
        ids = torch.tensor(prompts)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            pad_token_id=0,
        )
        return int(output.numel() - ids.numel())

    return run


def _measure(engines: dict[str, Engine], num_requests: int, arguments: argparse.Namespace) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(num_requests)
    prompts = torch.randint(0, 200, (num_requests, arguments.prompt_tokens), generator=generator).tolist()
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():  # warm-up, not counted
        engine(prompts[:1])
    for _ in range(arguments.rounds):
        for name, engine in engines.items():
            start = time.perf_counter()
            num_generated = engine(prompts)
            rates[name].append(num_generated / (time.perf_counter() - start))
    ratio = None
    if len(rates) == 2:
        ours, theirs = rates.values()
        ratio = round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 2)
    return {"requests": num_requests, "rates": rates, "ratio": ratio}


def _settings(arguments: argparse.Namespace) -> dict[str, object]:
    named = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    versions = {"chairlift": chairlift.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {**named, "versions": versions, "threads": torch.get_num_threads(), "machine": platform.machine()}


if __name__ == "__main__":
    main()
