"""Measure what saving prompts costs those who are served meanwhile: two servers take turns, one of which saves.

python benchmarks/saving_cost.py --model DIR --rounds 28

Each round sends the same short load to both, in turns, with new prompts; the server whose turn it is not
is stopped. Many short rounds, because the speed of most machines changes from second to second. Prints the medians over
the rounds of tokens a second and of the processor's time in user mode for each token, and the median and the quartiles
of what saving has changed in a round. The last line is JSON.
"""

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

import psutil
from machine import format_table, parser_of, print_report, usable_cores

from chairlift.loadtest import BenchConfig
from chairlift.loadtest.runner import make_test

_REST_S = 0.1  # after a load, in which the server saves what it had no time for


@dataclass(frozen=True, slots=True)
class Turn:
    """A server's figures in one round."""

    tokens_per_s: float  # of output
    user_ms: float  # of the server's process, for each token


class TurnServer:
    """A server that runs in its turns only."""

    def __init__(self, process: "subprocess.Popen[str]", url: str) -> None:
        self._process, self._url = process, url

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Lets it go on for that long."""
        os.kill(self._process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.kill(self._process.pid, signal.SIGSTOP)

    def measure(self, load: dict[str, Any], seed: int) -> Turn:
        """Sends it a load. Its turn must be now."""
        counted = psutil.Process(self._process.pid)
        begin = counted.cpu_times().user
        summary = asyncio.run(make_test(BenchConfig(url=self._url, seed=seed, warmup=0, **load))).summary
        time.sleep(_REST_S)
        user_s = counted.cpu_times().user - begin
        return Turn(summary.output_token_throughput, 1e3 * user_s / summary.output_tokens)


@contextmanager
def serving(model: str, flags: list[str]) -> Iterator[TurnServer]:
    """Starts a server and stops it until its turn."""
    command = [sys.executable, "-m", "chairlift", "serve", model, "--port", "0", *flags]
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None, "it is a pipe"
        for line in process.stderr:
            log.write(line)
            if found := re.search(r"serving on (https?://\S+)", line):
                break
        else:
            log.seek(0)
            raise SystemExit(f"the server did not start:\n{log.read()}")
        server = TurnServer(process, found[1])
        try:
            with server.turn():
                pass
            yield server
        finally:
            process.kill()  # what it might still save is of no use


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True, help="checkpoint directory")
    parser.add_argument("--rounds", type=int, default=28)
    parser.add_argument("--requests", type=int, default=2, help="of a server in a round")
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=72)
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of the engine (default: cores)")
    parser.add_argument("flags", nargs="*", help="further flags of both servers, behind --")
    arguments = parser.parse_args()
    rounds = _measure(arguments)
    fields = ("tokens_per_s", "user_ms")
    medians = {
        name: {field: median(getattr(each[name], field) for each in rounds) for field in fields}
        for name in ("off", "on")
    }
    change = {
        field: _change([getattr(each["on"], field) / getattr(each["off"], field) for each in rounds])
        for field in fields
    }
    rows = [[name, *(f"{value:.2f}" for value in each.values())] for name, each in medians.items()]
    rows.append(["change", *(f"{100 * each['median']:+.1f} %" for each in change.values())])
    print(format_table([["saving", *fields], *rows]))
    print_report(
        arguments,
        medians=medians,
        change=change,
        rounds=[{name: asdict(turn) for name, turn in each.items()} for each in rounds],
    )


def _change(ratios: list[float]) -> dict[str, float]:
    """The median change and its quartiles, as shares."""
    first, second, third = (each - 1 for each in quantiles(ratios, n=4))
    return {"median": second, "first_quartile": first, "third_quartile": third}


def _measure(arguments: argparse.Namespace) -> list[dict[str, Turn]]:
    load: dict[str, Any] = {
        "num_requests": arguments.requests,
        "concurrency": arguments.concurrency,
        "prompt_tokens": arguments.prompt_tokens,
        "output_tokens": arguments.output_tokens,
    }
    flags = ["--num-threads", str(arguments.threads), *arguments.flags]
    rounds: list[dict[str, Turn]] = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="prompts-"))
        servers = {
            "off": stack.enter_context(serving(arguments.model, flags)),
            "on": stack.enter_context(serving(arguments.model, [*flags, "--prefix-cache-dir", folder])),
        }
        for number in range(arguments.rounds):
            turns = dict[str, Turn]()
            for name in sorted(servers, reverse=bool(number % 2)):
                with servers[name].turn():
                    turns[name] = servers[name].measure(load, seed=number)
            rounds.append(turns)
    return rounds


if __name__ == "__main__":
    main()
