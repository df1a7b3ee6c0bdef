"""Requests against a real socket: what is sent, what is noted, and every way in which one can fail."""

import asyncio
import re
from typing import Any

import pytest
from aiohttp import web

from chairlift.loadtest import BenchConfig
from chairlift.loadtest.client import StreamClient, first_model, open_session
from chairlift.loadtest.summary import BenchError, RequestRecord

from .null_server import (
    DONE,
    Answer,
    NullServer,
    cut_stream,
    event,
    open_stream,
    send_one,
    status,
    stream,
    token,
    usage,
)

pytestmark = pytest.mark.asyncio


def slow_stream(first: bytes, then: bytes | None, seconds: float = 0.02) -> Answer:
    """Something at once and the rest later, or (None) never."""

    async def answer(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        response = await open_stream(request)
        await response.write(first)
        if then is None:
            await asyncio.Event().wait()
        else:
            await asyncio.sleep(seconds)
            await response.write(then)
        return response

    return answer


async def hang_up(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    """End the connection without an answer."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def test_a_request_that_succeeds(server: NullServer) -> None:
    record = await send_one(server.url)
    assert record.failure is None
    assert (record.index, record.turn, record.intended_at) == (0, 0, 1.5)
    assert (record.asked_prompt_tokens, record.asked_output_tokens) == (5, 4)
    assert len(record.chunk_times) == 4
    assert (record.usage_prompt_tokens, record.usage_output_tokens) == (5, 4)
    assert record.sent_at < record.chunk_times[0]
    assert record.chunk_times == sorted(record.chunk_times)
    assert record.ended_at == record.chunk_times[-1]
    assert record.queue_time == record.sent_at - 1.5


async def test_the_body_of_a_completion(server: NullServer) -> None:
    await send_one(server.url)
    [body] = server.bodies
    prompt = body.pop("prompt")
    assert len(prompt) == 5
    assert all(32 <= token_id < 127 for token_id in prompt)
    assert body == {
        "model": "null",
        "max_tokens": 4,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


async def test_the_body_of_a_chat(server: NullServer) -> None:
    record = await send_one(server.url, endpoint="chat")
    [body] = server.bodies
    [message] = body["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 5
    assert "prompt" not in body
    assert (record.usage_prompt_tokens, record.usage_output_tokens) == (999, 4)


async def test_settings_reach_the_request(server: NullServer) -> None:
    await send_one(server.url, ignore_eos=False, temperature=0.7, api_key="sk-1")
    await send_one(server.url)
    assert "ignore_eos" not in server.bodies[0]
    assert server.bodies[0]["temperature"] == 0.7
    assert server.authorizations == ["Bearer sk-1", None]


async def test_chunks_cut_anywhere_and_comments_between_them(server: NullServer) -> None:
    whole = b": ping\n\n" + token("é") + b": ping\r\n\r\n" + token("b", "stop") + usage(5, 2) + DONE
    server.answer = stream(*(whole[start : start + 9] for start in range(0, len(whole), 9)))
    record = await send_one(server.url)
    assert (record.failure, len(record.chunk_times), record.usage_output_tokens) == (None, 2, 2)


async def test_chunks_are_stamped_as_they_arrive(server: NullServer) -> None:
    server.answer = slow_stream(token(), token("x", "length") + usage(5, 2) + DONE, seconds=0.2)
    record = await send_one(server.url)
    [gap] = record.inter_token_latencies
    assert gap >= 0.1  # less than the pause, since the first may be read late


async def ask_for_model(url: str, **settings: object) -> str:
    config = BenchConfig.model_validate({"url": url} | settings)
    async with open_session(config) as session:
        return await first_model(session, config.url)


async def test_the_model_is_the_first_that_the_server_lists(server: NullServer) -> None:
    server.models = status(200, '{"data": [{"id": "a/b"}, {"id": "c"}]}', "application/json")
    assert await ask_for_model(server.url) == "a/b"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (status(404, "Not Found"), r"HTTP 404 and no list of models \(text/plain\)"),
        (status(200, "<html></html>", "text/html"), r"HTTP 200 and no list of models \(text/html\)"),
        (status(200, '{"data": []}', "application/json"), "HTTP 200 and no list of models"),
        (status(200, "[]", "application/json"), "HTTP 200 and no list of models"),
        (status(401, "{}"), "HTTP 401: give the server's --api-key"),
        (slow_stream(b"{", None), "/v1/models did not answer in time"),
    ],
)
async def test_a_server_that_lists_no_models(server: NullServer, answer: Answer, said: str) -> None:
    server.models = answer
    with pytest.raises(BenchError, match=said):
        await ask_for_model(server.url, timeout=0.05 if "in time" in said else 600)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://a..b", "http://host:99999", "http://127.0.0.1:0"])
async def test_a_place_where_nobody_can_listen(url: str) -> None:
    record = await send_one(url)
    assert record.failure is not None
    assert record.failure.label == "connection failed"
    assert record.ended_at >= record.sent_at
    with pytest.raises(BenchError, match=f"cannot reach {re.escape(url)}: "):
        await ask_for_model(url)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (hang_up, "connection failed: "),
        (status(404, "404: Not Found"), "HTTP 404: 404: Not Found"),
        (status(500, ""), "HTTP 500"),
        (status(500, '{"error": {"message": "the engine died"}}'), "HTTP 500: the engine died"),
        (status(503, '{"detail": "queue is full"}'), "HTTP 503: queue is full"),
        (status(400, "<html>\n<body>bad</body>\n</html>"), "HTTP 400: <html> <body>bad</body> </html>"),
        (
            status(422, '{"error": {"message": "unknown field: ignore_eos"}}'),
            "HTTP 422: this server does not take ignore_eos: give --no-ignore-eos (unknown field: ignore_eos)",
        ),
        (status(200, "<html>Hi</html>", "text/html"), "not an event stream: text/html: <html>Hi</html>"),
        (stream(token(), token()), "incomplete stream: ended after 2 chunks with neither finish reason nor [DONE]"),
        (stream(token(), token()[:-9]), "incomplete stream: ended after 1 chunks with neither finish reason"),
        (stream(), "incomplete stream: ended after 0 chunks with neither finish reason nor [DONE]"),
        (stream(DONE), "incomplete stream: ended without a single token"),
        (cut_stream(token(), token()), "incomplete stream: "),
        (stream(token(), event(error={"message": "out of memory"}), DONE), "error in stream: out of memory"),
        (stream(token(), b"data: {oops\n\n", DONE), "malformed chunk: '{oops' ("),
    ],
)
async def test_each_failure_is_told_by_its_kind_and_what_was_said(
    server: NullServer, answer: Answer, said: str
) -> None:
    server.answer = answer
    record = await send_one(server.url)
    assert str(record.failure).startswith(said)


async def test_a_timeout_in_the_middle_of_a_stream(server: NullServer) -> None:
    server.answer = slow_stream(token(), None)
    record = await send_one(server.url, timeout=0.05)
    assert str(record.failure) == "timeout: no complete reply within 0.05 s"
    assert len(record.chunk_times) == 1
    assert record.ended_at - record.sent_at >= 0.04


async def test_a_session_can_send_again_after_a_failure(server: NullServer) -> None:
    config = BenchConfig(url=server.url, num_requests=2, warmup=0, output_tokens=2).resolved("null")
    body = b'{"prompt": [40], "max_tokens": 2}'
    well_behaved, server.answer = server.answer, cut_stream(token())
    bad, good = RequestRecord(0, 0.0), RequestRecord(1, 0.0)
    async with open_session(config) as session:
        client = StreamClient(session, config.endpoint_url)
        await client.send(bad, body)
        server.answer = well_behaved
        await client.send(good, body)
    assert bad.failure is not None
    assert good.failure is None
