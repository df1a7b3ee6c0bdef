"""What counts as a token, what as the end, and what as an error in a stream."""

import json

import pytest

from chairlift.bench.failures import FailureKind, RequestFailed
from chairlift.bench.tally import StreamTally, error_message


def completion(text: str, finish_reason: str | None = None) -> bytes:
    return json.dumps({"choices": [{"text": text, "finish_reason": finish_reason}]}).encode()


def chat(finish_reason: str | None = None, **delta: str) -> bytes:
    return json.dumps({"choices": [{"delta": delta, "finish_reason": finish_reason}]}).encode()


def tally_of(*events: tuple[bytes, float]) -> StreamTally:
    tally = StreamTally()
    for event, arrived_at in events:
        tally.take(event, arrived_at)
    return tally


def test_every_chunk_with_text_is_counted_when_it_arrived() -> None:
    tally = tally_of((completion("a"), 1.0), (completion("b"), 1.5), (completion("c", "length"), 2.25))
    assert tally.chunk_times == [1.0, 1.5, 2.25]
    assert tally.last_choice_at == 2.25


def test_an_empty_text_is_a_token_that_has_nothing_to_show_yet() -> None:
    assert tally_of((completion(""), 1.0), (completion("é"), 2.0)).chunk_times == [1.0, 2.0]
    assert tally_of((chat(content=""), 1.0), (chat(content="é"), 2.0)).chunk_times == [1.0, 2.0]


def test_a_last_chunk_that_only_tells_the_reason_is_no_token_but_the_end() -> None:
    tally = tally_of((completion("a"), 1.0), (completion("", "stop"), 3.0))
    assert tally.chunk_times == [1.0]
    assert tally.last_choice_at == 3.0


def test_the_last_chunk_stands_for_a_reply_that_never_showed_text() -> None:
    tally = tally_of((completion("", "length"), 2.0))
    assert tally.chunk_times == [2.0]


def test_the_chunk_that_only_announces_the_role_is_no_token() -> None:
    tally = tally_of((chat(role="assistant", content=""), 1.0), (chat(content="a"), 2.0), (chat("stop"), 3.0))
    assert tally.chunk_times == [2.0]
    assert tally.last_choice_at == 3.0


def test_text_beside_a_role_is_a_token() -> None:
    assert tally_of((chat(role="assistant", content="a"), 1.0)).chunk_times == [1.0]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_counts_as_content(field: str) -> None:
    assert tally_of((chat(**{field: "hm"}), 1.0), (chat("stop", content="a"), 2.0)).chunk_times == [1.0, 2.0]


def test_the_text_is_kept_where_it_is_wanted() -> None:
    tally = StreamTally(keeps_text=True)
    for chunk in (
        chat(role="assistant", content=""),
        chat(reasoning="hm"),
        chat(content="a"),
        chat("stop", content="b"),
    ):
        tally.take(chunk, 1.0)
    assert tally.text == "ab"
    completions = StreamTally(keeps_text=True)
    completions.take(completion("c"), 1.0)
    assert completions.text == "c"
    assert tally_of((chat(content="a"), 1.0)).text == ""


def test_usage_is_taken_from_whichever_chunk_has_it_last() -> None:
    first = {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 4, "completion_tokens": 1}}
    final = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 9}}
    tally = tally_of((json.dumps(first).encode(), 1.0), (json.dumps(final).encode(), 5.0))
    assert (tally.prompt_tokens, tally.output_tokens) == (4, 9)
    assert (tally.chunk_times, tally.last_choice_at) == ([1.0], 1.0)


def test_without_usage_there_are_no_server_side_counts() -> None:
    tally = tally_of((completion("a", "length"), 1.0), (b'{"choices": [], "usage": null}', 2.0))
    assert (tally.prompt_tokens, tally.output_tokens) == (None, None)


def test_cached_tokens_are_a_detail_of_the_prompt_s() -> None:
    usage = b'{"usage": {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": %s}}'
    assert tally_of((usage % b'{"cached_tokens": 7}', 2.0)).cached_tokens == 7
    assert tally_of((usage % b'{"cached_tokens": 0}', 2.0)).cached_tokens == 0
    assert tally_of((usage % b"null", 2.0)).cached_tokens is None


def test_half_a_usage_is_taken_for_what_it_says() -> None:
    tally = tally_of((b'{"usage": {"completion_tokens": 5}}', 2.0))
    assert (tally.prompt_tokens, tally.output_tokens) == (None, 5)


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
        StreamTally().take(event, 1.0)
    assert caught.value.failure.kind is FailureKind.MALFORMED_CHUNK
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
        tally_of((completion("a"), 1.0), (event, 2.0))
    assert caught.value.failure.kind is FailureKind.STREAM_ERROR
    assert caught.value.failure.message == said


def test_a_null_error_is_none() -> None:
    assert tally_of((b'{"error": null, "choices": [{"text": "a"}]}', 1.0)).chunk_times == [1.0]


@pytest.mark.parametrize("end", [b"[DONE]", completion("", "stop")])
def test_a_done_mark_or_a_finish_reason_completes_a_stream(end: bytes) -> None:
    tally_of((completion("a"), 1.0), (end, 2.0)).require_complete()


def test_a_stream_without_an_end_is_incomplete() -> None:
    tally = tally_of((completion("a"), 1.0), (completion("b"), 2.0))
    with pytest.raises(RequestFailed) as caught:
        tally.require_complete()
    assert str(caught.value.failure) == (
        "incomplete stream: ended after 2 chunks with neither finish reason nor [DONE]"
    )


def test_a_stream_without_a_token_is_incomplete_even_if_done() -> None:
    with pytest.raises(RequestFailed) as caught:
        tally_of((b"[DONE]", 1.0)).require_complete()
    assert str(caught.value.failure) == "incomplete stream: ended without a single token"


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
