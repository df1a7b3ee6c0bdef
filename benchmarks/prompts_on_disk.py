"""Measure what a directory of prompts is good for: a server is stopped and started again, and gets the same prompt.

python benchmarks/prompts_on_disk.py --model DIR --num-tokens 8000
python benchmarks/prompts_on_disk.py --model DIR --llama-server PATH --gguf FILE

Prints seconds to the first token: cold, from memory, and after a restart from disk; how many tokens were cached, what
was written, and whether all log-probabilities are equal. With `--llama-server` the same of llama.cpp, whose slot is
saved before the restart and restored after it. The last line is JSON.
"""

import json
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from machine import format_table, parser_of, print_report, usable_cores
from peers.llama_slots import LlamaServer
from peers.llama_slots import measure as measure_llama

_NUM_ANSWERED = 16
_LETTERS = range(64, 90)  # ids of a to z in the byte tokenizer of benchmarks/shapes.py
_TOKENS = range(100, 200)  # ids that any model has, and none that means an end


@dataclass(frozen=True)
class Reply:
    """An answer, with when its first token came."""

    first_token_s: float
    num_cached: int
    logprobs: list[float] = field(repr=False)
    tokens: list[str] = field(repr=False)


@contextmanager
def serving(model: str, *flags: str) -> Iterator[str]:
    """Serves a model, and stops it by SIGTERM; its URL."""
    command = [sys.executable, "-m", "chairlift", "serve", model, "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None, "it is a pipe"
        for line in process.stderr:
            print(line, end="", file=sys.stderr)
            if found := re.search(r"serving on (https?://\S+)", line):
                break
        else:
            raise SystemExit("the server did not start")
        try:
            yield found[1]
        finally:
            process.terminate()
            print(process.stderr.read(), end="", file=sys.stderr)
            process.wait()


def ask(url: str, prompt: list[int]) -> Reply:
    """Streams an answer."""
    with urllib.request.urlopen(f"{url}/v1/models") as reply:
        model = json.load(reply)["data"][0]["id"]
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": _NUM_ANSWERED, "temperature": 0}
    body |= {"ignore_eos": True, "logprobs": 1, "stream": True, "stream_options": {"include_usage": True}}
    body["logit_bias"] = dict.fromkeys(map(str, _LETTERS), 100)  # a token without a text would come with a later one
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    begin, first_token_s, num_cached = time.perf_counter(), 0.0, 0
    logprobs, tokens = list[float](), list[str]()
    with urllib.request.urlopen(request) as stream:
        for line in stream:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[len(b"data: ") :])
            for choice in chunk["choices"]:
                first_token_s = first_token_s or time.perf_counter() - begin
                if choice["logprobs"]:
                    logprobs += choice["logprobs"]["token_logprobs"]
                    tokens += choice["logprobs"]["tokens"]
            if chunk.get("usage"):
                num_cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Reply(first_token_s, num_cached, logprobs, tokens)


def measure_chairlift(model: str, directory: Path, prompt: list[int], flags: list[str]) -> dict[str, Any]:
    """Asks, restarts and asks again. Seconds and bytes."""
    flags = ["--prefix-cache-dir", str(directory), *flags]
    with serving(model, *flags) as url:
        cold, memory = ask(url, prompt), ask(url, prompt)
        begin = time.perf_counter()
    stop_s = time.perf_counter() - begin
    num_bytes = sum(path.stat().st_size for path in directory.glob("*/*"))
    begin = time.perf_counter()
    with serving(model, *flags) as url:
        start_s = time.perf_counter() - begin
        disk = ask(url, prompt)
    return {
        "start_s": start_s,
        "cold": asdict(cold),
        "memory": asdict(memory),
        "disk": asdict(disk),
        "stop_s": stop_s,
        "num_bytes": num_bytes,
        "is_equal": (cold.logprobs, cold.tokens) == (disk.logprobs, disk.tokens),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True, help="checkpoint directory")
    parser.add_argument("--num-tokens", type=int, default=8000, help="of the prompt")
    parser.add_argument("--directory", type=Path, help="where a new one for the prompts is made, and removed")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of every engine (default: cores)")
    parser.add_argument("--llama-server", help="llama.cpp's server, to be measured beside Chairlift's")
    parser.add_argument("--gguf", type=Path, help="the same weights for it (peers/write_gguf.py)")
    parser.add_argument("flags", nargs="*", help="further flags of Chairlift's server, behind --")
    arguments = parser.parse_args()
    if (arguments.llama_server is None) != (arguments.gguf is None):
        parser.error("--llama-server and --gguf go together")
    prompt = random.Random(0).choices(_TOKENS, k=arguments.num_tokens)
    engines = {}
    with tempfile.TemporaryDirectory(prefix="prompts-", dir=arguments.directory) as folder:
        flags = ["--num-threads", str(arguments.threads), *arguments.flags]
        engines["chairlift"] = measure_chairlift(arguments.model, Path(folder), prompt, flags)
    if arguments.llama_server is not None:
        with tempfile.TemporaryDirectory(prefix="slots-", dir=arguments.directory) as folder:
            size = arguments.num_tokens + _NUM_ANSWERED + 1
            peer = LlamaServer(arguments.llama_server, arguments.gguf, Path(folder), arguments.threads, size)
            engines["llama.cpp"] = measure_llama(peer, prompt, _NUM_ANSWERED)
    for each in engines.values():
        each["num_prompt_tokens"] = arguments.num_tokens
        each["restored_s"] = each.get("restore_s", 0.0) + each["disk"]["first_token_s"]
        each["times_as_soon"] = each["cold"]["first_token_s"] / each["restored_s"]
    print(format_table([_HEAD, *(_row(name, each) for name, each in engines.items())]))
    print(f"log-probabilities {'equal' if engines['chairlift']['is_equal'] else 'DIFFER'}")
    print_report(arguments, engines=engines)


_HEAD = ("", "cold, s", "in memory, s", "after a restart, s", "times as soon", "cached", "MB")


def _row(name: str, each: dict[str, Any]) -> list[str]:
    seconds = each["cold"]["first_token_s"], each["memory"]["first_token_s"], each["restored_s"]
    shown = [f"{value:.2f}" for value in seconds]
    return [
        name,
        *shown,
        f"{each['times_as_soon']:.1f}",
        str(each["disk"]["num_cached"]),
        f"{each['num_bytes'] / 1e6:.0f}",
    ]


if __name__ == "__main__":
    main()
