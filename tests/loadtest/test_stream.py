"""What counts as a token, what as the end, and what as an error in a stream, however the network cuts it."""

import json

import pytest

from chairlift.loadtest.client import StreamedReply, error_message
from chairlift.loadtest.summary import RequestFailed, RequestRecord


def completion(text: str, finish_reason: str | None = None) -> bytes:
    return json.dumps({"choices": [{"text": text, "finish_reason": finish_reason}]}).encode()


def chat(finish_reason: str | None = None, **delta: str) -> bytes:
    return json.dumps({"choices": [{"delta": delta, "finish_reason": finish_reason}]}).encode()


def reply_of(*events: tuple[bytes, float]) -> StreamedReply:
    reply = StreamedReply(RequestRecord(0, 0.0))
    for event, arrived_at in events:
        reply.feed(b"data: %s\n\n" % event, arrived_at)
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
        (b"null", (None, None, None)),
        (b'{"completion_tokens": 5}', (None, 5, None)),
        (b'{"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}}', (9, None, 7)),
        (b'{"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}', (9, None, 0)),
        (b'{"prompt_tokens": 9, "prompt_tokens_details": null}', (9, None, None)),
    ],
)
def test_usage_is_taken_for_what_it_says(usage: bytes, counts: tuple[int | None, ...]) -> None:
    record = record_of((b'{"choices": [], "usage": %s}' % usage, 2.0))
    assert (record.usage_prompt_tokens, record.usage_output_tokens, record.usage_cached_tokens) == counts


@pytest.mark.parametrize(
    ("details", "counts"),
    [
        (b"null", (None, None, 0)),
        (b'{"reasoning_tokens": 3}', (None, None, 0)),
        (b'{"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 2}', (5, 2, 7)),
        (b'{"accepted_prediction_tokens": 5}', (5, None, 5)),
    ],
)
def test_usage_tells_what_the_server_guessed(details: bytes, counts: tuple[int | None, ...]) -> None:
    record = record_of((b'{"choices": [], "usage": {"completion_tokens_details": %s}}' % details, 2.0))
    assert (record.usage_accepted_tokens, record.usage_rejected_tokens, record.guessed_tokens) == counts


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


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (b'{"error": {"message": "out of memory", "code": 500}}', "out of memory"),
        (b'{"error": "out of memory"}', "out of memory"),
        (b'{"error": {"code": 500}}', '{"code": 500}'),
    ],
)
def test_an_error_object_in_the_stream_is_an_error(event: bytes, said: str) -> None:
    with pytest.raises(RequestFailed) as caught:
        record_of((completion("a"), 1.0), (event, 2.0))
    assert caught.value.failure.label == "error in stream"
    assert caught.value.failure.message == said


@pytest.mark.parametrize("end", [b"[DONE]", completion("", "stop")])
def test_a_done_mark_or_a_finish_reason_completes_a_stream(end: bytes) -> None:
    reply_of((completion("a"), 1.0), (end, 2.0)).require_complete()


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([completion("a"), completion("b")], "ended after 2 chunks with neither finish reason nor [DONE]"),
        ([b"[DONE]"], "ended without a single token"),
    ],
)
def test_a_stream_without_an_end_or_a_token_is_incomplete(events: list[bytes], said: str) -> None:
    with pytest.raises(RequestFailed) as caught:
        reply_of(*((event, 1.0) for event in events)).require_complete()
    assert str(caught.value.failure) == f"incomplete stream: {said}"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "no such model", "type": "x"}}, "no such model"),
        ({"error": "no such model"}, "no such model"),
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
