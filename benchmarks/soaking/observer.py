"""How a soak looks into its server: in the same process, in a child process, or (somebody else's server) not at all."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

from soaking.books import Books, Served

_PATIENCE_S = 120.0  # for a model to be loaded
_SCRIPTS = Path(__file__).parents[1]


class Observer(Protocol):
    """Reads the books of a server."""

    url: str

    async def read(self, is_thorough: bool) -> Books | None:
        """See `Served.read`; None if nobody may look."""
        ...


class Outsider:
    """Of a server that runs already."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def read(self, is_thorough: bool) -> None:
        """See `Observer`."""


class Insider:
    """Of a server in this process."""

    def __init__(self, served: Served) -> None:
        self.url = served.url
        self._served = served

    async def read(self, is_thorough: bool) -> Books:
        """See `Observer`."""
        return await self._served.read(is_thorough)


class Overseer:
    """Of a server in a child process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.url = ""
        self._process = process

    async def read(self, is_thorough: bool) -> Books:
        """See `Observer`."""
        assert self._process.stdin is not None, "piped"
        self._process.stdin.write(b"books\n" if is_thorough else b"peek\n")
        return Books(**json.loads(await self.next_line()))

    async def next_line(self) -> bytes:
        assert self._process.stdout is not None, "piped"
        line = await asyncio.wait_for(self._process.stdout.readline(), _PATIENCE_S)
        if not line:
            raise RuntimeError(f"the server is gone; its exit code is {await self._process.wait()}")
        return line


@contextlib.asynccontextmanager
async def own_server() -> AsyncIterator[Overseer]:
    """A server in a child process, which must go by itself at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "soaking.server",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=_SCRIPTS,
        limit=2**26,  # a journal is one line
    )
    assert process.stdin is not None, "piped"
    try:
        overseer = Overseer(process)
        overseer.url = json.loads(await overseer.next_line())["url"]
        yield overseer
        process.stdin.close()
        code = await asyncio.wait_for(process.wait(), 30)
        if code != 0:
            raise RuntimeError(f"the server went with exit code {code}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
