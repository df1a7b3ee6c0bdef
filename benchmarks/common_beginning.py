"""Time to first token of prompts that begin alike, one after the other, from servers that are running already.

    python benchmarks/common_beginning.py chairlift=http://127.0.0.1:8000 llama.cpp=http://127.0.0.1:8080,PID

Each server gets the same prompts, as token ids, through /v1/completions, and is asked for one token, so that the time
of a reply is that to the first token. A round has a new beginning of each length, and a few prompts that go on from it
in different ways. Who reuses the beginning answers the later ones sooner: models with recurrent states need a state at
its very end for that. Servers take turns within a round. Those whose processes are named are stopped, with their
children, while another has its turn: some spin while they wait for requests. The last line is JSON.
"""

import argparse
import json
import random
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
from machine import parser_of, print_report
from peers.engines import exit_on_signals

_LIMIT_S = 600.0
_SETTLED = 2  # from the third prompt on


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is measured, the name of its model, and the process that is stopped while others are measured."""

    name: str
    url: str
    model: str
    process: psutil.Process | None

    @classmethod
    def find(cls, text: str) -> "Server":
        """From `NAME=URL` or `NAME=URL,PID`. ValueError if it is not written so; OSError if nobody answers."""
        name, is_pair, place = text.partition("=")
        url, _, process = place.partition(",")
        if not is_pair or (process and not process.isdecimal()):
            raise ValueError(f"{text!r} is no server: write NAME=URL or NAME=URL,PID")
        with urllib.request.urlopen(f"{url}/v1/models", timeout=_LIMIT_S) as response:
            model = json.load(response)["data"][0]["id"]
        return cls(name, url, model, psutil.Process(int(process)) if process else None)

    def ask(self, prompt: list[int]) -> "Reply":
        """Waits for the first token after a prompt."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0}
        content = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), content)
        start = time.perf_counter()
        with urllib.request.urlopen(request, timeout=_LIMIT_S) as response:
            answer = json.load(response)
        seconds = time.perf_counter() - start
        usage = answer["usage"]
        if usage["prompt_tokens"] != len(prompt):
            raise RuntimeError(f"{self.name} took {usage['prompt_tokens']} prompt tokens for {len(prompt)}")
        return Reply(seconds, (usage.get("prompt_tokens_details") or {}).get("cached_tokens"))

    def processes(self) -> list[psutil.Process]:
        """The named process and its children, or none."""
        return [self.process, *self.process.children(recursive=True)] if self.process else []


@contextmanager
def stopped(servers: Sequence[Server]) -> Iterator[None]:
    """Stops their processes meanwhile, as far as they are named."""
    with ExitStack() as resuming:  # which goes through all of them, whatever becomes of one
        for process in (each for server in servers for each in server.processes()):
            resuming.callback(process.resume)
            process.suspend()
        yield


@dataclass(frozen=True, slots=True)
class Reply:
    """The time of a reply, and how much of the prompt was reused; None: the server does not say."""

    seconds: float
    num_cached: int | None


@dataclass(slots=True)
class Series:
    """The replies of one server to prompts with beginnings of one length, by place in a round."""

    replies: list[list[Reply]] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Medians in seconds: of the first prompts, of the second ones, and of all that come later."""
        settled = [reply for each in self.replies[_SETTLED:] for reply in each]
        cached = [reply.num_cached for reply in settled if reply.num_cached is not None]
        return {
            "first_s": _median(self.replies[0]),
            "second_s": _median(self.replies[1]),
            "later_s": _median(settled),
            "later_cached_tokens": statistics.median(cached) if cached else None,
        }


def main() -> int:
    """Measures, prints a table, and as the last line everything as JSON; returns the exit code."""
    arguments = _parse_arguments()
    try:
        servers = [Server.find(each) for each in arguments.servers]
        results = measure(servers, arguments)
    except (OSError, ValueError, RuntimeError, psutil.Error) as error:
        print(f"common_beginning.py: {error}", file=sys.stderr)
        return 2
    for length, by_server in results.items():
        for name, figures in by_server.items():
            times = "  ".join(f"{figures[each] * 1000:8.1f} ms" for each in ("first_s", "second_s", "later_s"))
            print(f"{length:>6} tokens  {name:<14}{times}  {figures['later_cached_tokens']} cached")
    print_report(arguments, results=results)
    return 0


def measure(servers: list[Server], arguments: argparse.Namespace) -> dict[int, dict[str, dict[str, Any]]]:
    """Summaries by length and server. OSError or RuntimeError for a reply that is none."""
    draw = random.Random(arguments.seed)
    results = {}
    for length in arguments.lengths:
        series = {server.name: Series([[] for _ in range(arguments.prompts)]) for server in servers}
        for number in range(arguments.rounds):
            beginning = _tokens(draw, length, arguments.vocabulary)
            prompts = [
                beginning + _tokens(draw, arguments.rest, arguments.vocabulary) for _ in range(arguments.prompts)
            ]
            first = number % len(servers)
            for server in [*servers[first:], *servers[:first]]:
                with stopped([other for other in servers if other is not server]):
                    for place, prompt in enumerate(prompts):
                        series[server.name].replies[place].append(server.ask(prompt))
        results[length] = {name: each.summary() for name, each in series.items()}
    return results


def _tokens(draw: random.Random, count: int, vocabulary: int) -> list[int]:
    return [draw.randrange(vocabulary) for _ in range(count)]


def _median(replies: list[Reply]) -> float:
    return statistics.median(reply.seconds for reply in replies)


def _parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL[,PID]")
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 500, 2000], help="tokens of the beginnings")
    parser.add_argument("--rest", type=int, default=50, help="tokens of each prompt after its beginning")
    parser.add_argument("--prompts", type=int, default=6, help="with the same beginning, at least three")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=256, help="tokens are drawn from the first so many")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
