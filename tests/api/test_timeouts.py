"""Clients that take too long, on raw sockets; and that those who do not are left alone."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from chairlift.api.errors import error_middleware
from chairlift.api.http.bodies import BodyReader
from tests.api.conftest import in_loop, serving_app
from tests.api.fault_support import connect

SHORT = 0.2
LONG = 30.0  # a test that had to wait for this would fail
PATIENT = 1.0  # for what must come in time, also on a busy machine
HEADERS = b"GET / HTTP/1.1\r\nHost: here\r\n"
GET = HEADERS + b"\r\n"
OK = "HTTP/1.1 200 OK\r\n"
POST_HEADERS = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
POST = POST_HEADERS + b"Content-Length: %d\r\n\r\n"
LEISURE = 3.0  # for reading a flood in the process that writes it
FLOOD = 32 * 2**20  # more than sockets buffer
READER = BodyReader(max_bytes=100, timeout_s=SHORT)


async def echo(request: web.Request) -> web.Response:
    if request.method == "GET":
        return web.Response()
    return web.Response(body=(await READER.read(request, "somebody")).data)


async def slow(_: web.Request) -> web.Response:
    await asyncio.sleep(2 * SHORT)
    return web.Response(text="slow")


async def flood(_: web.Request) -> web.Response:
    return web.Response(body=bytes(FLOOD))


@asynccontextmanager
async def listening(**times: float) -> AsyncIterator[str]:
    """A small server with a connection's production timers, each long but for those that are named; its address."""
    app = web.Application(middlewares=[error_middleware])
    app.router.add_route("*", "/", echo)
    app.router.add_get("/slow", slow)
    app.router.add_get("/flood", flood)
    async with serving_app(app, **{"client_timeout": LONG, "idle_timeout": LONG, **times}) as url:
        yield url


@in_loop
async def impatient() -> AsyncIterator[str]:
    """The address of a server that waits for headers, for a short time only."""
    async with listening(client_timeout=SHORT) as url:
        yield url


@pytest.mark.parametrize(
    ("timeout", "sent"),
    [
        ("client_timeout", []),  # a connection that says nothing
        ("client_timeout", [HEADERS]),
        ("client_timeout", [GET, GET, HEADERS]),
        ("idle_timeout", [GET, GET]),  # silence after two requests
        ("idle_timeout", [GET + HEADERS]),
    ],
)
async def test_silence_and_headers_that_stay_incomplete_end_the_connection(timeout: str, sent: list[bytes]) -> None:
    async with listening(**{timeout: SHORT}) as url, await connect(url) as client:
        for data in sent:
            client.send(data)
            if data.startswith(GET):
                await client.answer()
        assert SHORT / 2 < await client.seconds_until_closed() < LONG / 2


@pytest.mark.parametrize("num_before", [0, 1])
async def test_sending_headers_byte_by_byte_does_not_prolong_the_time_for_them(impatient: str, num_before: int) -> None:
    async with await connect(impatient) as client:
        for _ in range(num_before):
            client.send(GET)
            await client.answer()

        async def trickle() -> None:
            client.send(HEADERS + b"X: ")
            while True:
                client.send(b"a")
                await asyncio.sleep(SHORT / 10)

        trickling = asyncio.create_task(trickle())
        assert await client.seconds_until_closed() < LONG / 2
        trickling.cancel()


async def test_headers_in_pieces_that_come_in_time_are_served() -> None:
    """Together the three requests take longer than the headers of one may."""
    async with listening(client_timeout=PATIENT) as url, await connect(url) as client:
        for _ in range(3):
            for piece in (HEADERS[:9], HEADERS[9:], b"\r\n"):
                client.send(piece)
                await asyncio.sleep(PATIENT / 6)
            assert (await client.answer())[0].startswith(OK)


async def test_the_header_timer_does_not_run_while_a_request_is_worked_on_or_between_two(impatient: str) -> None:
    async with await connect(impatient) as client:
        for _ in range(2):
            client.send(b"GET /slow HTTP/1.1\r\nHost: here\r\n\r\n")  # takes longer than headers may
            assert (await client.answer())[1] == "slow"
        await asyncio.sleep(1.5 * SHORT)
        client.send(GET)
        assert (await client.answer())[0].startswith(OK)


async def test_pipelined_requests_are_answered_in_order(impatient: str) -> None:
    async with await connect(impatient) as client:
        client.send(b"GET /slow HTTP/1.1\r\nHost: here\r\n\r\n" + POST % 3 + b"one" + POST % 3 + b"two" + HEADERS)
        client.send(b"\r\n")
        assert [(await client.answer())[1] for _ in range(4)] == ["slow", "one", "two", ""]


async def test_a_long_pipeline_is_served_with_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.api.http.connections._PAUSE_S", 3600.0)
    async with listening() as url, await connect(url) as client, await connect(url) as other:
        client.send(GET * 17)
        for _ in range(16):
            await client.answer()
        other.send(GET)
        assert (await other.answer())[0].startswith(OK)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.answer(), SHORT)


async def test_the_idle_timer_does_not_run_once_a_request_has_begun() -> None:
    async with listening(idle_timeout=PATIENT / 2) as url, await connect(url) as client:
        await asyncio.sleep(0.75 * PATIENT)  # the first request has the header time
        client.send(GET)
        await client.answer()
        client.send(HEADERS)
        await asyncio.sleep(0.75 * PATIENT)
        client.send(b"\r\n")
        assert (await client.answer())[0].startswith(OK)


@pytest.mark.parametrize("sent", [b"", b"only a part"])
async def test_a_body_that_does_not_come_is_a_408_and_the_end_of_the_connection(sent: bytes) -> None:
    async with listening() as url, await connect(url) as client:
        client.send(POST % 50 + sent)
        head, body = await client.answer()
        assert head.startswith("HTTP/1.1 408 Request Timeout\r\n")
        assert "\r\nConnection: close\r\n" in head
        error = {"message": "the body did not come within 0.2 s", "type": "invalid_request_error"}
        assert json.loads(body)["error"] == {**error, "param": None, "code": None}
        assert await client.seconds_until_closed() < LONG / 2


@pytest.mark.parametrize("sent", [POST % 101, POST_HEADERS + b"Transfer-Encoding: chunked\r\n\r\n65\r\n" + b"a" * 101])
async def test_a_body_that_says_or_turns_out_to_be_too_large_is_refused_before_it_is_whole(sent: bytes) -> None:
    async with listening() as url, await connect(url) as client:
        client.send(sent)
        head, body = await client.answer()
        assert head.startswith("HTTP/1.1 413 ")
        assert json.loads(body)["error"]["message"].startswith("the body is too large: Maximum request body size 100")


async def test_a_body_of_just_the_limit_is_taken_and_the_connection_goes_on() -> None:
    async with listening() as url, await connect(url) as client:
        for _ in range(2):
            client.send(POST % 100 + b"a" * 100)
            assert (await client.answer())[1] == "a" * 100


async def test_a_client_that_reads_again_in_time_gets_everything_and_may_go_on() -> None:
    async with listening(client_timeout=LEISURE) as url, await connect(url) as client:
        client.send(b"GET /flood HTTP/1.1\r\nHost: here\r\n\r\n")
        await asyncio.sleep(SHORT)
        assert len((await client.answer())[1]) == FLOOD
        await asyncio.sleep(LEISURE + SHORT)
        client.send(GET)
        assert (await client.answer())[0].startswith(OK)
