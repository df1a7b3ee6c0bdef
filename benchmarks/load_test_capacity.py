"""Measures how many streamed tokens a second one process of the load test can take, with a server that costs nothing.

    python benchmarks/load_test_capacity.py --rates 10000 20000 40000

A null server in a child process streams chunks of the real shape, each token in a write of its own, at a fixed pace
for every stream; the load test of `chairlift bench` reads them. For each pace the table shows what arrived, how long
the client's own event loop was late, and how busy its process was: the table of docs/load-test.md. The last line is
JSON.
"""

import argparse
import asyncio
import json
import multiprocessing
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from time import perf_counter

import uvloop
from machine import parser_of, print_report

from chairlift.loadtest import BenchConfig
from chairlift.loadtest.runner import make_test
from chairlift.loadtest.summary import Summary

_MODELS = b'{"object":"list","data":[{"id":"null","object":"model"}]}'
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\n%s\r\n\r\n"
_MODELS_REPLY = _HEAD % (b"application/json", b"Content-Length: %d" % len(_MODELS)) + _MODELS
_STREAM_HEAD = _HEAD % (b"text/event-stream; charset=utf-8", b"Transfer-Encoding: chunked")
_NUM_TURNS = 8


def main() -> int:
    """Measures at every pace, prints a table, and as the last line all figures as JSON."""
    arguments = _parse_arguments()
    print(f"{'asked for':>12}{'arrived':>12}{'own lag p99':>14}{'busy':>8}   {arguments.streams} streams, tokens/s")
    figures = []
    for rate in arguments.rates:
        summary = measure(arguments.streams, rate / arguments.streams, arguments.tokens)
        figures.append(_figures(rate, summary))
        line = figures[-1]
        print(
            f"{line['asked']:>12,.0f}{line['arrived']:>12,.0f}{line['lag_p99_ms']:>11.1f} ms{line['busy']:>8.0%}"
            f"   {'fell behind' if summary.has_lagging_client else ''}"
        )
    print_report(arguments, rounds=figures)
    return 0


def measure(num_streams: int, stream_rate: float, num_tokens: int) -> Summary:
    """Reads `num_streams` streams at once, each of `num_tokens` tokens at `stream_rate` tokens per second."""
    near, far = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=[far, stream_rate], daemon=True)
    server.start()
    try:
        config = BenchConfig(
            url=f"http://127.0.0.1:{near.recv()}",
            num_requests=num_streams,
            concurrency=num_streams,
            prompt_tokens=16,
            output_tokens=num_tokens,
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(make_test(config)).summary
    finally:
        server.terminate()
        server.join()


class Streams:
    """Answers GET with the list of models and POST with a stream; knows just as much HTTP as the client sends."""

    def __init__(self) -> None:
        self.num_left: dict[asyncio.StreamWriter, int] = {}  # tokens of each

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until its client leaves."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    writer.write(_MODELS_REPLY)
                    continue
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                writer.write(_STREAM_HEAD)
                self.num_left[writer] = body["max_tokens"]

    def write_token(self, writer: asyncio.StreamWriter) -> None:
        """One token in a write of its own; with the last one the end. The client counts them."""
        self.num_left[writer] -= 1
        if self.num_left[writer] > 0:
            writer.write(_TOKEN)
        else:
            del self.num_left[writer]
            writer.write(_END)


def _serve(ready: Connection, stream_rate: float) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_stream_for_ever(ready, stream_rate))


async def _stream_for_ever(ready: Connection, stream_rate: float) -> None:
    """Streams take turns within a period, so that tokens come evenly and not all at once."""
    streams = Streams()
    server = await asyncio.start_server(streams.answer, "127.0.0.1", 0)
    ready.send(server.sockets[0].getsockname()[1])
    due_at = perf_counter()
    while True:
        turn = list(streams.num_left)
        due_at = max(due_at, perf_counter() - 1.0) if turn else perf_counter()
        for part in range(_NUM_TURNS):
            due_at += 1 / (stream_rate * _NUM_TURNS)
            await asyncio.sleep(max(0.0, due_at - perf_counter()))
            for writer in turn[part::_NUM_TURNS]:
                streams.write_token(writer)


def _chunk(**fields: object) -> bytes:
    head = {"id": "cmpl-0123456789abcdef0123456789abcdef", "object": "text_completion", "created": 1700000000}
    data = b"data: " + json.dumps(head | {"model": "null"} | fields).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


_CHOICE = {"index": 0, "text": " word", "logprobs": None, "finish_reason": None}
_TOKEN = _chunk(choices=[_CHOICE])
_END = _chunk(choices=[_CHOICE | {"finish_reason": "length"}]) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def _figures(rate: float, summary: Summary) -> dict[str, float]:
    lag = summary.client_lag_ms
    assert summary.num_succeeded == summary.num_requests, summary.failures
    return {
        "asked": rate,
        "arrived": round(summary.output_token_throughput),
        "lag_p99_ms": 0.0 if lag is None else round(lag.p99, 2),
        "busy": round(summary.client_busy_share, 3),
    }


def _parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[10_000, 20_000, 30_000, 40_000])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=500, help="of every stream")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
