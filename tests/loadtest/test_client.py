"""Requests on a real socket: what is sent and noted, every way to fail; streams however the network cuts them."""

import re
from typing import Any

import pytest
from aiohttp import web

from chairlift.errors import ServerUnreachable
from chairlift.loadtest import BenchConfig
from chairlift.loadtest.client import StreamedReply, error_message, first_model, open_session
from chairlift.loadtest.records import BenchError, RequestFailed, RequestRecord

from .conftest import DONE, Answer, NullServer, chat_token, event, play_one, status, stream, token, usage


async def hang_up(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    """End the connection without an answer."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def send_one(url: str, **settings: object) -> RequestRecord:
    [record] = await play_one(url, num_requests=1, **settings)
    return record


async def test_the_model_is_the_first_that_the_server_lists(server: NullServer) -> None:
    server.models = status(200, '{"data": [{"id": "a/b"}, {"id": "c"}]}', "application/json")
    assert await ask_for_model(server.url) == "a/b"


async def test_what_is_sent_and_noted_of_a_completion(server: NullServer) -> None:
    record = await send_one(server.url)
    [body] = server.bodies
    prompt = body.pop("prompt")
    assert len(prompt) == 5
    assert all(32 <= token_id < 127 for token_id in prompt)
    fixed = {"model": "null", "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}
    assert body == fixed | {"max_tokens": 4, "ignore_eos": True}
    assert record.failure is None
    assert (record.index, record.turn, record.intended_at) == (0, 0, 1.5)
    assert (record.asked_prompt_tokens, record.asked_output_tokens, len(record.chunk_times)) == (5, 4, 4)
    assert (record.usage_prompt_tokens, record.usage_output_tokens) == (5, 4)
    assert record.sent_at < record.chunk_times[0]
    assert record.chunk_times == sorted(record.chunk_times)
    assert record.ended_at == record.chunk_times[-1]
    assert record.queue_time == record.sent_at - 1.5


async def test_settings_reach_the_request(server: NullServer) -> None:
    await send_one(server.url, ignore_eos=False, temperature=0.7, api_key="sk-1")
    record = await send_one(server.url, endpoint="chat")
    completion, chat = server.bodies
    assert ("ignore_eos" in completion, completion["temperature"]) == (False, 0.7)
    assert server.authorizations == ["Bearer sk-1", None]
    [message] = chat["messages"]
    assert (message["role"], len(message["content"].split()), "prompt" in chat) == ("user", 5, False)
    assert (record.usage_prompt_tokens, record.usage_output_tokens) == (999, 4)


async def test_chunks_are_stamped_as_they_arrive(server: NullServer) -> None:
    server.answer = stream(token(), token("x", "length") + usage(5, 2) + DONE, pause=0.2)
    [gap] = (await send_one(server.url)).inter_token_latencies
    assert gap >= 0.1  # less than the pause, since the first may be read late


async def ask_for_model(url: str, **settings: object) -> str:
    config = BenchConfig.model_validate({"url": url} | settings)
    async with open_session(config) as session:
        return await first_model(session, config.url)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (status(404, "Not Found"), r"HTTP 404 and no list of models \(text/plain\)"),
        (status(200, "<html></html>", "text/html"), r"HTTP 200 and no list of models \(text/html\)"),
        (status(200, '{"data": []}', "application/json"), "HTTP 200 and no list of models"),
        (status(200, "[]", "application/json"), "HTTP 200 and no list of models"),
        (status(401, "{}"), "HTTP 401: give the server's --api-key"),
        (stream(b"{", end="never"), "/v1/models did not answer in time"),
    ],
)
async def test_a_server_that_lists_no_models(server: NullServer, answer: Answer, said: str) -> None:
    server.models = answer
    with pytest.raises(BenchError, match=said):
        await ask_for_model(server.url, timeout=0.05 if "in time" in said else 600)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://a..b", "http://host:99999", "http://127.0.0.1:0"])
async def test_a_place_where_nobody_can_listen(url: str) -> None:
    record = await send_one(url)
    assert str(record.failure).startswith("connection failed: ")
    assert record.ended_at >= record.sent_at
    with pytest.raises(ServerUnreachable, match=rf"no server answers at {re.escape(url)} \("):
        await ask_for_model(url)


REFUSES_FIELD = "this server does not take ignore_eos: give --no-ignore-eos (unknown field: ignore_eos)"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (hang_up, "connection failed: "),
        (status(404, "404: Not Found"), "HTTP 404: 404: Not Found"),
        (status(500, ""), "HTTP 500"),
        (status(500, '{"error": {"message": "the engine died"}}'), "HTTP 500: the engine died"),
        (status(503, '{"detail": "queue is full"}'), "HTTP 503: queue is full"),
        (status(400, "<html>\n<body>bad</body>\n</html>"), "HTTP 400: <html> <body>bad</body> </html>"),
        (status(422, '{"error": {"message": "unknown field: ignore_eos"}}'), f"HTTP 422: {REFUSES_FIELD}"),
        (status(200, "<html>Hi</html>", "text/html"), "not an event stream: text/html: <html>Hi</html>"),
        (stream(token(), token()), "incomplete stream: ended after 2 chunks with neither finish reason nor [DONE]"),
        (stream(token(), token()[:-9]), "incomplete stream: ended after 1 chunks with neither finish reason"),
        (stream(), "incomplete stream: ended after 0 chunks with neither finish reason nor [DONE]"),
        (stream(DONE), "incomplete stream: ended without a single token"),
        (stream(token(), token(), end="cut"), "incomplete stream: "),
        (stream(token(), event(error={"message": "out of memory"}), DONE), "error in stream: out of memory"),
        (stream(token(), b"data: {oops\n\n", DONE), "malformed chunk: '{oops' ("),
    ],
)
async def test_each_failure_is_told_by_its_kind_and_what_was_said(
    server: NullServer, answer: Answer, said: str
) -> None:
    server.answer = answer
    assert str((await send_one(server.url)).failure).startswith(said)


async def test_a_timeout_in_the_middle_of_a_stream(server: NullServer) -> None:
    server.answer = stream(token(), end="never")
    record = await send_one(server.url, timeout=0.5)  # in which the first chunk arrives on a busy machine, too
    assert str(record.failure) == "timeout: no complete reply within 0.5 s"
    assert len(record.chunk_times) == 1
    assert record.ended_at - record.sent_at >= 0.4


def reply_of(*events: tuple[bytes, float]) -> tuple[StreamedReply, RequestRecord]:
    """A stream of these events, each at its time."""
    record = RequestRecord(0, 0.0)
    reply = StreamedReply(record)
    for data, arrived_at in events:
        reply.feed(data, arrived_at)
    return reply, record


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 1000])
def test_chunks_are_the_same_however_the_stream_is_cut(size: int, line_end: bytes) -> None:
    first, second = token("a").strip(), token("b").strip().replace(b": ", b":", 1)
    lines = (b": ping", b"", b"event: x", first, b"id: 7", b"", second, b"", b"")
    sent = line_end.join(lines) + b"data: {cut off"
    reply, _ = reply_of(*((sent[start : start + size], 1.0) for start in range(0, len(sent), size)))
    assert reply.texts == ["a", "b"]


@pytest.mark.parametrize(
    ("events", "times", "ended_at"),
    [
        # Every chunk with text counts when it arrived.
        ([(token("a"), 1.0), (token("b"), 1.5), (token("c", "length"), 2.25)], [1.0, 1.5, 2.25], 2.25),
        # An empty text is a token that has nothing to show yet.
        ([(token(""), 1.0), (token("é"), 2.0)], [1.0, 2.0], 2.0),
        ([(chat_token(content=""), 1.0), (chat_token(content="é"), 2.0)], [1.0, 2.0], 2.0),
        # A last chunk that only tells the reason is no token but the end.
        ([(token("a"), 1.0), (token("", "stop"), 3.0)], [1.0], 3.0),
        # It stands for a reply that never showed text.
        ([(token("", "length"), 2.0)], [2.0], 2.0),
        # A chunk that only announces the role is no token; text beside a role is one.
        ([(chat_token(role="assistant", content=""), 1.0), (chat_token(content="a"), 2.0)], [2.0], 2.0),
        ([(chat_token(role="assistant", content="a"), 1.0), (chat_token("stop"), 3.0)], [1.0], 3.0),
        # Reasoning counts as content.
        ([(chat_token(reasoning_content="hm"), 1.0), (chat_token("stop", content="a"), 2.0)], [1.0, 2.0], 2.0),
        ([(chat_token(reasoning="hm"), 1.0), (chat_token("stop", content="a"), 2.0)], [1.0, 2.0], 2.0),
        ([(b'data: {"error": null, "choices": [{"text": "a"}]}\n\n', 1.0)], [1.0], 1.0),
    ],
)
def test_what_is_a_token_and_when_the_reply_ended(
    events: list[tuple[bytes, float]], times: list[float], ended_at: float
) -> None:
    _, record = reply_of(*events)
    assert (record.chunk_times, record.ended_at) == (times, ended_at)


def test_the_text_is_kept_without_reasoning() -> None:
    deltas = [{"role": "assistant", "content": ""}, {"reasoning": "hm"}, {"content": "a"}, {"content": "b"}]
    reply, _ = reply_of(*((chat_token(**delta), 1.0) for delta in deltas))
    assert "".join(reply.texts) == "ab"


def test_usage_is_taken_from_whichever_chunk_has_it_last() -> None:
    counts = [{"prompt_tokens": 4, "completion_tokens": count} for count in (1, 9)]
    chunks = [event(choices=[{"text": "a"}], usage=counts[0]), event(choices=[], usage=counts[1])]
    _, record = reply_of((chunks[0], 1.0), (chunks[1], 5.0))
    assert (record.usage_prompt_tokens, record.usage_output_tokens) == (4, 9)
    assert (record.chunk_times, record.ended_at) == ([1.0], 1.0)


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        (None, (None, None, None, None, None)),
        ({"completion_tokens": 5}, (None, 5, None, None, None)),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}}, (9, None, 7, None, None)),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}, (9, None, 0, None, None)),
        ({"prompt_tokens": 9, "prompt_tokens_details": None}, (9, None, None, None, None)),
        ({"completion_tokens_details": {"reasoning_tokens": 3}}, (None, None, None, None, None)),
        ({"completion_tokens_details": {"accepted_prediction_tokens": 5}}, (None, None, None, 5, None)),
        ({"completion_tokens_details": {"rejected_prediction_tokens": 2}}, (None, None, None, None, 2)),
    ],
)
def test_usage_is_taken_for_what_it_says(usage: object, counts: tuple[int | None, ...]) -> None:
    _, record = reply_of((event(choices=[], usage=usage), 2.0))
    told = (record.usage_prompt_tokens, record.usage_output_tokens, record.usage_cached_tokens)
    assert (*told, record.usage_accepted_tokens, record.usage_rejected_tokens) == counts
    assert record.guessed_tokens == (counts[3] or 0) + (counts[4] or 0)


NO_CHUNKS = [b"{", b"not json", b"\xff\xfe", b"3", b"null", b'["choices"]', b'{"choices": 3}', b'{"choices": ["a"]}']
NO_CHUNKS += [b'{"choices": {"text": "a"}}', b'{"choices": [{"delta": "a"}]}', b'{"usage": "many"}']
NO_CHUNKS += [b'{"usage": {"prompt_tokens": 1, "completion_tokens": "many"}}']
NO_CHUNKS += [b'{"usage": {"prompt_tokens": 1, "prompt_tokens_details": "many"}}']


@pytest.mark.parametrize("data", NO_CHUNKS)
def test_what_is_no_chunk_is_an_error_that_shows_it(data: bytes) -> None:
    with pytest.raises(RequestFailed) as caught:
        reply_of((b"data: %s\n\n" % data, 1.0))
    assert caught.value.failure.label == "malformed chunk"
    assert repr(data.decode(errors="replace")) in caught.value.failure.message


@pytest.mark.parametrize("end", [DONE, token("", "stop")])
def test_a_done_mark_or_a_finish_reason_completes_a_stream(end: bytes) -> None:
    reply_of((token("a"), 1.0), (end, 2.0))[0].require_complete()


def test_the_message_of_an_error_body() -> None:
    bodies: list[Any] = [{"error": {"message": "no", "type": "x"}}, {"error": "no"}, {"error": {"code": 500}}]
    bodies += [{"object": "error", "message": "no"}, {"detail": "no"}, {"detail": [{"loc": ["body"]}]}]
    messages = ["no", "no", '{"code": 500}', "no", "no", '[{"loc": ["body"]}]']
    assert [error_message(body) for body in bodies] == messages
    assert [error_message(body) for body in ({"surprise": 1}, [1, 2], None)] == ['{"surprise": 1}', "[1, 2]", "null"]
