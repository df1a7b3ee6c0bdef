"""Requests on a real socket: what is sent and noted, every way to fail; streams however the network cuts them."""

import asyncio
import json
import re
from typing import Any

import pytest
from aiohttp import web

from chairlift.loadtest import BenchConfig
from chairlift.loadtest.client import StreamedReply, error_message, first_model, open_session
from chairlift.loadtest.summary import BenchError, RequestFailed, RequestRecord
from tests.loadtest.null_server import (
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


# --- streams


def completion(text: str, finish_reason: str | None = None) -> bytes:
    return json.dumps({"choices": [{"text": text, "finish_reason": finish_reason}]}).encode()


def chat(finish_reason: str | None = None, **delta: str) -> bytes:
    return json.dumps({"choices": [{"delta": delta, "finish_reason": finish_reason}]}).encode()


def reply_of(*events: tuple[bytes, float]) -> StreamedReply:
    reply = StreamedReply(RequestRecord(0, 0.0))
    for data, arrived_at in events:
        reply.feed(b"data: %s\n\n" % data, arrived_at)
    return reply


def record_of(*events: tuple[bytes, float]) -> RequestRecord:
    """The record of a stream of these events and times."""
    return reply_of(*events)._record


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 1000])
def test_chunks_are_the_same_however_the_stream_is_cut(size: int, line_end: bytes) -> None:
    lines = (
        b": ping",
        b"",
        b"event: x",
        b"data: " + completion("a"),
        b"id: 7",
        b"",
        b"data:" + completion("b"),
        b"",
        b"",
    )
    stream = line_end.join(lines) + b"data: {cut off"
    reply = StreamedReply(RequestRecord(0, 0.0))
    for start in range(0, len(stream), size):
        reply.feed(stream[start : start + size], 1.0)
    assert reply.texts == ["a", "b"]


@pytest.mark.parametrize(
    ("events", "times", "ended_at"),
    [
        # Every chunk with text counts when it arrived.
        ([(completion("a"), 1.0), (completion("b"), 1.5), (completion("c", "length"), 2.25)], [1.0, 1.5, 2.25], 2.25),
        # An empty text is a token that has nothing to show yet.
        ([(completion(""), 1.0), (completion("é"), 2.0)], [1.0, 2.0], 2.0),
        ([(chat(content=""), 1.0), (chat(content="é"), 2.0)], [1.0, 2.0], 2.0),
        # A last chunk that only tells the reason is no token but the end.
        ([(completion("a"), 1.0), (completion("", "stop"), 3.0)], [1.0], 3.0),
        # It stands for a reply that never showed text.
        ([(completion("", "length"), 2.0)], [2.0], 2.0),
        # A chunk that only announces the role is no token; text beside a role is one.
        ([(chat(role="assistant", content=""), 1.0), (chat(content="a"), 2.0), (chat("stop"), 3.0)], [2.0], 3.0),
        ([(chat(role="assistant", content="a"), 1.0)], [1.0], 1.0),
        # Reasoning counts as content.
        ([(chat(reasoning_content="hm"), 1.0), (chat("stop", content="a"), 2.0)], [1.0, 2.0], 2.0),
        ([(chat(reasoning="hm"), 1.0), (chat("stop", content="a"), 2.0)], [1.0, 2.0], 2.0),
        ([(b'{"error": null, "choices": [{"text": "a"}]}', 1.0)], [1.0], 1.0),
    ],
)
def test_what_is_a_token_and_when_the_reply_ended(
    events: list[tuple[bytes, float]], times: list[float], ended_at: float
) -> None:
    record = record_of(*events)
    assert (record.chunk_times, record.ended_at) == (times, ended_at)


def test_the_text_is_kept_without_reasoning() -> None:
    chunks = (chat(role="assistant", content=""), chat(reasoning="hm"), chat(content="a"), chat("stop", content="b"))
    assert "".join(reply_of(*((chunk, 1.0) for chunk in chunks)).texts) == "ab"
    assert reply_of((completion("c"), 1.0)).texts == ["c"]


def test_usage_is_taken_from_whichever_chunk_has_it_last() -> None:
    first = {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 4, "completion_tokens": 1}}
    final = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 9}}
    record = record_of((json.dumps(first).encode(), 1.0), (json.dumps(final).encode(), 5.0))
    assert (record.usage_prompt_tokens, record.usage_output_tokens) == (4, 9)
    assert (record.chunk_times, record.ended_at) == ([1.0], 1.0)


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        ("null", (None, None, None, None, None)),
        ('{"completion_tokens": 5}', (None, 5, None, None, None)),
        ('{"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}}', (9, None, 7, None, None)),
        ('{"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}', (9, None, 0, None, None)),
        ('{"prompt_tokens": 9, "prompt_tokens_details": null}', (9, None, None, None, None)),
        ('{"completion_tokens_details": {"reasoning_tokens": 3}}', (None, None, None, None, None)),
        ('{"completion_tokens_details": {"accepted_prediction_tokens": 5}}', (None, None, None, 5, None)),
        ('{"completion_tokens_details": {"rejected_prediction_tokens": 2}}', (None, None, None, None, 2)),
    ],
)
def test_usage_is_taken_for_what_it_says(usage: str, counts: tuple[int | None, ...]) -> None:
    record = record_of((f'{{"choices": [], "usage": {usage}}}'.encode(), 2.0))
    told = (record.usage_prompt_tokens, record.usage_output_tokens, record.usage_cached_tokens)
    assert (*told, record.usage_accepted_tokens, record.usage_rejected_tokens) == counts
    assert record.guessed_tokens == (counts[3] or 0) + (counts[4] or 0)


@pytest.mark.parametrize(
    "event",
    [
        b"{",
        b"not json",
        b"\xff\xfe",
        b"3",
        b"null",
        b'["choices"]',
        b'{"choices": 3}',
        b'{"choices": {"text": "a"}}',
        b'{"choices": ["a"]}',
        b'{"choices": [{"delta": "a"}]}',
        b'{"usage": "many"}',
        b'{"usage": {"prompt_tokens": 1, "completion_tokens": "many"}}',
        b'{"usage": {"prompt_tokens": 1, "prompt_tokens_details": "many"}}',
    ],
)
def test_what_is_no_chunk_is_an_error_that_shows_it(event: bytes) -> None:
    with pytest.raises(RequestFailed) as caught:
        record_of((event, 1.0))
    assert caught.value.failure.label == "malformed chunk"
    assert repr(event.decode(errors="replace")) in caught.value.failure.message


@pytest.mark.parametrize("end", [b"[DONE]", completion("", "stop")])
def test_a_done_mark_or_a_finish_reason_completes_a_stream(end: bytes) -> None:
    reply_of((completion("a"), 1.0), (end, 2.0)).require_complete()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "no such model", "type": "x"}}, "no such model"),
        ({"error": "no such model"}, "no such model"),
        ({"error": {"code": 500}}, '{"code": 500}'),
        ({"object": "error", "message": "no such model"}, "no such model"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"detail": [{"loc": ["body"]}]}, '[{"loc": ["body"]}]'),
        ({"surprise": 1}, '{"surprise": 1}'),
        ([1, 2], "[1, 2]"),
        (None, "null"),
    ],
)
def test_the_message_of_an_error_body(body: object, message: str) -> None:
    assert error_message(body) == message
