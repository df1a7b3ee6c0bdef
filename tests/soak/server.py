"""The server of a soak: production parts around the bundled model, small, so that little load is too much for it.

As a script it runs in a process of its own. It prints its address as JSON; then for each line that it reads on
standard input (`peek` or `state`) its state; and goes when standard input ends. `in_child_process` is the other end.
"""

import asyncio
import contextlib
import json
import logging
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

from chairlift.api import ServerConfig
from chairlift.api.app import Api
from chairlift.api.http.listening import Listener
from chairlift.api.server import make_runner, start
from chairlift.engine.async_llm import AsyncLLM
from tests.soak.state import Served, ServerLog, ServerState, Target

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
