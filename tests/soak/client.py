"""The client of a soak: sends a case in some manner, and notes in the log how it ended."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from enum import StrEnum
from random import Random
from types import TracebackType
from typing import Any, Self

import aiohttp

from tests.soak.case import RESPONSES, Case, Generated, JsonAnswer, Refusal
from tests.soak.client_log import ClientLog, Ending, Entry
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
from tests.soak.state import NUMBER_HEADER

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
