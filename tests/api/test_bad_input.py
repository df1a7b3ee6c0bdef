"""Bad input: the right status, OpenAI's error body, the field's name, and nothing lost for the others."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from tests.api.conftest import MAX_SEQ_LEN, SLOTS, Server
from tests.api.contract import CHAT, COMPLETIONS, error_of, post, text_of

JSON = {"Content-Type": "application/json"}
HELLO = [{"role": "user", "content": "Hello!"}]

BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"functions": [{"name": "f"}]}, "functions", "functions is not supported: deprecated; use tools"),
    ({"top_logprobs": 2}, "top_logprobs", "with logprobs: true"),
    ({"logprobs": False, "top_logprobs": 2}, "top_logprobs", "with logprobs: true"),
    ({"logprobs": 3}, "logprobs", "valid boolean"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs: Input should be less than or equal to 20"),
    (
        {"logprobs": True, "top_logprobs": -1},
        "top_logprobs",
        "top_logprobs: Input should be greater than or equal",
    ),
    ({"messages": None}, "messages", "Field required"),
    ({"messages": []}, "messages", "messages is empty"),
    ({"max_tokens": "many"}, "max_tokens", "valid integer"),
    ({"n": 1.5}, "n", "valid integer"),
    ({"n": True}, "n", "valid integer"),
    ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"max_tokens": 0}, "max_tokens", "must be at least 1"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "greater than or equal to 1"),
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    ({"max_tokens": 10_000}, "max_tokens", "does not fit"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "give one of them"),
    ({"stream_options": {}}, "stream_options", "stream: true"),
    (
        {"messages": [*HELLO * 3, {"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages",
        "messages.3.content.0.text: Input should be a valid string",
    ),
    ({"tools": ["f"]}, "tools", "tools.0: Input should be an object"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "tool_choice.function: Field required"),
    ({"stop": 5}, "stop", "stop: Input should be a valid string or a list"),
    ({"stop": ["a", 5]}, "stop", "stop.1: Input should be a valid string"),
    ({"response_format": {}}, "response_format", "response_format.type: Field required"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": []}}},
        "response_format",
        "response_format.json_schema.schema: Input should be an object",
    ),
    ({"guided_json": []}, "guided_json", "guided_json: Input should be a valid string or an object"),
    (
        {"repetition_detection": {"max_pattern_size": 0, "min_count": 2}},
        "repetition_detection",
        "repetition_detection.max_pattern_size: Input should be greater than or equal to 1",
    ),
    ({"stop": [""]}, "stop", "at least 1 character"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "less than or equal to 100"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "not in the model's vocab"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "not in the model's"),
    ({"temperature": "0.5"}, "temperature", "valid number"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"n": 7}, "n", "at most 6 requests"),
    ({"n": 10**8}, "n", "less than or equal to 128"),
    ({"min_tokens": 10**8, "max_tokens": 1}, "min_tokens", "above max_tokens"),
]

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
    ({"role": "tool", "content": "4"}, "tool_call_id"),
    ({"role": "assistant", "content": 5}, "messages.0.content: Input should be a valid string or a list"),
    (
        {"role": "assistant", "tool_calls": [{"id": "a", "function": {"arguments": "{}"}}]},
        "function.name: Field required",
    ),
    ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content.0: a part of type text needs the field text"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "known here: text, refusal"),
]

BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "Field required"),
    ({"prompt": ""}, "prompt", "prompt is empty"),
    ({"prompt": []}, "prompt", "prompt is empty"),
    ({"prompt": ["a", ""]}, "prompt", "prompt is empty"),
    ({"prompt": [[1], []]}, "prompt", "prompt is empty"),
    ({"prompt": [1, 99_999]}, "prompt", "token id 99999"),
    ({"prompt": [-1]}, "prompt", "token id -1"),
    ({"prompt": 3}, "prompt", "must be a string, a list of strings, a list of token ids"),
    ({"prompt": ["a"] * 7}, "prompt", "more than the 6 requests"),
    ({"prompt": ["a", 1]}, "prompt", "must be a string"),
    ({"prompt": [65] * (MAX_SEQ_LEN + 8)}, "prompt", "9 too many"),
    ({"prompt": "a", "messages": HELLO}, "messages", "unknown or unsupported field: messages"),
    ({"prompt": "a", "best_of": 2}, "best_of", "best_of is not supported"),
    ({"prompt": "a", "n": 2, "best_of": 1}, "best_of", "give it the value of n"),
    ({"prompt": "a", "suffix": "z"}, "suffix", "suffix is not supported"),
    ({"prompt": "a", "logprobs": True}, "logprobs", "valid integer"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "less than or equal to 20"),
    ({"prompt": "a", "logprobs": -1}, "logprobs", "greater than or equal to 0"),
]

BAD = [(CHAT, {"messages": HELLO, **body}, param, words) for body, param, words in BAD_CHATS]
BAD += [(CHAT, {"messages": [message]}, "messages", words) for message, words in BAD_MESSAGES]
BAD += [(CHAT, {"messages": HELLO, **body}, path, f"unsupported field: {path}") for path, body in UNKNOWN.items()]
BAD += [(COMPLETIONS, *case) for case in BAD_COMPLETIONS]


async def expect_error(server: Server, path: str, body: dict[str, Any], param: str | None, words: str) -> None:
    error = await error_of(server, path, body)
    assert error["param"] == param, body
    assert words in error["message"], body


async def test_every_bad_request_is_refused_by_name(server: Server) -> None:
    for path, body, param, words in BAD:
        await expect_error(server, path, body, param, words)
    assert server.num_free_slots == SLOTS
    assert server.llm.num_unfinished == 0


async def test_null_is_nothing_to_refuse_whether_or_not_a_field_is_known(server: Server) -> None:
    said = {"role": "user", "content": [{"type": "text", "text": "Hi!", "image_url": None}], "weight": None}
    body: dict[str, Any] = {
        "messages": [said],
        "best_of": None,
        "enable_thinking": None,
        "max_tokens": 1,
        "stream": False,
        "stream_options": None,
        "tools": [{"type": "function", "function": {"name": "f", "x": None}, "cache_control": None}],
        "response_format": {"type": "text", "grammar": None},
        "structured_outputs": {"choice": ["a"], "disable_fallback": None, "json": None},
        "tool_choice": "none",
    }
    await post(server, CHAT, body)
    for name in ("best_of", "weight"):
        await expect_error(server, CHAT, {**body, name: 1}, name, f"unsupported field: {name}")


async def test_a_bad_streaming_request_has_a_status_and_no_stream(server: Server, http: aiohttp.ClientSession) -> None:
    for body in ({"prompt": ""}, {"prompt": "a", "top_p": 2}, {"prompt": [99_999]}):
        async with http.post(server.url + COMPLETIONS, json={**body, "stream": True}) as response:
            assert response.status == 400
            assert response.content_type == "application/json"


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b'{"prompt": "a"', b"[]", b"null", rb'{"prompt": "\ud83d"}'])
async def test_a_body_that_is_not_an_object_is_a_400(server: Server, http: aiohttp.ClientSession, raw: bytes) -> None:
    async with http.post(server.url + COMPLETIONS, data=raw, headers=JSON) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_a_404_says_what_was_asked_for_and_what_there_is(server: Server, http: aiohttp.ClientSession) -> None:
    async with http.post(f"{server.url}/v1/v1/chat/completions", json={}) as response:
        message = (await response.json())["error"]["message"]
    assert message.startswith(
        "there is no /v1/v1/chat/completions here; there are POST /v1/chat/completions, POST /v1/"
    )
    async with http.get(server.url + COMPLETIONS) as response:
        assert (await response.json())["error"]["message"] == "/v1/completions takes POST, not GET"


LONG = "ü\x00" * 20_000
ECHOING: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HELLO, LONG: 1}),
    (CHAT, {"messages": HELLO, "model": LONG}),
    (CHAT, {"messages": HELLO, "response_format": {LONG: 1}}),
    (CHAT, {"messages": [{"role": LONG, "content": "a"}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
    (CHAT, {"messages": HELLO, "metadata": {LONG: LONG}}),
    (CHAT, {"messages": HELLO, "user": LONG}),
    (CHAT, {"messages": HELLO, "guided_json": LONG}),
    (CHAT, {"messages": HELLO, "guided_regex": "(" + LONG}),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function", "function": {"name": LONG}}]}),
    (
        CHAT,
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": LONG, "function": {"name": "f", "arguments": LONG}}]}
            ]
        },
    ),
    (COMPLETIONS, {"prompt": LONG}),
    (COMPLETIONS, {"prompt": [10**4000]}),
    ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": LONG}]}]}),
    ("/v1/responses", {"input": [{"type": LONG}]}),
    ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": LONG, "output": ""}]}),
    ("/v1/responses", {"input": "a", "include": [LONG]}),
    ("/tokenize", {"prompt": "a", LONG: 1}),
    ("/detokenize", {"tokens": [-(10**4000)]}),
    (f"/v1/{'ü' * 1000}", {}),
]


@pytest.mark.parametrize(("path", "body"), ECHOING, ids=range(len(ECHOING)))
async def test_an_error_repeats_no_more_than_a_kilobyte_of_its_request(
    server: Server, http: aiohttp.ClientSession, path: str, body: dict[str, Any]
) -> None:
    async with http.post(server.url + path, json=body) as response:
        assert response.status in (400, 404)
        assert len(await response.read()) < 1200


def nested(opening: str, closing: str, depth: int) -> str:
    return opening * depth + closing * depth


@pytest.mark.parametrize("depth", [150, 990, 5_000, 50_000])
async def test_what_is_nested_too_deeply_is_a_400_wherever_it_stands(
    server: Server, http: aiohttp.ClientSession, depth: int
) -> None:
    lists, objects = nested("[", "]", depth), nested('{"a":', "}", depth).replace(":}", ":1}", 1)
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
    bad = [expect_error(server, COMPLETIONS, {"prompt": ""}, "prompt", "empty") for _ in range(20)]
    among, *_ = await asyncio.gather(text_of(server, good), *bad)
    assert among == alone
