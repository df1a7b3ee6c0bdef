"""What n-gram speculation gains llama.cpp: the requests of benchmarks/speculation.py, with and without, in turns.

    python benchmarks/speculation_peers.py llama.cpp/bin/llama-server SmolLM2-135M-Instruct.Q4_1.gguf --rows 1 8

Two servers of the same model run, one of which guesses (`--spec-type`, without a draft model); the other is stopped
meanwhile. Figures are medians of the ratios of pairs. The last line is JSON.
"""

import argparse
import http.client
import itertools
import json
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from machine import parser_of, print_report, usable_cores
from peers.engines import exit_on_signals
from peers.keeper import free_port, wait_until_healthy
from speculation import PROMPTS

_KINDS = ("copy", "json", "code", "free")
_SLOT_TOKENS = 1024
_TIMEOUT_S = 120.0  # a server that crashes with other requests under way may leave connections open


class Server:
    """llama-server with a slot for each row. It runs within `turn` only."""

    def __init__(self, arguments: argparse.Namespace, spec_type: str) -> None:
        self._port, num_rows, threads = free_port(), max(arguments.rows), str(usable_cores())
        command = [
            *(arguments.binary, "--model", arguments.gguf, "--host", "127.0.0.1", "--port", str(self._port)),
            *("--threads", threads, "--threads-batch", threads, "--flash-attn", "on", "--no-kv-unified"),
            *("--parallel", str(num_rows), "--ctx-size", str(_SLOT_TOKENS * num_rows), "--spec-type", spec_type),
            *("--no-webui", "--threads-http", str(num_rows + 2), "--log-verbosity", "1", "--jinja"),
        ]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        try:
            wait_until_healthy(self.process, self._port)
        except BaseException:
            self.close()
            raise
        self.process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The time in which it runs."""
        self.process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGSTOP)

    def answer(self, prompt: str, row: int, num_tokens: int) -> None:
        """One request, as benchmarks/speculation.py makes it."""
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": num_tokens, "ignore_eos": True}
        body |= {"temperature": 0.3, "seed": row} if row else {"temperature": 0.0}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT_S)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            reply: dict[str, Any] = json.loads(response.read())
        finally:
            connection.close()
        if response.status != 200 or reply["usage"]["completion_tokens"] != num_tokens:
            raise SystemExit(f"llama-server answered {response.status}: {str(reply)[:300]}")


def main() -> None:
    """Measures, prints a table, and as the last line all figures as JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("binary")
    parser.add_argument("gguf")
    parser.add_argument("--spec-type", default="ngram-map-k", help="llama-server's kind of guesses")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--kinds", nargs="+", choices=_KINDS, default=list(_KINDS))
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    exit_on_signals()
    figures: list[dict[str, Any]] = []
    with ExitStack() as stack:
        servers: list[Server] = []
        for spec_type in ("none", arguments.spec_type):
            servers.append(Server(arguments, spec_type))
            stack.callback(servers[-1].close)
        for kind, num_rows in itertools.product(arguments.kinds, arguments.rows):
            pairs = [
                [_seconds(server, kind, num_rows, arguments.tokens) for server in servers]
                for _ in range(arguments.rounds + 1)
            ][1:]
            ratio = statistics.median(without / guessing for without, guessing in pairs)
            print(f"{kind:10} {num_rows:3} rows: {ratio:.2f} times as fast", flush=True)
            figures.append({"kind": kind, "rows": num_rows, "ratio": round(ratio, 3), "seconds": pairs})
    print_report(arguments, figures=figures)


def _seconds(server: Server, kind: str, num_rows: int, num_tokens: int) -> float:
    """For all rows at once."""
    with server.turn(), ThreadPoolExecutor(num_rows) as pool:
        begin = time.perf_counter()
        list(pool.map(lambda row: server.answer(PROMPTS[kind], row, num_tokens), range(num_rows)))
        return time.perf_counter() - begin


if __name__ == "__main__":
    main()
