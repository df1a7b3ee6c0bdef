"""Measures what HTTP costs: the same requests to a server, which streams, and to `LLM.generate` in this process, in
turns.

    python benchmarks/http_cost.py --model DIRECTORY --requests 1 32

Prompts are random tokens, so that nothing of them is reused. A server of the same settings is a process of its own, and
the client that reads its streams is this one: a bare socket for each. Each round gives the ratio of the times from the
first byte sent to the last one received. A client that is woken for every token takes a part of that from cores which
compute. So each round also asks for streams that it reads when they are over, and takes the server's word for how long
they took (its metrics). The median of the rounds is printed, and the ratio of the fastest of each, since other load on
a machine only adds time. The last line is JSON.
"""

import argparse
import json
import random
import selectors
import socket
import statistics
import sys
import time
from typing import Any, NamedTuple
from urllib.request import urlopen

from host_path import serving
from machine import parser_of, print_report

from chairlift import LLM, SamplingParams

Prompts = list[list[int]]

_END = b"0\r\n\r\n"  # of a streamed reply
_OK = b"HTTP/1.1 200"
_DURATION = "chairlift_request_duration_seconds"  # a metric
_MORE_S = 0.5  # than twice what streams take that are read
_COSTS = {"cost": "served_s", "unread_cost": "unread_s"}


def _request(prompt: list[int], num_tokens: int) -> bytes:
    body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    data = json.dumps(body)
    return (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n{data}"
    ).encode()


def time_served(port: int, prompts: Prompts, num_tokens: int) -> float:
    """Seconds until the last stream is over."""
    poll = selectors.DefaultSelector()
    streams = {socket.create_connection(("127.0.0.1", port)): bytearray() for _ in prompts}
    begin = time.perf_counter()
    for connection, prompt in zip(streams, prompts, strict=True):
        connection.sendall(_request(prompt, num_tokens))
        poll.register(connection, selectors.EVENT_READ, connection)
    while poll.get_map():
        for connection in [key.data for key, _ in poll.select()]:
            new, told = connection.recv(2**16), streams[connection]
            told.extend(new)
            if not new or not told.startswith(_OK[: len(told)]):
                raise ConnectionError(f"the server refused a request: {told.decode()}")
            if told.endswith(_END):
                poll.unregister(connection)
    seconds = time.perf_counter() - begin
    for connection in streams:
        connection.close()
    return seconds


def time_unread(port: int, prompts: Prompts, num_tokens: int, seconds: float) -> float:
    """Seconds that a stream takes on average, by the server's metrics, if its client sleeps meanwhile.

    `seconds`: that it sleeps. RuntimeError if some stream is not over then: what it was sent exceeds a socket's buffer.
    """
    before = _requests_so_far(port)
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in prompts]
    for connection, prompt in zip(connections, prompts, strict=True):
        connection.sendall(_request(prompt, num_tokens))
    time.sleep(seconds)
    after = _requests_so_far(port)
    for connection in connections:
        connection.close()
    if after.number - before.number != len(prompts):
        raise RuntimeError(f"{after.number - before.number} of {len(prompts)} streams are over after {seconds:.1f} s")
    return (after.seconds - before.seconds) / len(prompts)


class _Requests(NamedTuple):
    """The requests that a server has answered."""

    number: int
    seconds: float  # that they took together


def _requests_so_far(port: int) -> _Requests:
    with urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
        lines = [line.rpartition(" ") for line in reply.read().decode().splitlines()]
    count, seconds = (
        sum(float(value) for name, _, value in lines if name.partition("{")[0] == _DURATION + suffix)
        for suffix in ("_count", "_sum")
    )
    return _Requests(int(count), seconds)


def time_offline(llm: LLM, prompts: Prompts, num_tokens: int) -> float:
    """Seconds of the call."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - begin


def measure(llm: LLM, port: int, num_requests: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of so many requests at once."""
    numbers, num_tokens = random.Random(num_requests), arguments.output_tokens

    def prompts() -> Prompts:
        return [[numbers.randrange(10, 200) for _ in range(arguments.prompt_tokens)] for _ in range(num_requests)]

    def time_each() -> dict[str, float]:
        served = time_served(port, prompts(), num_tokens)
        unread = time_unread(port, prompts(), num_tokens, 2 * served + _MORE_S)
        return {"served_s": served, "unread_s": unread, "offline_s": time_offline(llm, prompts(), num_tokens)}

    rounds = [time_each() for _ in range(arguments.rounds + 1)][1:]  # the first warms up
    return {
        "requests": num_requests,
        **{name: round(_median_cost(rounds, kind), 4) for name, kind in _COSTS.items()},
        **{f"{name}_of_fastest": round(_fastest_cost(rounds, kind), 4) for name, kind in _COSTS.items()},
        "rounds": rounds,
    }


def _median_cost(rounds: list[dict[str, float]], kind: str) -> float:
    return statistics.median(each[kind] / each["offline_s"] for each in rounds) - 1


def _fastest_cost(rounds: list[dict[str, float]], kind: str) -> float:
    kinds = kind, "offline_s"
    streamed, offline = (min(each[one] for each in rounds) for one in kinds)
    return streamed / offline - 1


def main() -> int:
    """Measures every number of requests, prints a line for each, and as the last line everything as JSON."""
    arguments = _parse_arguments()
    cases = []
    flags = ["--model", arguments.model, "--max-batch-size", str(max(arguments.requests)), "--log-interval", "0"]
    command = [sys.executable, "-m", "chairlift", "serve", *flags, *arguments.flag, "--port"]
    with serving(command) as (_, port), LLM(arguments.model, max_batch_size=max(arguments.requests)) as llm:
        for num_requests in arguments.requests:
            case = measure(llm, port, num_requests, arguments)
            cases.append(case)
            figures = f"{case['cost']:+.1%}, the fastest {case['cost_of_fastest']:+.1%}"
            alone = f"{case['unread_cost']:+.1%}, the fastest {case['unread_cost_of_fastest']:+.1%}"
            print(f"{num_requests} requests: streams over HTTP take {figures} beside a call", end="; ")
            print(f"whose client sleeps {alone}", flush=True)
    print_report(arguments, cases=cases)
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32], help="at once")
    parser.add_argument("--rounds", type=int, default=5, help="besides one to warm up")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--flag", action="append", default=[], help="one more flag of the server: --flag=--x=y")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
