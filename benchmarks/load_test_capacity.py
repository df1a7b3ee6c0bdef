"""How many streamed tokens a second one process of the load test can take, with a server that costs nothing.

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
from multiprocessing.connection import Connection
from time import perf_counter
from typing import cast

import uvloop

from chairlift.loadtest import BenchConfig
from chairlift.loadtest.runner import make_test
from chairlift.loadtest.summary import Summary

_MODELS = b'{"object":"list","data":[{"id":"null","object":"model"}]}'
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\n%s\r\n\r\n"
_STREAM_HEAD = _HEAD % (b"text/event-stream; charset=utf-8", b"Transfer-Encoding: chunked")
_END = b"data: [DONE]\n\n"
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
    print(json.dumps({"streams": arguments.streams, "tokens": arguments.tokens, "rounds": figures}))
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


class NullStream(asyncio.Protocol):
    """Answers GET with the list of models and POST with a stream; knows just as much HTTP as the client sends."""

    def __init__(self, streams: "set[NullStream]") -> None:
        self._streams = streams
        self._received = b""
        self._num_left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002, the base class names it
        self._streams.discard(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._received.startswith(b"GET") and self._received.endswith(b"\r\n\r\n"):
            self._answer_get()
        elif b'"max_tokens"' in self._received and self._received.endswith(b"}"):
            self._open_stream()

    def write_token(self) -> None:
        """One token in a write of its own; after the last, usage and the end."""
        self._num_left -= 1
        if self._num_left:
            self._transport.write(_TOKEN)
            return
        usage = {"prompt_tokens": 16, "completion_tokens": self._num_tokens}
        end = _event(choices=[], usage=usage) + _END
        self._transport.write(_LAST_TOKEN + _chunk(end) + b"0\r\n\r\n")
        self._streams.discard(self)

    def _answer_get(self) -> None:
        length = b"Content-Length: %d" % len(_MODELS)
        self._transport.write(_HEAD % (b"application/json", length) + _MODELS)
        self._received = b""

    def _open_stream(self) -> None:
        body = json.loads(self._received.partition(b"\r\n\r\n")[2])
        self._received = b""
        self._num_tokens = self._num_left = body["max_tokens"]
        self._transport.write(_STREAM_HEAD)
        self._streams.add(self)


def _serve(ready: Connection, stream_rate: float) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_stream_for_ever(ready, stream_rate))


async def _stream_for_ever(ready: Connection, stream_rate: float) -> None:
    """Streams take turns within a period, so that tokens come evenly and not all at once."""
    streams: set[NullStream] = set()
    server = await asyncio.get_running_loop().create_server(lambda: NullStream(streams), "127.0.0.1", 0)
    ready.send(server.sockets[0].getsockname()[1])
    due_at = perf_counter()
    while True:
        turn = list(streams)
        due_at = max(due_at, perf_counter() - 1.0) if turn else perf_counter()
        for part in range(_NUM_TURNS):
            due_at += 1 / (stream_rate * _NUM_TURNS)
            await asyncio.sleep(max(0.0, due_at - perf_counter()))
            for stream in turn[part::_NUM_TURNS]:
                stream.write_token()


def _event(**chunk: object) -> bytes:
    head = {"id": "cmpl-0123456789abcdef0123456789abcdef", "object": "text_completion", "created": 1700000000}
    return b"data: " + json.dumps(head | {"model": "null"} | chunk).encode() + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _token(finish_reason: str | None) -> bytes:
    return _chunk(_event(choices=[{"index": 0, "text": " word", "logprobs": None, "finish_reason": finish_reason}]))


_TOKEN, _LAST_TOKEN = _token(None), _token("length")


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[10_000, 20_000, 30_000, 40_000])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=500, help="of every stream")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
