"""Large replies that are not read: shared, limited, and at the cost of those who do not read them."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest
from aiohttp import web

from chairlift.api.errors import error_middleware
from chairlift.api.http.event_stream import PULSE, EventStream, Pulse
from chairlift.api.http.unread import UNREAD, UnreadReplies
from chairlift.errors import ClientTooBusy
from tests.api.conftest import Server, serving_app
from tests.api.fault_support import RawClient, connect, post
from tests.engine.async_support import wait_until

MANY = 2**22  # more than a socket takes
SHARED = b"s" * MANY

pytestmark = pytest.mark.usefixtures("transports")


@dataclass(frozen=True)
class Asked:
    """A client that has read no more of a reply than its head."""

    raw: RawClient
    head: str

    async def body(self) -> str:
        return await self.raw.body(self.head)


@asynccontextmanager
async def asking(max_bytes: int, stalled_s: float) -> AsyncIterator[Callable[[str, str], Awaitable[Asked]]]:
    """A server of large replies; asks it for one of them, as a client with a name, and reads nothing."""

    async def whole(request: web.Request) -> web.Response:
        return web.Response(body=SHARED if request.path == "/shared" else b"o" * MANY)

    async def stream(request: web.Request) -> web.StreamResponse:
        async with EventStream(request) as events:
            await events.send(*(("l" * MANY,) if request.path == "/event" else ("first", "l" * MANY, "last")))
        await events.close()
        return events.response

    unread = UnreadReplies(max_bytes, lambda request: request.headers["Client"], stalled_s)
    app = web.Application(middlewares=[error_middleware, unread.middleware])
    app[UNREAD], app[PULSE] = unread, Pulse()
    app.router.add_get("/shared", whole)
    app.router.add_get("/own", whole)
    app.router.add_get("/stream", stream)
    app.router.add_get("/event", stream)
    async with serving_app(app, client_timeout=600.0) as url, AsyncExitStack() as stack:

        async def ask(client: str, path: str) -> Asked:
            small = socket.socket()
            small.setblocking(False)
            small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw = await stack.enter_async_context(await connect(url, sock=small, limit=4096))
            raw.send(f"GET /{path} HTTP/1.1\r\nHost: here\r\nClient: {client}\r\n\r\n".encode())
            return Asked(raw, await raw.head())

        yield ask


async def test_what_many_are_sent_of_one_reply_stays_in_pieces_and_counts_once(
    transports: list[asyncio.Transport],
) -> None:
    async with asking(2 * MANY, 0.0) as ask:
        clients = [await ask("one", "shared") for _ in range(10)]
        assert [transport.is_closing() for transport in transports] == [False] * 10
        assert max(transport.get_write_buffer_size() for transport in transports) < 2**18
        for client in clients:
            assert (client.head[:15], await client.body()) == ("HTTP/1.1 200 OK", "s" * MANY)


async def test_over_its_share_a_client_loses_the_connection_that_it_does_not_read(
    transports: list[asyncio.Transport],
) -> None:
    async with asking(4 * MANY, 0.0) as ask:
        other = await ask("another", "own")
        await ask("one", "own")
        await ask("one", "own")
        newest = await ask("one", "own")
        assert [transport.is_closing() for transport in transports] == [False, True, False, False]
        for client in (other, newest):
            assert await client.body() == "o" * MANY


async def test_when_all_is_too_much_the_client_with_most_pays(transports: list[asyncio.Transport]) -> None:
    async with asking(6 * MANY, 0.0) as ask:
        for client in ("small", "large", "large", "large", "middle", "middle"):
            await ask(client, "own")
        newest = await ask("new", "own")
        assert [transport.is_closing() for transport in transports] == [False, True, *[False] * 5]
        assert await newest.body() == "o" * MANY


@pytest.mark.parametrize(
    ("max_bytes", "client", "status", "code"),
    [(4 * MANY, "one", 429, "client_too_busy"), (5 * MANY // 2, "two", 503, "server_too_busy")],
)
async def test_a_reply_that_there_is_no_room_for_beside_those_being_read_is_refused(
    max_bytes: int, client: str, status: int, code: str
) -> None:
    async with asking(max_bytes, 600.0) as ask:
        first, second = await ask("one", "own"), await ask("another" if client == "two" else "one", "own")
        for path in ("own", "event"):
            refused = await ask(client, path)
            assert refused.head.startswith(f"HTTP/1.1 {status} ")
            assert code in await refused.body()
        for each in (first, second):
            assert await each.body() == "o" * MANY
        assert await (await ask(client, "own")).body() == "o" * MANY


async def test_a_large_event_is_sent_in_pieces_and_arrives_whole(transports: list[asyncio.Transport]) -> None:
    async with asking(4 * MANY, 0.0) as ask:
        client = await ask("one", "stream")
        assert transports[0].get_write_buffer_size() < 2**18
        assert "".join(await client.raw.read_all()) == "first" + "l" * MANY + "last"


async def test_a_reader_that_leaves_is_not_counted_any_more(transports: list[asyncio.Transport]) -> None:
    async with asking(4 * MANY, 600.0) as ask:
        leaving = [await ask("one", "own") for _ in range(2)]
        for client in leaving:
            client.raw.reset()
        await wait_until(lambda: all(transport.is_closing() for transport in transports), "they have left")
        assert await (await ask("one", "own")).body() == "o" * MANY


async def test_a_stream_whose_end_finds_no_room_says_so_briefly_and_has_one_head(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise ClientTooBusy("too many bytes")

    monkeypatch.setattr(UnreadReplies, "send", refuse)
    scored = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}  # its last event repeats all scores
    body = {"input": "Tell me a story.", "max_output_tokens": 100, "ignore_eos": True, "stream": True, **scored}
    async with await post(server, body, "/v1/responses") as client:
        assert (await client.head()).startswith("HTTP/1.1 200 ")
        *_, last = await client.read_all()
        kind, data = last.rstrip("\n").split("\n")
        assert kind == "event: error"
        assert json.loads(data.removeprefix("data: "))["error"]["code"] == "client_too_busy"
        client.send(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert (await client.head()).startswith("HTTP/1.1 200 ")
