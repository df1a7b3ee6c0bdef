"""The clients of a soak, which send a case in some manner or break HTTP itself; and the log of their requests."""

import asyncio
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from types import TracebackType
from typing import Any, Self

import aiohttp

from tests.soak.case import COMPLETIONS, RESPONSES, Case, Generated, JsonAnswer, Refusal
from tests.soak.reply import (
    ChunkStream,
    ErrorEvent,
    ResponseStream,
    Wrong,
    parse_object,
    read_error,
    read_response,
    read_whole,
)
from tests.soak.server import NUMBER_HEADER

# --- the log


class Ending(StrEnum):
    """What became of a request. Every request has exactly one."""

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


class ClientLog:
    """All requests of a soak."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def open(self, kind: str, manner: str) -> Entry:
        """Before anything is sent."""
        entry = Entry(len(self.entries), kind, manner)
        self.entries.append(entry)
        return entry

    def close(self, entry: Entry, ending: Ending, complaint: str | None = None) -> None:
        """When it is known how the request ended. ValueError if that was known already."""
        if entry.ending is not None:
            raise ValueError(f"request {entry.number} ended twice: {entry.ending}, then {ending}")
        entry.ending, entry.complaint = ending, complaint

    def count(self) -> dict[str, Counter[str]]:
        """Endings by kind."""
        counts: dict[str, Counter[str]] = {}
        for entry in self.entries:
            counts.setdefault(entry.kind, Counter())[entry.ending or "open"] += 1
        return counts

    def count_manners(self) -> Counter[str]:
        return Counter(entry.manner for entry in self.entries)

    def complaints(self) -> list[str]:
        """Requests that failed or were never closed."""
        failed = [
            f"request {entry.number} ({entry.kind}, {entry.manner}): {entry.complaint}"
            for entry in self.entries
            if entry.ending is Ending.FAILED
        ]
        return failed + [f"request {entry.number} was never closed" for entry in self.entries if entry.ending is None]

    def compare(self, server_log: Mapping[str, Sequence[str]]) -> list[str]:
        """Where the server's log contradicts what the clients saw.

        What the client saw a status of, arrived once and ended with that status; nothing arrived twice; and nothing
        arrived that was not sent. Requests that no HTTP parser can read do not arrive.
        """
        complaints = []
        for entry in self.entries:
            told = server_log.get(str(entry.number), [])
            if len(told) > 1:
                complaints.append(f"request {entry.number} ({entry.kind}) arrived {len(told)} times: {told}")
            is_whole = entry.ending in (Ending.FINISHED, Ending.QUEUE_FULL, Ending.REFUSED)
            if is_whole and entry.status is not None and list(told) != [str(entry.status)]:
                complaints.append(
                    f"request {entry.number} ({entry.kind}): the client saw {entry.status}, the server tells {told}"
                )
        unknown = set(server_log) - {str(entry.number) for entry in self.entries}
        return complaints + [f"the server tells of requests that nobody sent: {sorted(unknown)}"] * bool(unknown)


# --- clients that send cases


DEADLINE_S = 60.0  # for a request; what takes longer hangs
_TINY_BUFFER = 2**12
_STANDSTILL_S = 3.0  # longer than the server waits for a reader
_SLOW_S = 6.0  # how long a slow reader takes the trouble


class Manner(StrEnum):
    """How a client behaves."""

    PATIENT = "patient"
    LEAVES_BEFORE = "leaves before the reply"
    LEAVES_WITHIN = "leaves within the reply"
    SLOW = "reads slowly"
    STOPS = "stops reading"


_UNDULY_SLOW = (Manner.SLOW, Manner.STOPS)


class _Left(Exception):
    """This client went away on purpose."""


class Client:
    """Many clients of one server. Use as a context manager, which opens and closes all connections."""

    def __init__(self, url: str, client_log: ClientLog) -> None:
        self._url = url
        self._client_log = client_log
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0)
        self._session = await self._stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        # Kept connections would be tiny ones, so each is used once.
        tiny = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_tiny_socket)
        self._slow_session = await self._stack.enter_async_context(
            aiohttp.ClientSession(connector=tiny, read_bufsize=_TINY_BUFFER)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def perform(self, case: Case, manner: Manner, rng: Random) -> Entry:
        """Sends it and follows it to its end. Never raises, but when it is cancelled, which counts as leaving."""
        entry = self._client_log.open(case.kind, manner)
        ending, complaint = Ending.LEFT, None
        try:
            ending = await self._in_time(case, manner, rng, entry)
        except Wrong as error:
            ending, complaint = Ending.FAILED, f"{error}; asked {(case.body or b'')[:300]!r}"
        finally:
            self._client_log.close(entry, ending, complaint)
        return entry

    async def _in_time(self, case: Case, manner: Manner, rng: Random, entry: Entry) -> Ending:
        patience = min(rng.expovariate(6.0), 5.0) if manner is Manner.LEAVES_BEFORE else DEADLINE_S
        try:
            async with asyncio.timeout(patience):
                return await self._exchange(case, manner, rng, entry)
        except TimeoutError:
            if manner is Manner.LEAVES_BEFORE:
                return Ending.LEFT
            raise Wrong(f"no end within {DEADLINE_S:g} s") from None
        except _Left:
            return Ending.LEFT
        except ErrorEvent as error:
            if error.code == "queue_full":  # a keep-alive comment was faster than the queue's answer
                return Ending.QUEUE_FULL
            raise Wrong(f"the stream ended with {error}") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            if manner in _UNDULY_SLOW and entry.status == 200:
                return Ending.CUT_OFF
            raise Wrong(f"the connection failed: {type(error).__name__}: {error}") from None

    async def _exchange(self, case: Case, manner: Manner, rng: Random, entry: Entry) -> Ending:
        session = self._slow_session if manner in _UNDULY_SLOW else self._session
        headers = {"Content-Type": "application/json", NUMBER_HEADER: str(entry.number), **case.headers}
        url = self._url + case.path
        async with session.request(case.method, url, data=case.body, headers=headers) as response:
            entry.status = response.status
            pieces = _read(response, manner, rng)
            if response.status == 200:
                await _check_answer(case, response, pieces)
                return Ending.FINISHED
            raw = b"".join([piece async for piece in pieces])
            return _judge_error(case, response, read_error(raw))


async def _check_answer(case: Case, response: aiohttp.ClientResponse, pieces: AsyncIterator[bytes]) -> None:
    """Reads the reply; `Wrong` if it is not what the case wants."""
    right = case.right
    if isinstance(right, Refusal):
        raise Wrong(f"this is answered, where {right.status} was due")
    if isinstance(right, Generated) and right.is_stream:
        _check_type(response, "text/event-stream")
        stream = ResponseStream() if case.path == RESPONSES else ChunkStream()
        async for piece in pieces:
            stream.feed(piece)
        if not stream.is_done:
            raise Wrong("the stream has no end")
        right.check(stream.reply)
        return
    _check_type(response, "application/json")
    raw = b"".join([piece async for piece in pieces])
    if isinstance(right, JsonAnswer):
        right.check(parse_object(raw))
    else:
        right.check(read_response(parse_object(raw)) if case.path == RESPONSES else read_whole(raw))


def _check_type(response: aiohttp.ClientResponse, content_type: str) -> None:
    if response.content_type != content_type:
        raise Wrong(f"{response.content_type} where {content_type} was due")


def _judge_error(case: Case, response: aiohttp.ClientResponse, error: dict[str, Any]) -> Ending:
    right = case.right
    if response.status == 429 and isinstance(right, Generated):
        if error["code"] != "queue_full" or "Retry-After" not in response.headers:
            raise Wrong(f"an odd 429: {error}, {dict(response.headers)}")
        return Ending.QUEUE_FULL
    if isinstance(right, Refusal) and (response.status, error["param"]) == (right.status, right.param):
        return Ending.REFUSED
    raise Wrong(f"{response.status} {error}, where {right} was due")


async def _read(response: aiohttp.ClientResponse, manner: Manner, rng: Random) -> AsyncIterator[bytes]:
    """The body, as this manner reads it. `_Left` when it reads no more."""
    content = response.content
    num_left = int(2 ** rng.uniform(0, 14))
    deadline = asyncio.get_running_loop().time() + _SLOW_S
    if manner is Manner.STOPS:
        yield await content.read(1)
        await asyncio.sleep(_STANDSTILL_S)
    while piece := await (content.read(rng.randint(1, 4000)) if manner is Manner.SLOW else content.readany()):
        num_left -= len(piece)
        if manner is Manner.LEAVES_WITHIN and num_left < 0:
            raise _Left
        yield piece
        if manner is Manner.SLOW:
            if asyncio.get_running_loop().time() > deadline:
                raise _Left
            await asyncio.sleep(rng.uniform(0, 0.1))


def _tiny_socket(address: Any) -> socket.socket:
    """With a receive buffer that is full soon."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _TINY_BUFFER)
    made.setblocking(False)
    return made


# --- clients that break HTTP itself


_RAW_DEADLINE_S = 30.0

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
            async with asyncio.timeout(_RAW_DEADLINE_S):
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
