"""The server that a soak puts its load on: one that runs already, one in this process, or one in a child process."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from tests.soak.state import ServerState

_PATIENCE_S = 120.0  # for a model to be loaded
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and how its state is read: thoroughly or not, see `Served.read`; None where nobody can look inside."""

    url: str
    read: Callable[[bool], Awaitable[ServerState | None]]


def foreign_server(url: str) -> Target:
    """A server that runs already, whose inside cannot be seen."""

    async def read(_is_thorough: bool) -> None:
        return None

    return Target(url, read)


@contextlib.asynccontextmanager
async def own_server() -> AsyncIterator[Target]:
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
