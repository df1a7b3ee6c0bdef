"""Half a surrogate pair and bytes that are no text, in what clients send: they break no reply and end no stream."""

import json
from functools import partial
from typing import Any

import pytest
from pydantic import BaseModel

from chairlift.api.answers import AnswerReader, ToolFamily
from chairlift.api.anthropic.reply import MessagesReply
from chairlift.api.anthropic.request import MessagesRequest
from chairlift.api.openai.chat import ChatCompletionRequest
from chairlift.api.openai.replies import ChatReply, CompletionReply
from chairlift.api.replies.reply import Reply
from chairlift.api.responses.reply import ResponsesReply
from chairlift.api.responses.request import ResponsesRequest
from chairlift.params import CompletionOutput, FinishReason, RequestOutput, SamplingParams
from tests.api.conftest import Server
from tests.api.contract import CHAT, COMPLETIONS, user
from tests.api.fault_support import connect, post

STOP = FinishReason.STOP
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


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
async def test_a_header_that_is_no_text_is_told_as_far_as_it_is(
    server: Server, header: bytes, status: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.api.cors, "is_strict", True)
    told, reply = await send(server, CHAT, b"{}", header)
    assert told == status
    assert words in reply["error"]["message"]


TOOL = {"name": "f", "parameters": {"type": "object"}}
ASKED: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (ChatCompletionRequest, {"messages": user("a"), "tools": [{"type": "function", "function": TOOL}]}),
    (ResponsesRequest, {"input": "a", "tools": [{"type": "function", **TOOL}]}),
    (MessagesRequest, {"messages": user("a"), "tools": [{"name": "f", "input_schema": {}}], "max_tokens": 9}),
]
ODD = [
    '<tool_call>{"name": "f", "arguments": {"a": "x\ny\x00 \\ud83d"}}</tool_call>',
    '<tool_call>{"arguments": {"a": "x\ny\x00 \\ud83d"}, "name": "f"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"x\\ny\\u0000 \\\\ud83d\\"}"}</tool_call>',
]


def reply_to(body: Any, server: Server) -> Reply:
    vocabulary, new_reader = server.llm.inputs.vocabulary, partial(AnswerReader, ToolFamily.HERMES)
    match body:
        case ChatCompletionRequest():
            return ChatReply(body, "m", vocabulary, new_reader)
        case ResponsesRequest():
            return ResponsesReply(body, SamplingParams(), "m", vocabulary, new_reader)
        case _:
            return MessagesReply(body, "m", vocabulary, new_reader)


@pytest.mark.parametrize("text", ODD)
@pytest.mark.parametrize(("form", "fields"), ASKED)
def test_what_a_model_writes_of_them_is_sent_as_json(
    server: Server, form: type[BaseModel], fields: dict[str, Any], text: str
) -> None:
    """Whole, and in a stream of single characters."""
    body = form.model_validate(fields)
    whole = reply_to(body, server).whole([RequestOutput("r", None, [1], [CompletionOutput(0, text, [1], STOP)])])
    streamed, events = reply_to(body, server), list[str]()
    growing = CompletionOutput(0, "", [1], None)
    output = RequestOutput("r", None, [1], [growing])
    events += streamed.opening([[1]])
    for character in text:
        growing.text += character
        events += streamed.news(0, output)
    growing.finish_reason = STOP
    events += [*streamed.news(0, output), *streamed.closing()]
    told = json.loads(whole.model_dump_json())
    payloads = [json.loads(event.partition("data: ")[2]) for event in events if "[DONE]" not in event]
    match body:
        case ChatCompletionRequest():
            once = told["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
            calls = [payload["choices"][0]["delta"].get("tool_calls") for payload in payloads]
            pieces = [call[0]["function"]["arguments"] for call in calls if call]
        case ResponsesRequest():
            once = told["output"][0]["arguments"]
            pieces = [each["delta"] for each in payloads if each["type"] == "response.function_call_arguments.delta"]
        case _:
            once = json.dumps(told["content"][0]["input"])
            pieces = [each["delta"]["partial_json"] for each in payloads if each["type"] == "content_block_delta"]
    assert json.loads(once) == json.loads("".join(pieces)) == {"a": "x\ny\0 \ufffd"}


STREAMS: list[tuple[str, type, dict[str, Any]]] = [
    (COMPLETIONS, CompletionReply, {"prompt": "a", "max_tokens": 2}),
    (CHAT, ChatReply, {"messages": user("a"), "max_tokens": 2}),
    (RESPONSES, ResponsesReply, {"input": "a", "max_output_tokens": 2}),
    (MESSAGES, MessagesReply, {"messages": user("a"), "max_tokens": 2}),
]


@pytest.mark.parametrize(("path", "reply", "body"), STREAMS)
async def test_a_stream_that_fails_even_in_telling_so_has_one_head_and_an_end(
    server: Server, path: str, reply: type, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> list[str]:
        return ["\ud83d".encode().decode()]

    monkeypatch.setattr(reply, "closing", broken)
    monkeypatch.setattr(reply, "failure", broken)
    async with await post(server, {**body, "stream": True}, path) as client:
        assert (await client.head()).startswith("HTTP/1.1 200 ")
        *_, last = await client.rest()
        kind, data = last.rstrip("\n").split("\n")
        assert kind == "event: error"
        assert json.loads(data.removeprefix("data: "))["error"]["message"] == "internal error: UnicodeEncodeError"
        client.send(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")  # the connection is as good as before
        assert (await client.head()).startswith("HTTP/1.1 200 ")
