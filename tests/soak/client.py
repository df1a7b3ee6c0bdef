"""The clients of a soak, which send a case in some manner or break HTTP itself; and the log of their requests."""

import asyncio
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from tests.soak.case import COMPLETIONS, RESPONSES, Case, Generated, JsonAnswer, Refusal
from tests.soak.reply import ErrorEvent, Wrong, parse_object, read_error, read_response, read_stream, read_whole
from tests.soak.server import NUMBER_HEADER


class Ending(StrEnum):
    """Holds what became of a request. Every request has exactly one."""

    FINISHED = "finished"  # the whole answer came, and it is right
    QUEUE_FULL = "queue full"  # 429
    REFUSED = "refused"  # the error that the request deserves
    LEFT = "left"  # the client went away before the end
    CUT_OFF = "cut off"  # the server ended the connection of a client that did not do its part
    FAILED = "failed"  # anything else, which must not be


@dataclass(slots=True)
class Entry:
    """One request. `status` is the HTTP status that the client saw, if it saw one."""

    number: int
    kind: str
    manner: str
    ending: Ending | None = None
    status: int | None = None
    complaint: str | None = None

    def __str__(self) -> str:
        return f"request {self.number} ({self.kind}, {self.manner})"


@dataclass
class ClientLog:
    """All requests of a soak."""

    entries: list[Entry] = field(default_factory=list)

    async def follow(self, kind: str, manner: str, exchange: Callable[[Entry], Awaitable[Ending]]) -> Entry:
        """One request to its end. Never raises, but when it is cancelled, which counts as leaving."""
        entry = Entry(len(self.entries), kind, manner)
        self.entries.append(entry)
        ending = Ending.LEFT
        try:
            ending = await exchange(entry)
        except (Wrong, TimeoutError, OSError) as error:
            ending, entry.complaint = Ending.FAILED, f"{type(error).__name__}: {error}"
        finally:
            entry.ending = ending
        return entry

    def count(self) -> dict[str, Counter[str]]:
        """Endings by kind."""
        counts: dict[str, Counter[str]] = {}
        for entry in self.entries:
            counts.setdefault(entry.kind, Counter())[entry.ending or "open"] += 1
        return counts

    def complaints(self, server_log: Mapping[str, Sequence[str]]) -> list[str]:
        """Requests that failed or did not end, and where the server's log contradicts what the clients saw.

        What the client saw a status of, arrived once and ended with that status; nothing arrived twice; and nothing
        arrived that was not sent. Requests that no HTTP parser can read do not arrive.
        """
        complaints = []
        for entry in self.entries:
            told = list(server_log.get(str(entry.number), []))
            is_whole = entry.ending in (Ending.FINISHED, Ending.QUEUE_FULL, Ending.REFUSED)
            if entry.ending in (None, Ending.FAILED):
                complaints.append(f"{entry} did not end as it should: {entry.complaint}")
            if len(told) > 1:
                complaints.append(f"{entry} arrived {len(told)} times: {told}")
            elif is_whole and entry.status is not None and told != [str(entry.status)]:
                complaints.append(f"{entry}: the client saw {entry.status}, the server tells {told}")
        unknown = set(server_log) - {str(entry.number) for entry in self.entries}
        return complaints + [f"the server tells of requests that nobody sent: {sorted(unknown)}"] * bool(unknown)


DEADLINE_S = 60.0  # for a request; what takes longer hangs
_TINY_BUFFER = 2**12
_STANDSTILL_S = 3.0  # longer than the server waits for a reader
_SLOW_S = 6.0  # how long a slow reader takes the trouble


class Manner(StrEnum):
    """Says how a client behaves."""

    PATIENT = "patient"
    LEAVES_BEFORE = "leaves before the reply"
    LEAVES_WITHIN = "leaves within the reply"
    SLOW = "reads slowly"
    STOPS = "stops reading"


_UNDULY_SLOW = (Manner.SLOW, Manner.STOPS)


@asynccontextmanager
async def connecting(url: str, log: ClientLog) -> AsyncIterator["Client"]:
    """A client whose connections are closed in the end."""
    # Kept connections of slow readers would be tiny ones, so each is used once.
    tiny = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_tiny_socket)
    async with (
        aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session,
        aiohttp.ClientSession(url, connector=tiny, read_bufsize=_TINY_BUFFER) as slow_session,
    ):
        yield Client(log, session, slow_session)


@dataclass(frozen=True)
class Client:
    """Many clients of one server."""

    log: ClientLog
    session: aiohttp.ClientSession
    slow_session: aiohttp.ClientSession

    async def perform(self, case: Case, manner: Manner, rng: Random) -> Entry:
        """Sends it and follows it to its end."""
        return await self.log.follow(case.kind, manner, lambda entry: self._in_time(case, manner, rng, entry))

    async def _in_time(self, case: Case, manner: Manner, rng: Random, entry: Entry) -> Ending:
        patience = min(rng.expovariate(6.0), 5.0) if manner is Manner.LEAVES_BEFORE else DEADLINE_S
        try:
            async with asyncio.timeout(patience):
                return await self._exchange(case, manner, rng, entry)
        except TimeoutError:
            if manner is Manner.LEAVES_BEFORE:
                return Ending.LEFT
            raise
        except ErrorEvent as error:
            if error.code == "queue_full":  # a keep-alive comment was faster than the queue's answer
                return Ending.QUEUE_FULL
            raise Wrong(f"the stream ended with {error}") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            if manner in _UNDULY_SLOW and entry.status == 200:
                return Ending.CUT_OFF
            raise Wrong(f"the connection failed: {type(error).__name__}: {error}") from None
        except Wrong as error:
            raise Wrong(f"{error}; asked {(case.body or b'')[:300]!r}") from None

    async def _exchange(self, case: Case, manner: Manner, rng: Random, entry: Entry) -> Ending:
        session = self.slow_session if manner in _UNDULY_SLOW else self.session
        headers = {"Content-Type": "application/json", NUMBER_HEADER: str(entry.number), **case.headers}
        async with session.request(case.method, case.path, data=case.body, headers=headers) as response:
            entry.status = response.status
            raw, has_left = await _read(response.content, manner, rng)
            return _judge(case, response, raw, has_left)


def _judge_error(case: Case, response: aiohttp.ClientResponse, error: dict[str, Any]) -> Ending:
    right = case.right
    if response.status == 429 and isinstance(right, Generated):
        if error["code"] != "queue_full" or "Retry-After" not in response.headers:
            raise Wrong(f"an odd 429: {error}, {dict(response.headers)}")
        return Ending.QUEUE_FULL
    if isinstance(right, Refusal) and (response.status, error["param"]) == (right.status, right.param):
        return Ending.REFUSED
    raise Wrong(f"{response.status} {error}, where {right} was due")


def _judge(case: Case, response: aiohttp.ClientResponse, raw: bytes, has_left: bool) -> Ending:
    """Returns whether it is what the case wants, or, if the client has left, may become it."""
    right = case.right
    if response.status != 200:
        return Ending.LEFT if has_left else _judge_error(case, response, read_error(raw))
    if isinstance(right, Refusal):
        raise Wrong(f"this is answered, where {right.status} was due")
    is_stream, is_response = isinstance(right, Generated) and right.is_stream, case.path == RESPONSES
    if response.content_type != (due := "text/event-stream" if is_stream else "application/json"):
        raise Wrong(f"{response.content_type} where {due} was due")
    reply, is_done = read_stream(raw, is_response) if is_stream else (None, True)
    if has_left:
        return Ending.LEFT
    if not is_done:
        raise Wrong("the stream has no end")
    if isinstance(right, JsonAnswer):
        right.check(parse_object(raw))
    else:
        right.check(reply or (read_response(parse_object(raw)) if is_response else read_whole(raw)))
    return Ending.FINISHED


async def _read(content: aiohttp.StreamReader, manner: Manner, rng: Random) -> tuple[bytes, bool]:
    """The body, as this manner reads it, and whether it read no more of it."""
    num_wanted = int(2 ** rng.uniform(0, 14))
    deadline = asyncio.get_running_loop().time() + _SLOW_S
    raw = bytearray()
    if manner is Manner.STOPS:
        raw += await content.read(1)
        await asyncio.sleep(_STANDSTILL_S)
    while piece := await (content.read(rng.randint(1, 4000)) if manner is Manner.SLOW else content.readany()):
        raw += piece
        if manner is Manner.LEAVES_WITHIN and len(raw) > num_wanted:
            return bytes(raw), True
        if manner is Manner.SLOW:
            if asyncio.get_running_loop().time() > deadline:
                return bytes(raw), True
            await asyncio.sleep(rng.uniform(0, 0.1))
    return bytes(raw), False


def _tiny_socket(address: Any) -> socket.socket:
    """With a receive buffer that is full soon."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _TINY_BUFFER)
    made.setblocking(False)
    return made


_NO_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of TLS
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: many\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nbad header\r\n\r\n",
    b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\n\r\n",
]


BREAKS = ("no HTTP", "withheld headers", "withheld body", "leaves within its body")


async def break_http(url: str, log: ClientLog, rng: Random, kind: str) -> Entry:
    """Misbehaves in one of these ways, and looks at what comes of it."""

    async def misbehave(entry: Entry) -> Ending:
        async with asyncio.timeout(30.0):
            address = urlsplit(url)
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            try:
                return await _misbehave(reader, writer, entry, rng)
            finally:
                writer.transport.abort()

    return await log.follow(kind, "raw", misbehave)


async def _misbehave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, entry: Entry, rng: Random) -> Ending:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += f"{NUMBER_HEADER}: {entry.number}\r\nContent-Length: 100\r\n\r\n"
    sent = {
        "no HTTP": rng.choice(_NO_HTTP),
        "withheld headers": head.encode()[: rng.randint(0, len(head) - 3)],
    }.get(entry.kind, head.encode() + b"{" * rng.randint(0, 99))
    writer.write(sent)
    if entry.kind == "leaves within its body":
        await asyncio.sleep(rng.uniform(0, 0.2))
        return Ending.LEFT
    try:
        reply = await reader.read()
    except ConnectionError:
        reply = b""
    if entry.kind == "withheld headers":
        if reply:
            raise Wrong(f"an answer to half of the headers: {reply[:200]!r}")
        return Ending.CUT_OFF
    entry.status = status = 408 if entry.kind == "withheld body" else None
    first, _, body = reply.partition(b"\r\n\r\n")
    if not re.match(rb"HTTP/1\.[01] %d " % (status or 400), first):  # who sends no HTTP is answered in the oldest
        raise Wrong(f"{first[:80]!r} where {status or 400} was due; sent {sent[:80]!r}")
    read_error(body)
    return Ending.REFUSED
