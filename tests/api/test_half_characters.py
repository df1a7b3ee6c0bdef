"""Half a surrogate pair and bytes that are no text, in what clients send: they break no reply and end no stream."""

import json
from typing import Any

import pytest

from chairlift.api.replies.reply import Reply
from chairlift.params import FinishReason
from tests.api.conftest import Server, serving
from tests.api.contract import CHAT, COMPLETIONS, MESSAGES, RESPONSES, user
from tests.api.fault_support import connect, post

STOP = FinishReason.STOP


async def send(server: Server, path: str, body: bytes, *headers: bytes) -> tuple[str, Any]:
    """The status, and the reply."""
    head = [f"POST {path} HTTP/1.1".encode(), b"Host: 127.0.0.1", b"Content-Length: %d" % len(body), *headers]
    if not any(header.startswith(b"Content-Type") for header in headers):
        head.append(b"Content-Type: application/json")
    async with await connect(server.url) as client:
        client.send(b"\r\n".join(head) + b"\r\n\r\n" + body)
        reply, text = await client.answer()
        return reply.split()[1], json.loads(text)


HALVES: list[tuple[str, bytes]] = [
    (CHAT, rb'{"messages": [{"role": "user", "name": "\ud83d", "content": "\ude00"}], "max_tokens": 1}'),
    (CHAT, rb'{"messages": [{"role": "user", "content": "a"}], "stop": ["\ud83d"], "user": "\ud83d", "max_tokens": 1}'),
    (CHAT, rb'{"messages": [{"role": "user", "content": "a"}], "metadata": {"\ud83d": "\ud83d"}, "max_tokens": 1}'),
    (RESPONSES, rb'{"input": "\ud83d", "instructions": "\ud83dx", "max_output_tokens": 1, "store": true}'),
    (MESSAGES, rb'{"messages": [{"role": "user", "content": "a\ud83d"}], "system": "\ud83d", "max_tokens": 1}'),
    (
        MESSAGES,
        rb'{"messages": [{"role": "user", "content": "a"}], "metadata": {"user_id": "\ud83d"}, "max_tokens": 1}',
    ),
    (COMPLETIONS, rb'{"prompt": "a\ud83d\n", "echo": true, "max_tokens": 1}'),
]


@pytest.mark.parametrize(("path", "body"), HALVES)
async def test_a_half_pair_is_a_replacement_character_wherever_it_stands(
    server: Server, path: str, body: bytes
) -> None:
    status, reply = await send(server, path, body)
    assert status == "200", reply


async def test_whole_pairs_and_escaped_backslashes_stay_what_they_are(server: Server) -> None:
    body = (
        rb'{"prompt": "\ud83d \\ud83d \\\ud83d \ud83d\ude00 \uD83D\uDE00\ude00 \u00e9", "echo": true, "max_tokens": 0}'
    )
    status, reply = await send(server, COMPLETIONS, body)
    assert status == "200"
    assert reply["choices"][0]["text"] == "\ufffd \\ud83d \\\ufffd \U0001f600 \U0001f600\ufffd é"


async def test_errors_tell_of_them_as_well(server: Server) -> None:
    status, reply = await send(server, CHAT, rb'{"messages": [], "model": "\ud83d"}')
    assert (status, reply["error"]["message"]) == ("404", "there is no model '\ufffd' here, only 'bundled'")
    status, reply = await send(server, CHAT, rb'{"messages": [], "\ud83d": 1}')
    assert (status, reply["error"]["message"]) == ("400", "unknown or unsupported field: \ufffd")
    status, reply = await send(server, COMPLETIONS, rb'{"user": "\ud83d", "max_tokens": 1, "prompt": "\ud8" x"}')
    assert (status, reply["error"]["message"][:20]) == ("400", "the body is not JSON")
    status, reply = await send(server, CHAT, rb'{"messages": "\ud83')
    assert (status, reply["error"]["message"][:20]) == ("400", "the body is not JSON")


@pytest.mark.parametrize(
    ("header", "status", "words"),
    [
        (b"Content-Type: text/\xff", "415", "not text/\ufffd"),
        (b"Content-Type: application/json; charset=\xff", "415", "not \ufffd"),
        (b"Content-Encoding: \xff", "415", "Content-Encoding \ufffd is not known"),
        (b"Origin: http://\xff", "403", "pages of http://\ufffd may"),
        (b"Expect: \xff", "417", "Expect: \ufffd is not supported"),
    ],
)
async def test_a_header_that_is_no_text_is_told_as_far_as_it_is(header: bytes, status: str, words: str) -> None:
    async with serving() as server:
        server.api.cors.is_strict = True  # as where nobody needs a key
        told, reply = await send(server, CHAT, b"{}", header)
    assert told == status
    assert words in reply["error"]["message"]


STREAMS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "a", "max_tokens": 2}),
    (CHAT, {"messages": user("a"), "max_tokens": 2}),
    (RESPONSES, {"input": "a", "max_output_tokens": 2}),
    (MESSAGES, {"messages": user("a"), "max_tokens": 2}),
]


def kinds_of(reply: type) -> set[type]:
    return {reply}.union(*map(kinds_of, reply.__subclasses__()))


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_a_stream_that_fails_even_in_telling_so_has_one_head_and_an_end(
    server: Server, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> list[str]:
        return ["\ud83d".encode().decode()]

    for reply in kinds_of(Reply):
        monkeypatch.setattr(reply, "closing", broken)
        monkeypatch.setattr(reply, "failure", broken)
    async with await post(server, {**body, "stream": True}, path) as client:
        assert (await client.head()).startswith("HTTP/1.1 200 ")
        *_, last = await client.read_all()
        kind, data = last.rstrip("\n").split("\n")
        assert kind == "event: error"
        assert json.loads(data.removeprefix("data: "))["error"]["message"] == "internal error: UnicodeEncodeError"
        client.send(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")  # the connection is as good as before
        assert (await client.head()).startswith("HTTP/1.1 200 ")
