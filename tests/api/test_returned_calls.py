"""Calls that come back in a conversation are never refused, however they were cut, written or stored."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.api.conftest import Server
from tests.api.contract import CHAT, MESSAGES, RESPONSES, body_of, post, user

WRITTEN: dict[str, tuple[Any, dict[str, Any]]] = {
    "an object": ('{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
    "raw control characters": ('{"a": "x\ny\tz"}', {"a": "x\ny\tz"}),
    "cut in a string": ('{"a": 1, "cmd": "ls -l\n', {"a": 1, "cmd": "ls -l\n"}),
    "cut in an escape": ('{"a": "x\\', {"a": "x\\"}),
    "cut elsewhere": ('{"a": [1, 2', {"a": [1, 2]}),
    "nothing but its beginning": ("{", {}),
    "nothing": ("", {}),
    "space": (" \n", {}),
    "null": (None, {}),
    "null as text": ("null", {}),
    "an object in a string": ('"{\\"a\\": 1}"', {"a": 1}),
    "an empty object in a string": ('"{}"', {}),
    "an array": ("[1, 2]", {"arguments": [1, 2]}),
    "a number": ("5", {"arguments": 5}),
    "a string": ('"Oslo"', {"arguments": "Oslo"}),
    "text": ("ls -l", {"arguments": "ls -l"}),
    "an object as it is": ({"a": 1}, {"a": 1}),
    "a list as it is": ([1], {"arguments": [1]}),
    "Python": ("{'a': True}", {"a": True}),
    "half a surrogate pair": ('{"a": "\\ud83d \\ud83d\\ude00"}', {"a": "\ufffd \U0001f600"}),
    "more than an object": ('{"a": 1}}', {"a": 1}),
    "too deep to be read": ('{"a": ' + "[" * 100_000, {"arguments": '{"a": ' + "[" * 100_000}),
}
CASES = pytest.mark.parametrize(("written", "arguments"), WRITTEN.values(), ids=WRITTEN)


def chat(written: Any, call_id: str = "1") -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": written}}
    result = {"role": "tool", "tool_call_id": call_id, "content": "done"}
    return {"messages": [*user("Go."), {"role": "assistant", "tool_calls": [call]}, result]}


def items(written: Any) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": written}
    output = {"type": "function_call_output", "call_id": "1", "output": "done"}
    return {"input": [*user("Go."), call, output]}


def blocks(written: Any) -> dict[str, Any]:
    call = {"type": "tool_use", "id": "1", "name": "f", "input": written}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "done"}
    turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    return {"max_tokens": 1, "messages": [*user("Go."), *turns]}


@CASES
@pytest.mark.parametrize(("path", "made"), [(CHAT, chat), (RESPONSES, items), (MESSAGES, blocks)])
def test_whatever_was_written_the_template_gets_an_object(
    path: str, made: Callable[[Any], dict[str, Any]], written: Any, arguments: dict[str, Any]
) -> None:
    _, called, result = body_of(path).model_validate(made(written)).template_messages()
    assert called["tool_calls"][0]["function"] == {"name": "f", "arguments": arguments}
    assert (result["content"], result["tool_call_id"]) == ("done", "1")


@pytest.mark.parametrize("written", [None, "", "{", "[1]", "5", "ls", '{"a": "x\n', '"{}"', '{"a": "\\ud83d"}'])
async def test_every_endpoint_goes_on_with_such_a_conversation(server: Server, written: str | None) -> None:
    few = {"max_tokens": 1, "temperature": 0}
    assert (await post(server, CHAT, {**chat(written), **few}))["usage"]["completion_tokens"] == 1
    assert (await post(server, MESSAGES, blocks(written)))["usage"]["output_tokens"] == 1
    body = {**items(written), "max_output_tokens": 1, "store": True}
    stored = await post(server, RESPONSES, body)
    more = {"input": "And?", "previous_response_id": stored["id"], "max_output_tokens": 1}
    assert (await post(server, RESPONSES, more))["usage"]["input_tokens"] > stored["usage"]["input_tokens"]


async def test_a_call_that_a_limit_has_cut_can_be_sent_back(server: Server) -> None:
    """As the client got it, whole or streamed, by each of the endpoints."""
    tool = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    asked = {"messages": user("What is the weather in Oslo?"), "tools": [{"type": "function", "function": tool}]}
    reply = await post(server, CHAT, {**asked, "temperature": 0, "max_tokens": 56})
    said = reply["choices"][0]["message"]
    (call,) = said["tool_calls"]
    assert reply["choices"][0]["finish_reason"] == "length"
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        json.loads(call["function"]["arguments"])
    told = {"role": "tool", "tool_call_id": call["id"], "content": "The call was cut off."}
    await post(server, CHAT, {"messages": [*asked["messages"], said, told], "max_tokens": 1})


GONE = {"tool_use_id": "gone", "type": "tool_result", "content": "done"}
ALONE: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [*user("Go."), {"role": "tool", "content": "done", "tool_call_id": "gone"}]}),
    (RESPONSES, {"input": [*user("Go."), {"type": "function_call_output", "call_id": "gone", "output": "done"}]}),
    (MESSAGES, {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text", "text": "Go."}, GONE]}]}),
]


@pytest.mark.parametrize(("path", "fields"), ALONE)
def test_a_result_whose_call_is_gone_is_still_shown(path: str, fields: dict[str, Any]) -> None:
    result = {"role": "tool", "content": "done", "tool_call_id": "gone"}
    assert body_of(path).model_validate(fields).template_messages() == [*user("Go."), result]
