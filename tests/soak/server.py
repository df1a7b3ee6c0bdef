"""The server of a soak: the real one around the bundled model, small, so that little load is too much for it.

It also tells on `/soak/state` what it holds at a moment, which must be nothing when nobody asks it.
"""

import asyncio
import ctypes
import gc
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import psutil
from aiohttp import web

import chairlift.__main__
from chairlift.api import ServerConfig, server
from chairlift.api.app import Api
from chairlift.api.errors import Handler
from chairlift.api.http.listening import Listener
from tests.support.engines import core_of
from tests.support.server_process import Process, running

NUMBER_HEADER = "X-Soak-Number"
STATE_PATH = "/soak/state"
MAX_SEQ_LEN = 512
MAX_BODY_BYTES = 200_000
_SEND_BUFFER_BYTES = 2**14
# Short of slots, queue, budget and patience: every limit is met often. In bfloat16 kernels are made and kept for every
# shape, which looks like a leak for long.
_FLAGS = f"""--max-batch-size 8 --max-queue-size 8 --max-seq-len {MAX_SEQ_LEN} --max-steps-per-launch 4 --dtype float32
    --max-num-batched-tokens 128 --max-body-bytes {MAX_BODY_BYTES} --client-timeout 1 --log-interval 0
    --drain-timeout 2"""


@dataclass(frozen=True, slots=True)
class State:
    """Holds what a server holds at one moment."""

    held: dict[str, int]  # what should be zero when nobody asks anything
    sizes: dict[str, float]  # what should be the same when nobody asks anything
    faults: list[str]  # books that do not agree
    arrivals: dict[str, list[str]]  # by a request's number: the statuses of its arrivals since the last look

    @property
    def leftovers(self) -> dict[str, int]:
        return {name: count for name, count in self.held.items() if count}


@contextmanager
def soaked() -> Iterator[Process]:
    """A server in a process of its own, which must log no error, and end by itself when this context is left."""
    script = "import sys; from tests.soak.server import main; sys.exit(main())"
    with running(script, *_FLAGS.split(), is_forked=False) as process:
        yield process
        process.popen.terminate()
        code = process.exit_code()
        process.log += [f" ERROR the server ended with exit code {code}"] * (code != 0)


def main() -> int:
    """Serves as the arguments say, with a record of what arrives, and buffers that are full soon."""
    make_runner, start = server.make_runner, server.start

    def make_telling_runner(api: Api) -> web.AppRunner:
        runner = make_runner(api)
        runner.app.middlewares.insert(0, _note_arrival)
        runner.app.router.add_get(STATE_PATH, _Teller(api, runner).tell)
        return runner

    async def start_with_small_buffers(runner: web.AppRunner, config: ServerConfig, listener: Listener) -> Any:
        make_protocol = await start(runner, config, listener)
        for each in listener.sockets:  # connections inherit it: who stops reading is felt soon
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        return make_protocol

    server.make_runner, server.start = make_telling_runner, start_with_small_buffers
    return chairlift.__main__.main()


_arrivals: dict[str, list[str]] = {}


@web.middleware
async def _note_arrival(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Notes every numbered request that reaches the application, and how it ends."""
    ending = "left"
    try:
        response = await handler(request)
        ending = str(response.status)
        return response
    finally:
        if (number := request.headers.get(NUMBER_HEADER)) is not None:
            _arrivals.setdefault(number, []).append(ending)


@dataclass(frozen=True)
class _Teller:
    api: Api
    runner: web.AppRunner

    async def tell(self, request: web.Request) -> web.Response:
        """Thoroughly: after a garbage collection, with the objects counted."""
        is_thorough = "thorough" in request.query
        if is_thorough:  # the rest can be compared then
            gc.collect()
            if sys.platform == "linux":
                ctypes.CDLL(None).malloc_trim(0)
        assert self.runner.server is not None, "it serves"
        llm, process = self.api._llm, psutil.Process()
        core, scheduler = core_of(llm), core_of(llm).scheduler
        held = {
            "slots taken": core.config.max_batch_size - core.cache.slots_remaining,
            "sequences": scheduler.num_waiting + scheduler.num_running,
            "generations": llm.num_unfinished,
            "routes": len(llm._outputs._routes),  # sequences whose tokens the text side waits for
            "active requests": self.api.num_active,
            "connections": len(self.runner.server.connections) - 1,  # but for this one
        }
        sizes = {
            "tasks": len(asyncio.all_tasks()),
            "open files": process.num_fds(),
            "threads": threading.active_count(),
            "objects": len(gc.get_objects()) if is_thorough else 0,
            "MB of memory": process.memory_info().rss / 2**20,
        }
        faults = []
        if not core.has_work:  # the engine's own check, which may only be made while its thread rests
            try:
                core.check()
            except AssertionError as error:
                faults = [f"the engine's books do not agree: {error}"]
        state = State(held, sizes, faults, dict(_arrivals))
        _arrivals.clear()
        return web.json_response(asdict(state))
