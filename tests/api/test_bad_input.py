"""Bad input: the right status, OpenAI's error body, the field's name, and nothing lost for the others."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from tests.api.conftest import MAX_SEQ_LEN, Server
from tests.api.contract import CHAT, COMPLETIONS, error_of, post, text_of

JSON = {"Content-Type": "application/json"}
HELLO = [{"role": "user", "content": "Hello!"}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": []}}
ENDLESS = {"max_pattern_size": 0, "min_count": 2}

BAD_CHATS: dict[str, list[dict[str, Any]]] = {  # by words of the message; the field to blame comes first
    "functions: only [] is supported: deprecated; use tools": [{"functions": [{"name": "f"}]}],
    "with logprobs: true": [{"top_logprobs": 2}, {"top_logprobs": 2, "logprobs": False}],
    "top_logprobs: Input should be less than or equal to 20": [{"top_logprobs": 21, "logprobs": True}],
    "top_logprobs: Input should be greater than or equal": [{"top_logprobs": -1, "logprobs": True}],
    "valid boolean": [{"logprobs": 3}, {"stream": "yes"}],
    "valid integer": [{"max_tokens": "many"}, {"n": 1.5}, {"n": True}],
    "valid number": [{"temperature": "0.5"}, {"temperature": True}],
    "messages: Field required": [{"messages": None}],
    "messages is empty": [{"messages": []}],
    "greater than or equal to 0": [{"temperature": -0.1}, {"max_tokens": -1}],
    "greater than 0": [{"top_p": 0}],
    "must be at least 1": [{"max_tokens": 0}],
    "greater than or equal to 1": [{"max_completion_tokens": 0}],
    "does not fit": [{"max_tokens": 10_000}],
    "give one of them": [{"max_tokens": 1, "max_completion_tokens": 2}],
    "stream: true": [{"stream_options": {}}],
    "tools.0: Input should be an object": [{"tools": ["f"]}],
    "the name of the tool belongs into": [{"tool_choice": {"type": "function"}}],
    "stop: Input should be a valid string or a list": [{"stop": 5}],
    "stop.1: Input should be a valid string": [{"stop": ["a", 5]}],
    "response_format.type: Field required": [{"response_format": {}}],
    "response_format.json_schema.schema: Input should be an object": [{"response_format": SCHEMA}],
    "guided_json: Input should be a valid string or an object": [{"guided_json": []}],
    "repetition_detection.max_pattern_size: Input should be greater than or": [{"repetition_detection": ENDLESS}],
    "at least 1 character": [{"stop": [""]}],
    "less than or equal to 100": [{"logit_bias": {"5": 101}}],
    "not in the model's": [{"logit_bias": {"99999": 1}}, {"stop_token_ids": [-1]}],
    "at most 6 requests": [{"n": 7}],
    "less than or equal to 128": [{"n": 10**8}],
    "above max_tokens": [{"min_tokens": 10**8, "max_tokens": 1}],
}
UNKNOWN: dict[str, dict[str, Any]] = {
    "foo": {"foo": 1},
    "stream_options.x": {"stream": True, "stream_options": {"x": 1}},
    "messages.0.foo": {"messages": [{"role": "user", "content": "a", "foo": 1}]},
    "messages.0.content.0.int": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "int": 1}]}]},
    "response_format.x": {"response_format": {"type": "text", "x": 1}},
    "tools.0.function.x": {"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]},
}
BAD_MESSAGES: list[tuple[Any, str]] = [
    (1, "messages.0: Input should be an object"),
    ({"role": "user"}, "messages.0.content: Field required"),
    ({"content": "a"}, "messages.0.role: Field required"),
    ({"role": "robot", "content": "a"}, "messages.0.role"),
    ({"role": "assistant", "content": 5}, "messages.0.content: Input should be a valid string or a list"),
    ({"role": "assistant", "tool_calls": [{"id": "a", "function": {"arguments": "{}"}}]}, "name: Field required"),
    ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages.0.content.0.text: Input should be a valid"),
    ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content.0: a part of type text needs the field text"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "known here: text, refusal"),
]
BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "Field required"),
    *(({"prompt": prompt}, "prompt", "prompt is empty") for prompt in ("", [], ["a", ""], [[1], []])),
    ({"prompt": [1, 99_999]}, "prompt", "token id 99999"),
    ({"prompt": [-1]}, "prompt", "token id -1"),
    ({"prompt": 3}, "prompt", "must be a string, a list of strings, a list of token ids"),
    ({"prompt": ["a"] * 7}, "prompt", "more than the 6 requests"),
    ({"prompt": ["a", 1]}, "prompt", "must be a string"),
    ({"prompt": [65] * (MAX_SEQ_LEN + 8)}, "prompt", "9 too many"),
    ({"prompt": "a", "messages": HELLO}, "messages", "unknown or unsupported field: messages"),
    ({"prompt": "a", "best_of": 2}, "best_of", "best_of is not supported"),
    ({"prompt": "a", "n": 2, "best_of": 1}, "best_of", "give it the value of n"),
    ({"prompt": "a", "suffix": "z"}, "suffix", 'only "" is supported'),
    ({"prompt": "a", "logprobs": True}, "logprobs", "valid integer"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "less than or equal to 20"),
    ({"prompt": "a", "logprobs": -1}, "logprobs", "greater than or equal to 0"),
]

ASKED = [(words, fields) for words, each in BAD_CHATS.items() for fields in each]
BAD = [(CHAT, {"messages": HELLO, **fields}, next(iter(fields)), words) for words, fields in ASKED]
BAD += [(CHAT, {"messages": [message]}, "messages", words) for message, words in BAD_MESSAGES]
BAD += [(CHAT, {"messages": HELLO, **body}, path, f"unsupported field: {path}") for path, body in UNKNOWN.items()]
BAD += [(COMPLETIONS, *case) for case in BAD_COMPLETIONS]


async def test_every_bad_request_is_refused_by_name(server: Server) -> None:
    for path, body, param, words in BAD:
        error = await error_of(server, path, body)
        assert error["param"] == param, body
        assert words in error["message"], body
    assert server.is_idle


async def test_null_is_nothing_to_refuse_whether_or_not_a_field_is_known(server: Server) -> None:
    said = {"role": "user", "content": [{"type": "text", "text": "Hi!", "image_url": None}], "weight": None}
    body: dict[str, Any] = {
        **dict.fromkeys(["best_of", "enable_thinking", "stream_options"]),
        **dict(messages=[said], max_tokens=1, stream=False, tool_choice="none"),
        "tools": [{"type": "function", "function": {"name": "f", "x": None}, "cache_control": None}],
        "response_format": {"type": "text", "grammar": None},
        "structured_outputs": {"choice": ["a"], "disable_fallback": None, "json": None},
    }
    await post(server, CHAT, body)
    for name in ("best_of", "weight"):
        error = await error_of(server, CHAT, {**body, name: 1})
        assert (error["param"], error["message"]) == (name, f"unknown or unsupported field: {name}")


async def test_a_bad_stream_or_body_has_a_status_and_no_stream(server: Server, http: aiohttp.ClientSession) -> None:
    bad: list[dict[str, Any]] = [{"prompt": ""}, {"prompt": "a", "top_p": 2}, {"prompt": [99_999]}]
    bodies = [json.dumps({**body, "stream": True}).encode() for body in bad]
    for raw in (*bodies, b"", b"{", b"\xff\xfe", b'{"prompt": "a"', b"[]", b"null", rb'{"prompt": "\ud83'):
        async with http.post(server.url + COMPLETIONS, data=raw, headers=JSON) as response:
            assert (response.status, response.content_type) == (400, "application/json")
            assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_a_404_says_what_was_asked_for_and_what_there_is(server: Server, http: aiohttp.ClientSession) -> None:
    async with http.post(f"{server.url}/v1/v1/chat/completions", json={}) as response:
        message = (await response.json())["error"]["message"]
    assert message.startswith("there is no /v1/v1/chat/completions here; there are POST /v1/chat/completions, POST ")
    async with http.get(server.url + COMPLETIONS) as response:
        assert (await response.json())["error"]["message"] == "/v1/completions takes POST, not GET"


LONG = "ü\x00" * 20_000
CALL = {"id": LONG, "function": {"name": "f", "arguments": LONG}}
ECHOING_CHATS: list[dict[str, Any]] = [
    *({name: LONG} for name in ("model", "user", "guided_json")),
    *({LONG: 1}, {"response_format": {LONG: 1}}, {"metadata": {LONG: LONG}}, {"guided_regex": "(" + LONG}),
    {"messages": [{"role": LONG, "content": "a"}]},
    {"messages": [{"role": "user", "content": [{"type": LONG}]}]},
    {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
    {"tools": [{"type": "function", "function": {"name": LONG}}]},
]
ECHOING: list[tuple[str, dict[str, Any]]] = [
    *((CHAT, {"messages": HELLO, **fields}) for fields in ECHOING_CHATS),
    *((COMPLETIONS, {"prompt": prompt}) for prompt in (LONG, [10**4000])),
    ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": LONG}]}]}),
    ("/v1/responses", {"input": [{"type": LONG}]}),
    ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": LONG, "output": ""}]}),
    ("/v1/responses", {"input": "a", "include": [LONG]}),
    *(("/tokenize", {"prompt": "a", LONG: 1}), ("/detokenize", {"tokens": [-(10**4000)]}), (f"/v1/{'ü' * 1000}", {})),
]


async def test_an_error_repeats_little_of_its_request(server: Server, http: aiohttp.ClientSession) -> None:
    for path, body in ECHOING:
        async with http.post(server.url + path, json=body) as response:
            assert response.status in (400, 404), str(body)[:100]
            assert len(await response.read()) < 1200, str(body)[:100]


@pytest.mark.parametrize("depth", [150, 990, 50_000])
async def test_too_deep_nesting_is_a_400(server: Server, http: aiohttp.ClientSession, depth: int) -> None:
    lists, objects = "[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth
    calls = json.dumps([{"id": "1", "function": {"name": "f", "arguments": f'{{"a":{lists}}}'}}])
    bodies = {
        f'{{"messages": [{{"role": "user", "content": {lists}}}]}}': CHAT,
        f'{{"messages": [{{"role": "assistant", "tool_calls": {calls}}}]}}': CHAT,
        f'{{"messages": {json.dumps(HELLO)}, "guided_json": {json.dumps(objects)}}}': CHAT,
        f'{{"messages": {json.dumps(HELLO)}, "chat_template_kwargs": {objects}}}': CHAT,
        f'{{"prompt": {lists}}}': COMPLETIONS,
        f'{{"input": {lists}}}': "/v1/responses",
    }
    for body, path in bodies.items():
        async with http.post(server.url + path, data=body, headers=JSON) as response:
            assert response.status in ((400,) if depth > 200 else (200, 400))
            assert len(await response.read()) < 3000


async def test_others_in_the_batch_notice_nothing_of_bad_requests(server: Server) -> None:
    good = {"prompt": "Once upon a time", "max_tokens": 80, "temperature": 0, "ignore_eos": True}
    alone = await text_of(server, good)
    among, *_ = await asyncio.gather(text_of(server, good), *(error_of(server, COMPLETIONS, {}) for _ in range(20)))
    assert among == alone
