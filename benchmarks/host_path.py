"""Measures what the server makes of a device that only sleeps: how many tokens reach clients, and what a token costs
the host.

    python benchmarks/host_path.py --cases 64x6 256x8 1024x20
    python benchmarks/host_path.py --cases 256x8 --output-tokens 64 --prompt-tokens 512   # steps mixed with prompts
    python benchmarks/host_path.py --cases 256x8 --whole                                  # replies that do not stream

    python benchmarks/host_path.py --cases 256x8 --vllm vllm/bin/python --preload TCMALLOC:IOMP  # vLLM's server instead

A case is STREAMSxMILLISECONDS of a step. The server is a process of its own, with all but the model in it
(`fake_server`; for vLLM `peers/workers/vllm_sleeper`). The client is this one, bare sockets behind one epoll, of which
its own CPU time is shown. Requests are chats; each connection sends its next one as soon as a reply is over, and no two
have the same prompt. Measured from when every stream has had its first token:

tokens/s     that reached the client; ideal: STREAMS per step; computed: that were in steps, those of prompts included
idle         share of the time in which the device had nothing to do
gap          between two arrivals of tokens in one stream
ttft         from a request to its first token, of all requests
CPU          microseconds per token that reached the client: of the server's event loop, the engine's thread and all of
             the server's process; of its other processes (API workers with --flag=--api-workers=2; vLLM's engine has
             one of its own); of this client

The last line is JSON.
"""

import argparse
import itertools
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from fake_server import LETTER
from machine import parser_of, print_report
from peers.keeper import free_port, wait_until_healthy
from peers.sleeping_device import FILE_VARIABLE, STEP_VARIABLE, Work

from chairlift.models import open_checkpoint

_MARK = LETTER.encode()
_READ_BYTES = 2**16
_FIRST_TOKENS_LIMIT_S = 120.0
_OK = b"HTTP/1.1 200"
_POST = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_END = b"0\r\n\r\n"  # of a streamed reply
_HEAD = (
    f"{'':<24}{'tokens/s':>9}{'ideal':>9}{'computed':>10}{'idle':>8}{'gap p50':>9}{'p99':>7}{'ttft p50':>9}{'p99':>7}"
    f"{'loop us':>9}{'engine':>8}{'server':>8}{'workers':>8}{'client':>8}"
)
_HERE = Path(__file__).parent


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
    requests: Iterator[bytes]
    num_tokens_wanted: int
    is_whole: bool
    num_tokens: int = 0  # of the present reply
    sent: float = 0.0
    last: float = 0.0  # when tokens last came; 0: the reply has none yet

    def send(self) -> None:
        self.num_tokens, self.last, self.sent = 0, 0.0, time.perf_counter()
        self.socket.sendall(next(self.requests))

    def is_over(self, data: bytes) -> bool:
        return self.num_tokens == self.num_tokens_wanted and (self.is_whole or data.endswith(_END))


@dataclass(slots=True)
class _Arrivals:
    """Holds what came since measuring began."""

    num_tokens: int = 0
    num_reads: int = 0
    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # seconds to first tokens


class Client:
    """All streams, read by one thread."""

    def __init__(self, port: int, num_streams: int, arguments: argparse.Namespace) -> None:
        self._poll = select.epoll()
        self._streams: dict[int, _Stream] = {}
        self.arrivals, requests = _Arrivals(), make_requests(arguments)
        for _ in range(num_streams):
            connection = socket.create_connection(("127.0.0.1", port))
            stream = _Stream(connection, requests, arguments.output_tokens, arguments.whole)
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
        """Returns what comes in so much time."""
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


def make_requests(arguments: argparse.Namespace) -> Iterator[bytes]:
    """Chats without end, of equal length. Behind the template's beginning no two prompts agree in more than some
    digits, so that no server can take one for another's.
    """
    numbers = (f"{number:08}"[::-1].encode() for number in itertools.count())
    body = {
        "messages": [{"role": "user", "content": "########".ljust(arguments.prompt_tokens, "a")}],
        "max_tokens": arguments.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": not arguments.whole,
    }
    before, after = json.dumps(body).encode().split(b"########")
    head = f"{_POST}Content-Length: {len(before) + 8 + len(after)}\r\n\r\n".encode()
    return (b"".join((head, before, number, after)) for number in numbers)


@contextmanager
def serving(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """A server and its port, once it is healthy. The command ends with `--port`."""
    port = free_port()
    with subprocess.Popen([*command, str(port)], env=environment, stdout=2) as process:
        try:
            wait_until_healthy(process, port)
            yield process, port
        finally:
            with suppress(psutil.NoSuchProcess):
                for each in psutil.Process(process.pid).children(recursive=True):
                    each.kill()
            process.kill()


def _command(case: Case, arguments: argparse.Namespace) -> list[str]:
    if arguments.vllm is None:
        flags = ["--max-batch-size", str(case.num_streams), "--max-steps-per-launch", str(arguments.steps)]
        flags += ["--num-threads", "1", "--log-interval", "0", "--dtype", "float32"]
        start = [sys.executable, str(_HERE / "fake_server.py"), *flags]
    else:
        flags = ["--max-num-seqs", str(case.num_streams), "--model", str(open_checkpoint("bundled").path)]
        flags += ["--enforce-eager", "--disable-uvicorn-access-log", "--disable-log-stats", "--dtype", "bfloat16"]
        flags += ["--distributed-executor-backend", "peers.workers.vllm_sleeper.SleepingExecutor"]
        start = [arguments.vllm, "-m", "vllm.entrypoints.openai.api_server", *flags]
    return [*start, "--max-num-batched-tokens", "8192", *arguments.flag, "--port"]


def _environment(case: Case, arguments: argparse.Namespace, file: str) -> dict[str, str]:
    environment = {**os.environ, FILE_VARIABLE: file, STEP_VARIABLE: str(case.step_ms / 1e3)}
    if arguments.vllm is not None:
        environment |= {"PYTHONPATH": str(_HERE), "LD_PRELOAD": arguments.preload, "HF_HUB_OFFLINE": "1"}
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    return environment


@dataclass(frozen=True, slots=True)
class Counters:
    """Seconds since the server began: those of which the device was busy, and CPU time. `computed`: tokens."""

    time: float
    busy: float
    computed: float
    loop: float
    engine: float
    server: float
    workers: float

    @classmethod
    def read(cls, process: psutil.Process, file: Path) -> "Counters":
        work, now = Work.read(file), time.perf_counter()
        server, *others = [sum(each.cpu_times()[:2]) for each in (process, *process.children(recursive=True))]
        threads = (_thread_cpu(process.pid, process.pid), _thread_cpu(work.pid, work.thread))
        return cls(now, work.done_by(now), work.num_tokens, *threads, server, sum(others))

    def since(self, earlier: "Counters") -> "Counters":
        return Counters(*(after - before for after, before in zip(astuple(self), astuple(earlier), strict=True)))


def _thread_cpu(pid: int, thread: int) -> float:
    return int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def measure(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of one case."""
    with tempfile.NamedTemporaryFile() as told:
        file = Path(told.name)
        with serving(_command(case, arguments), _environment(case, arguments, told.name)) as (process, port):
            client, server = Client(port, case.num_streams, arguments), psutil.Process(process.pid)
            client.begin()
            first = list(client.arrivals.first)
            cpu, before = time.thread_time(), Counters.read(server, file)
            arrivals = client.run(arguments.seconds)
            spent, client_cpu = Counters.read(server, file).since(before), time.thread_time() - cpu
            client.close()

    def per_token(cpu_s: float) -> float:
        return round(1e6 * cpu_s / max(arrivals.num_tokens, 1), 1)

    return {
        "streams": case.num_streams,
        "step_ms": case.step_ms,
        "tokens_per_s": round(arrivals.num_tokens / spent.time),
        "ideal": round(1e3 * case.num_streams / case.step_ms),
        "computed_per_s": round(spent.computed / spent.time),
        "idle": round(1.0 - spent.busy / spent.time, 3),
        "gap_ms": _percentiles(arrivals.gaps),
        "ttft_ms": _percentiles(first + arrivals.first),
        "tokens_per_read": round(arrivals.num_tokens / max(arrivals.num_reads, 1), 2),
        "cpu_us": {
            **{name: per_token(getattr(spent, name)) for name in ("loop", "engine", "server", "workers")},
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
        f"{figures['tokens_per_s']:>9,}{figures['ideal']:>9,}{figures['computed_per_s']:>10,}{figures['idle']:>8.0%}{times}"
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
    print_report(arguments, cases=report)
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    default = [Case(64, 6.0), Case(256, 8.0), Case(1024, 20.0)]
    parser.add_argument("--cases", type=Case.parse, nargs="+", default=default, metavar="STREAMSxMS")
    parser.add_argument("--seconds", type=float, default=5.0, help="measured for each case")
    parser.add_argument("--prompt-tokens", type=int, default=16, help="of a message, beside the template's")
    parser.add_argument("--output-tokens", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=1, help="in a launch, at most")
    parser.add_argument("--whole", action="store_true", help="replies that do not stream")
    parser.add_argument("--flag", action="append", default=[], help="one more flag of the server: --flag=--x=y")
    parser.add_argument(
        "--vllm", metavar="PYTHON", help="an interpreter that has vLLM, whose server is measured instead"
    )
    parser.add_argument("--preload", default="", help="libraries for vLLM's processes, with ':' between them")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
