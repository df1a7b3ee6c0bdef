"""Clients that break HTTP itself: they write bytes, or fewer than they promised, to a socket."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from random import Random

from tests.soak.case import COMPLETIONS
from tests.soak.client_log import ClientLog, Ending, Entry
from tests.soak.reply import Wrong, read_error
from tests.soak.state import NUMBER_HEADER

_DEADLINE_S = 30.0
_NO_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of TLS
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: many\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nbad header\r\n\r\n",
    b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\n\r\n",
]


class RawClient:
    """Talks to one address."""

    def __init__(self, host: str, port: int, client_log: ClientLog) -> None:
        self._host = host
        self._port = port
        self._client_log = client_log

    async def perform(self, rng: Random) -> Entry:
        """Draws a way to misbehave, and looks at what comes of it."""
        ways: dict[str, Callable[[Entry, Random], Awaitable[Ending]]] = {
            "no HTTP": self._send_rubbish,
            "withheld headers": self._withhold_headers,
            "withheld body": self._withhold_body,
            "leaves within its body": self._leave_within_body,
        }
        kind = rng.choice(list(ways))
        entry = self._client_log.open(kind, "raw")
        ending, complaint = Ending.LEFT, None
        try:
            async with asyncio.timeout(_DEADLINE_S):
                ending = await ways[kind](entry, rng)
        except (Wrong, TimeoutError, OSError) as error:
            ending, complaint = Ending.FAILED, f"{type(error).__name__}: {error}"
        finally:
            self._client_log.close(entry, ending, complaint)
        return entry

    async def _send_rubbish(self, entry: Entry, rng: Random) -> Ending:  # noqa: ARG002 - it does not arrive
        sent = rng.choice(_NO_HTTP)
        reply = await self._exchange(sent)
        _expect_error(reply, 400, sent)
        return Ending.REFUSED

    async def _withhold_headers(self, entry: Entry, rng: Random) -> Ending:
        sent = _head(entry, 10)
        reply = await self._exchange(sent[: rng.randint(0, len(sent) - 3)])
        if reply:
            raise Wrong(f"an answer to half of the headers: {reply[:200]!r}")
        return Ending.CUT_OFF

    async def _withhold_body(self, entry: Entry, rng: Random) -> Ending:
        sent = _head(entry, 100) + b"{" * rng.randint(0, 99)
        reply = await self._exchange(sent)
        _expect_error(reply, 408, sent)
        entry.status = 408
        return Ending.REFUSED

    async def _leave_within_body(self, entry: Entry, rng: Random) -> Ending:
        _, writer = await asyncio.open_connection(self._host, self._port)
        writer.write(_head(entry, 100) + b"{" * rng.randint(0, 99))
        await asyncio.sleep(rng.uniform(0, 0.2))
        writer.transport.abort()
        return Ending.LEFT

    async def _exchange(self, data: bytes) -> bytes:
        """All that comes back until the server closes the connection."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(data)
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()


def _head(entry: Entry, content_length: int) -> bytes:
    lines = [
        f"POST {COMPLETIONS} HTTP/1.1",
        "Host: soak",
        "Content-Type: application/json",
        f"{NUMBER_HEADER}: {entry.number}",
        f"Content-Length: {content_length}",
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def _expect_error(reply: bytes, status: int, sent: bytes) -> None:
    head, _, body = reply.partition(b"\r\n\r\n")
    if not re.match(rb"HTTP/1\.[01] %d " % status, head):  # who sends no HTTP is answered in the oldest
        raise Wrong(f"{head[:80]!r} where {status} was due; sent {sent[:80]!r}")
    read_error(body)
