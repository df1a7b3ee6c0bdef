"""The server of a soak: production parts around the bundled model, small, so that little load is too much for it.

As a script it runs in a process of its own. It prints its address as JSON; then for each line that it reads on
standard input (`peek` or `state`) its state; and goes when standard input ends. `in_child_process` is the other end.
The state is what the server holds at a moment, read inside its process, and must be nothing when nobody asks it.
"""

import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web

from chairlift.api import ServerConfig
from chairlift.api.app import Api
from chairlift.api.errors import Handler
from chairlift.api.http.listening import Listener
from chairlift.api.server import make_runner, start
from chairlift.engine.async_llm import AsyncLLM

NUMBER_HEADER = "X-Soak-Number"
LEFT = "left"


@dataclass(frozen=True, slots=True)
class ServerState:
    """What a server holds. Everything but `server_log` and `faults` is a number at one moment."""

    num_slots: int
    num_free_slots: int
    num_sequences: int  # waiting and running, in the scheduler
    num_generations: int  # that `AsyncLLM` follows
    num_routes: int  # sequences whose tokens the text side waits for
    num_active: int  # POST requests between their headers and their last byte
    num_connections: int
    num_tasks: int
    num_threads: int
    num_fds: int
    num_objects: int  # that the garbage collector knows; 0 unless counted
    rss_mb: float
    faults: list[str] = field(default_factory=list)  # what was logged as an error, and books that do not agree
    server_log: dict[str, list[str]] = field(default_factory=dict)  # statuses of its arrivals, by a request's number

    @property
    def leftovers(self) -> dict[str, int]:
        """What should be zero when nobody asks anything, where it is not."""
        counts = {
            "slots taken": self.num_slots - self.num_free_slots,
            "sequences": self.num_sequences,
            "generations": self.num_generations,
            "routes": self.num_routes,
            "active requests": self.num_active,
            "connections": self.num_connections,
        }
        return {name: count for name, count in counts.items() if count}


@dataclass(frozen=True, slots=True)
class Target:
    """A server that a load is put on, and how its state is read: thoroughly or not, see `Served.read`."""

    url: str
    read: Callable[[bool], Awaitable[ServerState]]


class ServerLog(logging.Handler):
    """Notes every numbered request that reaches the application and how it ends, and every error that is logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.entries: dict[str, list[str]] = {}
        self.faults: list[str] = []

    @web.middleware
    async def note(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The outermost middleware."""
        ending = LEFT
        try:
            response = await handler(request)
            ending = str(response.status)
            return response
        finally:
            if (number := request.headers.get(NUMBER_HEADER)) is not None:
                self.entries.setdefault(number, []).append(ending)

    def emit(self, record: logging.LogRecord) -> None:
        self.faults.append(f"{record.name}: {record.getMessage()} {record.exc_info[1] if record.exc_info else ''}")


@dataclass(frozen=True, slots=True)
class Served:
    """A running server, seen from inside its process."""

    url: str
    llm: AsyncLLM
    api: Api
    server: web.Server
    server_log: ServerLog

    async def read(self, is_thorough: bool) -> ServerState:
        """In the server's own event loop. Thorough: after a garbage collection, with the objects counted.

        The server's log is handed over: what was in it is not told again.
        """
        if is_thorough:
            _tidy()
        process = psutil.Process()
        core, scheduler = self.llm._core, self.llm._core._scheduler
        entries, self.server_log.entries = self.server_log.entries, {}
        faults, self.server_log.faults = self.server_log.faults, []
        return ServerState(
            num_slots=core.config.max_batch_size,
            num_free_slots=core.cache.slots_remaining,
            num_sequences=scheduler.num_waiting + scheduler.num_running,
            num_generations=self.llm.num_unfinished,
            num_routes=len(self.llm._outputs._routes),
            num_active=self.api.num_active,
            num_connections=len(self.server.connections),
            num_tasks=len(asyncio.all_tasks()),
            num_threads=threading.active_count(),
            num_fds=process.num_fds(),
            num_objects=len(gc.get_objects()) if is_thorough else 0,
            rss_mb=process.memory_info().rss / 2**20,
            faults=faults + self._disagreements(),
            server_log=entries,
        )

    def _disagreements(self) -> list[str]:
        """The engine's own check, which may only be made while its thread rests."""
        if self.llm._core.has_work:
            return []
        try:
            self.llm._core.check()
        except AssertionError as error:
            return [f"the engine's books do not agree: {error}"]
        return []


def _tidy() -> None:
    """Collects garbage and returns its memory to the system as far as possible, so that the rest can be compared."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def as_record(state: ServerState) -> dict[str, Any]:
    """For a report: the numbers."""
    return {each.name: getattr(state, each.name) for each in fields(state) if each.name not in ("faults", "server_log")}


MAX_SEQ_LEN = 512
MAX_BODY_BYTES = 200_000
CLIENT_TIMEOUT_S = 1.0
_SEND_BUFFER_BYTES = 2**14
_PATIENCE_S = 120.0  # for a model to be loaded
_ROOT = Path(__file__).parents[2]


@contextlib.asynccontextmanager
async def serving(num_slots: int = 8, max_queue_size: int = 8) -> AsyncIterator[Served]:
    """The server, in this event loop. Short of slots, queue, budget and patience: every limit is met often."""
    llm = AsyncLLM(
        max_batch_size=num_slots,
        max_queue_size=max_queue_size,
        max_seq_len=MAX_SEQ_LEN,
        max_steps_per_launch=4,
        max_num_batched_tokens=128,
        dtype="float32",  # in bfloat16 kernels are made and kept for every shape, which looks like a leak for long
    )
    config = ServerConfig(
        port=0,
        max_body_bytes=MAX_BODY_BYTES,
        client_timeout=CLIENT_TIMEOUT_S,
    )
    api, server_log = Api(llm, config), ServerLog()
    runner = make_runner(api)
    runner.app.middlewares.insert(0, server_log.note)
    logging.getLogger().addHandler(server_log)
    try:
        with Listener(config) as listener:
            await start(runner, config, listener)
            for each in listener.sockets:  # connections inherit it: who stops reading is felt soon
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            assert runner.server is not None, "started"
            yield Served(listener.url, llm, api, runner.server, server_log)
    finally:
        logging.getLogger().removeHandler(server_log)
        await llm.close()
        await runner.cleanup()


@contextlib.asynccontextmanager
async def in_child_process() -> AsyncIterator[Target]:
    """A server in a child process, which must end by itself when this context is left."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.soak.server",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=_ROOT,
        limit=2**26,  # a server's log is one line
    )
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None

    async def next_line() -> bytes:
        line = await asyncio.wait_for(stdout.readline(), _PATIENCE_S)
        if not line:
            raise RuntimeError(f"the server is gone; its exit code is {await process.wait()}")
        return line

    async def read(is_thorough: bool) -> ServerState:
        stdin.write(b"state\n" if is_thorough else b"peek\n")
        return ServerState(**json.loads(await next_line()))

    try:
        yield Target(json.loads(await next_line())["url"], read)
        stdin.close()
        code = await asyncio.wait_for(process.wait(), 30)
        if code != 0:
            raise RuntimeError(f"the server ended with exit code {code}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _main() -> None:
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    async with serving() as served:
        _tell({"url": served.url})
        while line := await commands.readline():
            _tell(asdict(await served.read(line.strip() == b"state")))


def _tell(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    import uvloop

    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as main_runner:
        main_runner.run(_main())
