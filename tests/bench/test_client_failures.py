"""Every way in which one request can fail, against a real socket."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from chairlift.bench import BenchConfig
from chairlift.bench.client import Request, StreamClient, open_session
from chairlift.bench.failures import FailureKind

from .null_server import (
    DONE,
    Answer,
    NullServer,
    cut_stream,
    event,
    open_stream,
    status,
    stream,
    token,
)
from .one_request import send_one


async def failure_of(url: str, **settings: object) -> str:
    """Send one request that must fail, and say how it did."""
    record = await send_one(url, **settings)
    assert record.failure is not None
    return str(record.failure)


@pytest.mark.asyncio
async def test_nobody_listens(dead_url: str) -> None:
    record = await send_one(dead_url)
    assert record.failure is not None
    assert record.failure.kind is FailureKind.CONNECTION
    assert record.ended_at >= record.sent_at


@pytest.mark.asyncio
async def test_a_server_that_hangs_up_before_it_answers(server: NullServer) -> None:
    async def answer(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    server.answer = answer
    assert (await failure_of(server.url)).startswith("connection failed: ")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("code", "text", "said"),
    [
        (404, "404: Not Found", "HTTP 404: 404: Not Found"),
        (500, "", "HTTP 500"),
        (500, '{"error": {"message": "the engine died"}}', "HTTP 500: the engine died"),
        (503, '{"detail": "queue is full"}', "HTTP 503: queue is full"),
        (400, "<html>\n<body>bad</body>\n</html>", "HTTP 400: <html> <body>bad</body> </html>"),
    ],
)
async def test_http_errors_keep_status_and_message(
    server: NullServer,
    code: int,
    text: str,
    said: str,
) -> None:
    server.answer = status(code, text)
    assert await failure_of(server.url) == said


@pytest.mark.asyncio
@pytest.mark.parametrize("code", [400, 422])
async def test_a_server_that_refuses_ignore_eos_gets_the_flag_named(server: NullServer, code: int) -> None:
    server.answer = status(code, '{"error": {"message": "unknown field: ignore_eos"}}')
    assert await failure_of(server.url) == (
        f"HTTP {code}: this server does not take ignore_eos: give --no-ignore-eos (unknown field: ignore_eos)"
    )


@pytest.mark.asyncio
async def test_a_page_is_no_stream(server: NullServer) -> None:
    server.answer = status(200, "<html>Welcome</html>", "text/html")
    assert await failure_of(server.url) == "not an event stream: text/html: <html>Welcome</html>"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (stream(token(), token()), "ended after 2 chunks with neither finish reason nor [DONE]"),
        (stream(token(), token()[:-9]), "ended after 1 chunks with neither finish reason nor [DONE]"),
        (stream(), "ended after 0 chunks with neither finish reason nor [DONE]"),
        (stream(DONE), "ended without a single token"),
        (cut_stream(token(), token()), "not completed"),
        (cut_stream(token(), token()[:-9]), "not completed"),
    ],
)
async def test_half_a_stream_is_incomplete(server: NullServer, answer: Answer, said: str) -> None:
    server.answer = answer
    message = await failure_of(server.url)
    assert message.startswith("incomplete stream: ")
    assert said in message


@pytest.mark.asyncio
async def test_an_error_in_the_stream(server: NullServer) -> None:
    server.answer = stream(token(), event(error={"message": "out of memory"}), DONE)
    assert await failure_of(server.url) == "error in stream: out of memory"


@pytest.mark.asyncio
async def test_a_malformed_chunk(server: NullServer) -> None:
    server.answer = stream(token(), b"data: {oops\n\n", DONE)
    assert (await failure_of(server.url)).startswith("malformed chunk: '{oops' (")


@pytest.mark.asyncio
async def test_a_timeout_in_the_middle_of_a_stream(server: NullServer) -> None:
    async def answer(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        response = await open_stream(request)
        await response.write(token())
        await asyncio.Event().wait()
        return response

    server.answer = answer
    record = await send_one(server.url, timeout=0.05)
    assert str(record.failure) == "timeout: no complete reply within 0.05 s"
    assert len(record.chunk_times) == 1
    assert record.ended_at - record.sent_at >= 0.04


@pytest.mark.asyncio
async def test_a_session_can_send_again_after_a_failure(server: NullServer) -> None:
    config = BenchConfig(url=server.url, num_requests=2, warmup=0, output_tokens=2).resolved("null")
    body = b'{"prompt": [40], "max_tokens": 2}'
    well_behaved = server.answer
    async with open_session(config) as session:
        client = StreamClient(session, config.endpoint_url)
        server.answer = cut_stream(token())
        bad = await client.send(Request(0, body), 0.0)
        server.answer = well_behaved
        good = await client.send(Request(1, body), 0.0)
    assert bad.record.failure is not None
    assert good.record.failure is None
