"""Chairlift's server beside others' under the loads of Red Hat's evaluation of vLLM on CPUs, which guidellm plays.

    python benchmarks/evaluation.py --shape qwen3-0.6b --guidellm guidellm/bin/guidellm \\
        --peer vllm=vllm/bin/python,preload=TCMALLOC:IOMP \\
        --peer llama.cpp=llama.cpp/bin/llama-server,gguf=models/qwen3-0.6b.gguf

The loads are those of https://github.com/redhat-et/vllm-cpu-perf-eval: each has a length of prompts and of answers, and
so many users, of whom each sends its next request when the last one is answered. No server reuses prompts. Peers are
named as for compare.py; docs/comparing.md says how guidellm and their environments are installed.

Each cell of the grid, a load with a number of users, is played by guidellm against one server after the other, while
those that wait are stopped. It ends after a number of requests for each user, or at a limit of time; rates count what
came until then. The order rotates from cell to cell. A cell has, of each server: output tokens a second, the median
time to the first token, and the median time between two tokens. The last line is JSON; the exit code is 1 if a request
failed, or guidellm did, which ends the measurement with the cells that are done.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from comparison.ceiling import ModelShape
from machine import format_table, parser_of, print_report, usable_cores
from peers.engines import Engine, UsageError, exit_on_signals, take_part
from peers.server import Host
from peers.worker import WorkerError
from peers.workers.protocol import Settings
from shapes import SHAPES, make_checkpoint

LOADS = {
    "chat": (512, 512),
    "chat_lite": (128, 128),
    "rag": (7680, 512),
    "code": (1024, 1024),
    "summarization": (2048, 256),
    "reasoning": (256, 2048),
}
"""Tokens of prompts and of answers, by the names that the evaluation gives them."""

_NO_REUSE = {"enable_prefix_caching": "false"}
_BYTES_PER_NUMBER = 2  # bfloat16
SLACK = 64  # tokens of a slot beyond both lengths, since a client may count a prompt otherwise than a server
_GUIDELLM_LIMIT_S = 120.0  # what it may take beyond a cell's limit, to start and to report


@dataclass(frozen=True, slots=True)
class Cell:
    """A load with so many users."""

    load: str
    users: int

    @property
    def prompt_tokens(self) -> int:
        return LOADS[self.load][0]

    @property
    def output_tokens(self) -> int:
        return LOADS[self.load][1]


@dataclass(frozen=True, slots=True)
class Figures:
    """Measures of one cell of one server. Times are None where nothing came that has one."""

    output_tokens_per_s: float
    ttft_ms: float | None
    itl_ms: float | None
    num_completed: int
    num_cut: int  # still under way at the limit
    num_failed: int

    @classmethod
    def of(cls, report: dict[str, Any]) -> "Figures":
        """Reads the JSON that guidellm writes of one benchmark."""
        (benchmark,) = report["benchmarks"]
        metrics = benchmark["metrics"]
        counts = metrics["request_totals"]
        return cls(
            output_tokens_per_s=round(metrics["output_tokens_per_second"]["total"]["mean"], 2),
            ttft_ms=_median(metrics["time_to_first_token_ms"]),
            itl_ms=_median(metrics["inter_token_latency_ms"]),
            num_completed=counts["successful"],
            num_cut=counts["incomplete"],
            num_failed=counts["errored"],
        )


Play = Callable[[Host, Cell], Figures]
"""Plays a cell against a server that runs."""


@dataclass(frozen=True, slots=True)
class Client:
    """The program guidellm, and how long it plays a cell."""

    program: Path
    model: Path  # whose tokenizer makes the prompts
    requests_per_user: int
    limit_s: float
    scratch: Path

    def play(self, host: Host, cell: Cell) -> Figures:
        """See `Play`. RuntimeError with what guidellm says if it fails, or if it does not end."""
        report = self.scratch / "report.json"
        report.unlink(missing_ok=True)
        command = self.command(host.url, cell, report)
        limit = self.limit_s + _GUIDELLM_LIMIT_S
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"guidellm took more than {limit:g} s at {host.name}") from None
        if done.returncode or not report.is_file():
            raise RuntimeError(f"guidellm failed at {host.name}: {(done.stderr or done.stdout).strip()[-2000:]}")
        return Figures.of(json.loads(report.read_text(encoding="utf-8")))

    def command(self, url: str, cell: Cell, report: Path) -> list[str]:
        """Makes guidellm's command line. Prompts differ from each other, and are the same for all servers.

        They are made before the first is sent: guidellm goes on making thousands more otherwise, and takes one of the
        processor's cores from the server until the cell ends.
        """
        lengths = f"prompt_tokens={cell.prompt_tokens},output_tokens={cell.output_tokens}"
        num_requests = self.requests_per_user * cell.users
        return [
            *(str(self.program), "run", "--disable-console"),
            *("--backend", f"kind=openai_http,target={url},request_format=/v1/completions"),
            *("--tokenizer", f"kind=huggingface_auto,model={self.model}"),
            *("--data", f"kind=synthetic_text,{lengths}"),
            *("--data-loader", f"kind=pytorch,samples={num_requests}"),
            *("--profile", f"kind=concurrent,streams={cell.users}"),
            *("--constraint", f"kind=max_requests,count={num_requests}"),
            *("--constraint", f"kind=max_duration,seconds={self.limit_s:g}"),
            *("--output", f"kind=json,path={report}"),
        ]


def main() -> int:
    """Measures, prints a table, and as the last line everything as JSON; returns the exit code."""
    arguments = _parse_arguments()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        logs = arguments.logs or folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        model = arguments.model or make_checkpoint(arguments.shape, folder / "model")
        client = Client(
            arguments.guidellm.absolute(), model.absolute(), arguments.requests_per_user, arguments.limit, folder
        )
        try:
            _check_program(arguments.guidellm)
            settings = _settings(arguments, model.absolute())
            engines = [without_reuse(each) for each in take_part(arguments.peer)]
            report = measure(engines, settings, logs, arguments, client.play)
        except (UsageError, WorkerError, RuntimeError) as error:
            print(f"evaluation.py: {error}", file=sys.stderr)
            return 2
    print_report(arguments, **report)
    return int(report["failure"] is not None or any(each["num_failed"] for each in report["results"]))


def measure(
    engines: Sequence[Engine], settings: Settings, logs: Path, arguments: argparse.Namespace, play: Play
) -> dict[str, Any]:
    """Plays all cells, prints the table; returns the JSON. `WorkerError` if a server does not get ready.

    Where a cell cannot be played, those before it count, and the report has the reason; RuntimeError if none is before.
    """
    with ExitStack() as closing:
        hosts = []
        for engine in engines:
            host = Host(engine, settings, logs / f"{engine.name}.log")
            closing.callback(host.close)
            hosts.append(host)
            host.start(arguments.start_limit)
            _tell(f"{host.name}: healthy after {host.standing.healthy_s:.1f} s")
        results: list[dict[str, Any]] = []
        failure = None
        try:
            results.extend(_results(hosts, arguments, play))
        except RuntimeError as error:
            if not results:
                raise
            failure = str(error)
            _tell(f"evaluation.py: {failure}")
        servers = {host.name: asdict(host.standing) for host in hosts}
    print(_table(results, [host.name for host in hosts]))
    return {"settings": _described(arguments, settings), "servers": servers, "results": results, "failure": failure}


def _results(hosts: Sequence[Host], arguments: argparse.Namespace, play: Play) -> Iterator[dict[str, Any]]:
    """Yields the figures of each cell and server."""
    cells = [Cell(load, users) for load in arguments.loads for users in arguments.users]
    for number, cell in enumerate(cells):
        first = number % len(hosts)
        for host in [*hosts[first:], *hosts[:first]]:
            with host.turn():
                figures = play(host, cell)
            _tell(f"{cell.load}, {cell.users} users, {host.name}: {figures}")
            yield {**asdict(cell), "server": host.name, **asdict(figures)}


def _median(metric: dict[str, Any]) -> float | None:
    """Takes the median of requests that were answered; of those that were cut if none was."""
    found = [metric[kind] for kind in ("successful", "incomplete") if (metric.get(kind) or {}).get("count")]
    return round(found[0]["median"], 2) if found else None


def without_reuse(engine: Engine) -> Engine:
    """Adds the flag to servers that would reuse prompts; llama.cpp's is started so that it does not."""
    options = {} if engine.kind == "llama.cpp" else _NO_REUSE
    return Engine(engine.name, engine.kind, engine.python, options | engine.options)


def _check_program(path: Path) -> None:
    """UsageError now rather than after all servers have started."""
    if not os.access(path, os.X_OK):
        raise UsageError(f"--guidellm: there is no program at {path}")


def _table(results: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    rates = {(each["load"], each["users"], each["server"]): each["output_tokens_per_s"] for each in results}
    cells = dict.fromkeys((each["load"], each["users"]) for each in results)
    rows = [[f"{load}, {users} users", *(f"{rates[load, users, name]:.1f}" for name in names)] for load, users in cells]
    return format_table([["output tokens/s", *names], *rows])


def _settings(arguments: argparse.Namespace, model: Path) -> Settings:
    """Describes what every server is to be ready for: the longest load, from all users at the same time."""
    most_users, most_prompt = max(arguments.users), max(LOADS[each][0] for each in arguments.loads)
    max_tokens = SLACK + max(sum(LOADS[each]) for each in arguments.loads)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    num_positions = config["max_position_embeddings"]
    if num_positions < max_tokens:
        raise UsageError(f"--loads: these need {max_tokens} positions, and the model has {num_positions}")
    shape = ModelShape.of(config, _BYTES_PER_NUMBER, _BYTES_PER_NUMBER)
    needed = 1 + shape.cached_bytes(most_users * max_tokens) // 10**9
    return Settings(
        model=str(model),
        dtype="bfloat16",
        quantization=None,
        num_threads=arguments.threads,
        max_requests=most_users,
        max_prompt_tokens=most_prompt,
        max_tokens=max_tokens,
        cache_gigabytes=min(needed, arguments.cache_gigabytes or needed),
    )


def _described(arguments: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    return {
        "shape": arguments.model.name if arguments.model else arguments.shape,
        "loads": {each: LOADS[each] for each in arguments.loads},
        "users": arguments.users,
        "requests_per_user": arguments.requests_per_user,
        "limit_s": arguments.limit,
        "threads": arguments.threads,
        "cache_gigabytes": settings.cache_gigabytes,
    }


def _parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="random weights of this shape")
    parser.add_argument("--model", type=Path, help="a checkpoint directory to use instead")
    parser.add_argument("--guidellm", type=Path, required=True, help="the program, of an environment of its own")
    parser.add_argument("--peer", action="append", default=[], metavar="KIND[=PATH][,key=value...]")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--users", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="at the same time")
    parser.add_argument("--requests-per-user", type=int, default=2)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a cell may take")
    parser.add_argument("--cache-gigabytes", type=int, help="at most (default: what all users need together)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of every server (default: cores)")
    parser.add_argument("--start-limit", type=float, default=900.0, help="seconds that a start-up may take")
    parser.add_argument("--logs", type=Path, help="folder that keeps what the servers print")
    return parser.parse_args()


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
