"""The server of a soak: production parts around the bundled model, small, so that little load is too much for it.

As a script it runs in a process of its own. It prints its address as JSON; then for each line that it reads on
standard input (`peek` or `state`) its state; and goes when standard input ends.
"""

import asyncio
import contextlib
import json
import logging
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict

from chairlift.api.app import Api
from chairlift.api.config import ServerConfig
from chairlift.api.http.listening import Listener
from chairlift.api.server import make_runner, start
from chairlift.engine.async_llm import AsyncLLM
from tests.soak.state import Served, ServerLog

MAX_SEQ_LEN = 512
MAX_BODY_BYTES = 200_000
CLIENT_TIMEOUT_S = 1.0
_SEND_BUFFER_BYTES = 2**14


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
