"""Measure what a directory of prompts is good for: a server is stopped and started again, and gets the same prompt.

python benchmarks/prompts_on_disk.py --model DIR --num-tokens 8000

Prints seconds to the first token: cold, from memory, and after a restart from disk; how many tokens were cached, and
whether all log-probabilities are equal. The last line is JSON.
"""

import json
import random
import re
import shutil
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

from machine import describe_machine, parser_of

_NUM_ANSWERED = 16
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


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True, help="checkpoint directory")
    parser.add_argument("--num-tokens", type=int, default=8000, help="of the prompt")
    parser.add_argument("--directory", type=Path, help="for the prompts; unset: a new one, which is removed")
    parser.add_argument("flags", nargs="*", help="further flags of the server, behind --")
    arguments = parser.parse_args()
    directory = arguments.directory or Path(tempfile.mkdtemp(prefix="prompts-"))
    flags = ("--prefix-cache-dir", str(directory), *arguments.flags)
    prompt = random.Random(0).choices(_TOKENS, k=arguments.num_tokens)
    try:
        with serving(arguments.model, *flags) as url:
            cold, memory = ask(url, prompt), ask(url, prompt)
        begin = time.perf_counter()
        with serving(arguments.model, *flags) as url:
            start_s = time.perf_counter() - begin
            disk = ask(url, prompt)
    finally:
        if arguments.directory is None:
            shutil.rmtree(directory)
    told = {
        "machine": describe_machine(),
        "model": arguments.model,
        "num_tokens": arguments.num_tokens,
        "start_s": start_s,
        "cold": asdict(cold),
        "memory": asdict(memory),
        "disk": asdict(disk),
        "is_equal": (cold.logprobs, cold.tokens) == (disk.logprobs, disk.tokens),
        "times_as_soon": cold.first_token_s / disk.first_token_s,
    }
    for name, reply in (("cold", cold), ("from memory", memory), ("from disk", disk)):
        print(f"{name}: first token after {reply.first_token_s:.2f} s, {reply.num_cached} tokens cached")
    print(f"log-probabilities {'equal' if told['is_equal'] else 'DIFFER'}")
    line = json.dumps(told)
    print(line)
    if arguments.json is not None:
        arguments.json.write_text(line + "\n")


if __name__ == "__main__":
    main()
