"""What the server makes of a device that only sleeps: how many tokens reach clients, and what a token costs the host.

    python benchmarks/host_path.py --cases 64x6 256x8 1024x20
    python benchmarks/host_path.py --cases 256x8 --output-tokens 64 --prompt-tokens 512   # steps mixed with prompts
    python benchmarks/host_path.py --cases 256x8 --whole                                  # replies that do not stream

A case is STREAMSxMILLISECONDS of a step. The server is a process of its own (`fake_server`), with all but the model in
it; the client is this one, bare sockets behind one epoll, of which its own CPU time is shown. Requests are chats; each
connection sends its next one as soon as a reply is over. Measured from when every stream has had its first token:

tokens/s     that reached the client; ideal: STREAMS per step
idle         share of the time in which the device had nothing to do
gap          between two arrivals of tokens in one stream
ttft         from a request to its first token, of all requests
CPU          microseconds per token that reached the client: of the event loop in the engine's process, its engine's
             thread and all of that process; of all API workers, if there are (--flag=--api-workers=2); of this client

The last line is JSON.
"""

import argparse
import json
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from fake_server import LETTER, Counters
from machine import describe_commit, describe_machine, print_report

_MARK = LETTER.encode()
_READ_BYTES = 2**16
_START_LIMIT_S, _FIRST_TOKENS_LIMIT_S = 180.0, 120.0
_OK = b"HTTP/1.1 200"
_POST = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_END = b"0\r\n\r\n"  # of a streamed reply
_HEAD = (
    f"{'':<24}{'tokens/s':>9}{'ideal':>9}{'idle':>8}{'gap p50':>9}{'p99':>7}{'ttft p50':>9}{'p99':>7}"
    f"{'loop us':>9}{'engine':>8}{'server':>8}{'workers':>8}{'client':>8}"
)
_SERVER = Path(__file__).with_name("fake_server.py")


@dataclass(frozen=True, slots=True)
class Case:
    """So many streams, on a device whose steps take that long."""

    num_streams: int
    step_ms: float

    @classmethod
    def parse(cls, text: str) -> "Case":
        num_streams, _, step_ms = text.partition("x")
        return cls(int(num_streams), float(step_ms))

    def __str__(self) -> str:
        return f"{self.num_streams} streams, {self.step_ms:g} ms"


@dataclass(slots=True)
class _Stream:
    """One connection."""

    socket: socket.socket
    request: bytes
    num_tokens_wanted: int
    is_whole: bool
    num_tokens: int = 0  # of the present reply
    sent: float = 0.0
    last: float = 0.0  # when tokens last came; 0: the reply has none yet

    def send(self) -> None:
        self.num_tokens, self.last, self.sent = 0, 0.0, time.perf_counter()
        self.socket.sendall(self.request)

    def is_over(self, data: bytes) -> bool:
        return self.num_tokens == self.num_tokens_wanted and (self.is_whole or data.endswith(_END))


@dataclass(slots=True)
class _Arrivals:
    """What came since measuring began."""

    num_tokens: int = 0
    num_reads: int = 0
    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # seconds to first tokens


class Client:
    """All streams, read by one thread."""

    def __init__(self, port: int, num_streams: int, arguments: argparse.Namespace) -> None:
        self._poll = select.epoll()
        self._streams: dict[int, _Stream] = {}
        self.arrivals = _Arrivals()
        for number in range(num_streams):
            connection = socket.create_connection(("127.0.0.1", port))
            stream = _Stream(connection, _request(number, arguments), arguments.output_tokens, arguments.whole)
            self._streams[connection.fileno()] = stream
            self._poll.register(connection, select.EPOLLIN)

    def begin(self) -> None:
        """Sends all requests, and reads until each stream has had a token."""
        for stream in self._streams.values():
            stream.send()
        waiting, deadline = len(self._streams), time.perf_counter() + _FIRST_TOKENS_LIMIT_S
        while len(self.arrivals.first) < waiting:
            self._read(1.0)
            if time.perf_counter() > deadline:
                raise TimeoutError(f"{waiting - len(self.arrivals.first)} streams had no token in time")

    def run(self, seconds: float) -> _Arrivals:
        """What comes in so much time."""
        self.arrivals = arrivals = _Arrivals()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self._read(0.1)
        return arrivals

    def close(self) -> None:
        self._poll.close()
        for stream in self._streams.values():
            stream.socket.close()

    def _read(self, timeout: float) -> None:
        arrivals, streams = self.arrivals, self._streams
        for descriptor, _ in self._poll.poll(timeout):
            stream = streams[descriptor]
            data = stream.socket.recv(_READ_BYTES)
            if not data or (data.startswith(b"HTTP/") and not data.startswith(_OK)):
                raise ConnectionError(f"the server closed a connection, or refused a request: {data.decode()}")
            arrivals.num_reads += 1
            num_new = data.count(_MARK)
            if num_new:
                now = time.perf_counter()
                (arrivals.gaps if stream.last else arrivals.first).append(now - (stream.last or stream.sent))
                stream.last = now
                stream.num_tokens += num_new
                arrivals.num_tokens += num_new
            if stream.is_over(data):
                stream.send()


def _request(number: int, arguments: argparse.Namespace) -> bytes:
    """A chat whose prompt has no beginning in common with others, but for the template's."""
    body = {
        "messages": [{"role": "user", "content": f"{number:06}".ljust(arguments.prompt_tokens, "a")}],
        "max_tokens": arguments.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": not arguments.whole,
    }
    data = json.dumps(body).encode()
    head = f"{_POST}Content-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


class Server:
    """The fake server's process."""

    def __init__(self, process: "subprocess.Popen[str]", port: int) -> None:
        self._process = process
        self.port = port

    def read(self) -> Counters:
        assert self._process.stdin is not None, "a pipe"
        assert self._process.stdout is not None, "a pipe"
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Counters(**json.loads(self._process.stdout.readline()))


@contextmanager
def _serving(case: Case, arguments: argparse.Namespace) -> Iterator[Server]:
    flags = ["--port", "0", "--num-threads", "1", "--max-batch-size", str(case.num_streams), "--log-interval", "0"]
    flags += ["--max-steps-per-launch", str(arguments.steps), "--max-num-batched-tokens", "8192", "--dtype", "float32"]
    command = [sys.executable, str(_SERVER), str(case.step_ms), *flags, *arguments.flag]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            yield Server(process, _port_of(process, Path(f"/dev/fd/{log.fileno()}")))
        finally:
            process.kill()


def _port_of(process: "subprocess.Popen[str]", log: Path) -> int:
    """From the line that says where it listens."""
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        _, found, behind = log.read_text().partition("serving on http://127.0.0.1:")
        if found and "\n" in behind:
            return int(behind.split()[0])
        time.sleep(0.05)
    raise RuntimeError(f"the server did not start: {log.read_text()}")


def measure(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of one case."""
    with _serving(case, arguments) as server:
        client = Client(server.port, case.num_streams, arguments)
        client.begin()
        first = list(client.arrivals.first)
        cpu, before = time.thread_time(), server.read()
        arrivals = client.run(arguments.seconds)
        after, client_cpu = server.read(), time.thread_time() - cpu
        client.close()
    seconds = after.time - before.time
    tokens_per_s = arrivals.num_tokens / seconds

    def per_token(cpu_s: float) -> float:
        return round(1e6 * cpu_s / max(arrivals.num_tokens, 1), 1)

    return {
        "streams": case.num_streams,
        "step_ms": case.step_ms,
        "tokens_per_s": round(tokens_per_s),
        "ideal": round(1e3 * case.num_streams / case.step_ms),
        "idle": round(1.0 - (after.busy - before.busy) / seconds, 3),
        "gap_ms": _percentiles(arrivals.gaps),
        "ttft_ms": _percentiles(first + arrivals.first),
        "tokens_per_read": round(arrivals.num_tokens / max(arrivals.num_reads, 1), 2),
        "cpu_us": {
            "loop": per_token(after.loop_cpu - before.loop_cpu),
            "engine": per_token(after.engine_cpu - before.engine_cpu),
            "server": per_token(after.process_cpu - before.process_cpu),
            "workers": per_token(after.workers_cpu - before.workers_cpu),
            "client": per_token(client_cpu),
        },
    }


def _percentiles(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    return {name: round(1e3 * float(np.percentile(seconds, q)), 1) for name, q in (("p50", 50), ("p99", 99))}


def _line(figures: dict[str, Any]) -> str:
    cpu = figures["cpu_us"]
    times = "".join(_pair(figures[name]) for name in ("gap_ms", "ttft_ms"))
    return (
        f"{figures['tokens_per_s']:>9,}{figures['ideal']:>9,}{figures['idle']:>8.0%}{times}"
        f"{cpu['loop']:>9.1f}{cpu['engine']:>8.1f}{cpu['server']:>8.1f}{cpu['workers']:>8.1f}{cpu['client']:>8.1f}"
    )


def _pair(percentiles: dict[str, float] | None) -> str:
    return f"{'-':>9}{'-':>7}" if percentiles is None else f"{percentiles['p50']:>9,.0f}{percentiles['p99']:>7,.0f}"


def main() -> int:
    """Measures every case, prints a line for each, and as the last line everything as JSON."""
    arguments = _parse_arguments()
    print(_HEAD)
    report = []
    for case in arguments.cases:
        report.append(measure(case, arguments))
        print(f"{case!s:<24}{_line(report[-1])}", flush=True)
    settings = {name: value for name, value in vars(arguments).items() if name not in ("cases", "json")}
    commit = describe_commit(Path(__file__).parents[1])
    print_report(
        {"settings": settings, "machine": describe_machine(), "commit": commit, "cases": report}, arguments.json
    )
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [Case(64, 6.0), Case(256, 8.0), Case(1024, 20.0)]
    parser.add_argument("--cases", type=Case.parse, nargs="+", default=default, metavar="STREAMSxMS")
    parser.add_argument("--seconds", type=float, default=5.0, help="measured for each case")
    parser.add_argument("--prompt-tokens", type=int, default=16, help="of a message, beside the template's")
    parser.add_argument("--output-tokens", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=1, help="in a launch, at most")
    parser.add_argument("--whole", action="store_true", help="replies that do not stream")
    parser.add_argument("--flag", action="append", default=[], help="one more flag of the server: --flag=--x=y")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
