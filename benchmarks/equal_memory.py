"""Requests of mixed lengths in a cache of so many tokens: elastic slots, slots of the whole length, vLLM's pages.

    python benchmarks/equal_memory.py --model DIR --vllm PYTHON --preload LIBRARIES

Lengths are lognormal with a median of 300 tokens, up to `--max-len`, half of each prompt and half output; all requests
are there at once. Each engine has a process of its own, one after the other, so the machine should be idle. The last
line is JSON. docs/performance.md has figures of such requests.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path

_SEED, _MEDIAN, _SIGMA, _SHORTEST = 1, 300, 1.0, 20
_MAX_ROWS = 32
_PAGE = 128  # tokens; vLLM's own choice on a CPU
_ENGINES = ("elastic", "whole", "vllm")


def main() -> None:
    """Measures every engine that can take part, or, as a process of its own, one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint whose context is at least --max-len")
    parser.add_argument("--tokens", type=int, default=16_384, help="that the cache holds")
    parser.add_argument("--max-len", type=int, default=8192)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--vllm", help="a Python that has vLLM")
    parser.add_argument("--preload", default="", help="libraries for vLLM's process, with ':' between them")
    parser.add_argument("--engine", choices=_ENGINES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine is not None:
        print(json.dumps(measure(arguments)))
        return
    figures = {name: run(name, arguments) for name in _ENGINES if name != "vllm" or arguments.vllm}
    for name, figure in figures.items():
        ratio = figures["elastic"]["tokens_per_s"] / figure["tokens_per_s"]
        print(f"{name:8} {figure['tokens_per_s']:8.1f} output tokens/s; elastic slots are {ratio:.2f} times as fast")
    print(json.dumps({"tokens": arguments.tokens, "requests": arguments.requests, "engines": figures}))


def run(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """One engine's figures, from a process of its own."""
    command = [arguments.vllm if name == "vllm" else sys.executable, __file__, "--engine", name, *sys.argv[1:]]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if name == "vllm":
        environment |= {"LD_PRELOAD": arguments.preload, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    figures: dict[str, float] = json.loads(output.splitlines()[-1])
    return figures


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Serves the requests; the same for every engine."""
    generator = random.Random(_SEED)
    drawn = (int(generator.lognormvariate(math.log(_MEDIAN), _SIGMA)) for _ in range(arguments.requests))
    lengths = [max(_SHORTEST, min(arguments.max_len, length)) for length in drawn]
    prompts = [[generator.randrange(10, 20_000) for _ in range(length - length // 2)] for length in lengths]
    outputs = [length // 2 for length in lengths]
    serve = generate_with_vllm if arguments.engine == "vllm" else generate
    seconds = serve(arguments, prompts, outputs)
    return {"tokens_per_s": sum(outputs) / seconds, "seconds": seconds, "output_tokens": sum(outputs)}


def generate(arguments: argparse.Namespace, prompts: list[list[int]], outputs: list[int]) -> float:
    """Seconds that Chairlift takes, with elastic slots or with as many as the cache holds in full."""
    from chairlift import LLM, SamplingParams

    shape = json.loads((Path(arguments.model) / "config.json").read_text())
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    bytes_per_token = (
        shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim * 2 * 2
    )  # keys, values; bfloat16
    num_rows = _MAX_ROWS if arguments.engine == "elastic" else arguments.tokens // arguments.max_len
    memory = arguments.tokens * bytes_per_token
    params = [SamplingParams(max_tokens=number, temperature=0, ignore_eos=True) for number in outputs]
    with LLM(
        arguments.model, max_batch_size=num_rows, max_seq_len=arguments.max_len, kv_cache_memory_bytes=memory
    ) as llm:
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin


def generate_with_vllm(arguments: argparse.Namespace, prompts: list[list[int]], outputs: list[int]) -> float:
    """Seconds that vLLM takes, with as many pages as the cache's tokens fill."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        arguments.model,
        dtype="bfloat16",
        max_model_len=arguments.max_len,
        max_num_seqs=_MAX_ROWS,
        num_gpu_blocks_override=arguments.tokens // _PAGE,
        block_size=_PAGE,
    )
    params = [SamplingParams(max_tokens=number, temperature=0, ignore_eos=True) for number in outputs]
    begin = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
