"""Responses that are kept at the client's wish: read, continued, deleted, and nobody else's. And what Codex sends."""

from typing import Any

import aiohttp
import openai
import pytest

from chairlift.api import ServerConfig
from chairlift.api.replies.responses import ResponseStore, StoredResponse
from tests.api.conftest import Server, serving
from tests.api.contract import client_of, post
from tests.api.test_responses import ANSWER, QUESTION, RESPONSES

ASKED: Any = {"model": "bundled", "input": QUESTION}
TOOL: Any = {"type": "function", "name": "look", "parameters": {"const": {"at": "a"}}}


async def test_a_stored_response_is_read_again_and_deleted(server: Server) -> None:
    async with client_of(server) as client:
        reply = await client.responses.create(**ASKED, store=True)
        assert reply.to_dict()["store"] is True
        assert await client.responses.retrieve(reply.id) == reply
        await client.responses.delete(reply.id)
        for attempt in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError, match="ask for responses with store: true"):
                await attempt(reply.id)


@pytest.mark.parametrize("fields", [{}, {"store": False}])
async def test_nothing_is_stored_unasked(server: Server, fields: dict[str, Any]) -> None:
    async with client_of(server) as client:
        reply = await client.responses.create(**ASKED, **fields)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(reply.id)
        with pytest.raises(openai.BadRequestError, match="previous_response_id: there is no such stored") as caught:
            await client.responses.create(model="bundled", input="And?", previous_response_id=reply.id)
    assert caught.value.param == "previous_response_id"


async def test_a_response_is_continued_without_its_instructions_and_from_the_cache(server: Server) -> None:
    spelled, summed = "How do you spell fox?", "What is 5 + 6?"
    async with client_of(server) as client:
        first: Any = await client.responses.create(**ASKED, store=True)
        fields: Any = {"model": "bundled", "previous_response_id": first.id, "store": True}
        async with client.responses.stream(**fields, input=spelled) as stream:
            second: Any = await stream.get_final_response()
        brief: Any = {"model": "bundled", "instructions": "Be brief."}
        third: Any = await client.responses.create(**brief, input=summed, previous_response_id=second.id)
        said = (QUESTION, ANSWER, spelled, second.output_text, summed)
        turns: Any = [
            {"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(said)
        ]
        whole: Any = await client.responses.create(**brief, input=turns)
    assert first.output_text == ANSWER
    assert (second.previous_response_id, third.previous_response_id) == (first.id, second.id)
    assert third.output_text == whole.output_text
    assert third.usage.input_tokens == whole.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens >= 0.99 * (first.usage.total_tokens - 1)


async def test_an_output_may_answer_a_call_of_the_stored_response(server: Server) -> None:
    async with client_of(server) as client:
        forced: Any = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        called = await client.responses.create(**ASKED, **forced, store=True)
        (call,) = called.output
        assert call.type == "function_call"
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "b"}
        reply = await client.responses.create(model="bundled", input=[output], previous_response_id=called.id)
        assert reply.status == "completed"
        with pytest.raises(openai.BadRequestError, match="no function_call with call_id"):
            await client.responses.create(model="bundled", input=[output])


async def test_no_key_reads_continues_or_deletes_anothers_responses() -> None:
    config = ServerConfig.model_validate({"api_key": ["first", "second"]})
    async with serving(config) as server, client_of(server, "first") as first, client_of(server, "second") as second:
        mine = await first.responses.create(**ASKED, store=True)
        for attempt in (second.responses.retrieve, second.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await attempt(mine.id)
        with pytest.raises(openai.BadRequestError):
            await second.responses.create(model="bundled", input="a", previous_response_id=mine.id)
        assert (await first.responses.retrieve(mine.id)).output_text == ANSWER


def test_the_store_is_bounded_by_bytes_and_whoever_has_most_loses_first() -> None:
    store = ResponseStore(max_bytes=10_000)

    def keep(key: str, name: str, num_bytes: int) -> None:
        store.keep(key, name, StoredResponse(b"", b"a" * (num_bytes - 1024)))

    keep("few", "0", 2000)
    for number in range(4):
        keep("many", str(number), 2000)
    assert all(store.find("many", str(number)) for number in range(4))
    keep("many", "4", 2000)
    keep("many", "5", 4000)
    assert [store.find("many", str(number)) is not None for number in range(6)] == [False] * 3 + [True] * 3
    keep("few", "1", 10_001)  # which could not be kept even alone
    assert (store.find("few", "0") is None, store.find("few", "1") is None) == (False, True)
    assert [store.delete("many", "5"), store.delete("many", "5"), store.delete("few", "4")] == [True, False, False]


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": ""}
CODEX: dict[str, Any] = {
    "model": "bundled",
    "instructions": "You are a coding agent.",
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}],
    "tools": [
        {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False},
        {"type": "custom", "name": "apply_patch", "format": GRAMMAR},
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
        {"type": "namespace", "name": "mcp", "tools": []},
    ],
    "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "client_metadata": {"x-codex-installation-id": "a"},
}
CODEX |= {"tool_choice": "auto", "parallel_tool_calls": True, "reasoning": None, "store": False, "stream": False}
CODEX |= {"include": ["reasoning.encrypted_content"]}


async def test_what_codex_sends_is_answered_and_tools_of_unknown_types_are_left_out_with_a_warning(
    server: Server,
) -> None:
    async with aiohttp.ClientSession() as http, http.post(server.url + RESPONSES, json=CODEX) as reply:
        body = await reply.json()
        assert reply.status == 200, body
        assert reply.headers["Warning"] == (
            '299 - "tools of type custom, local_shell, namespace, web_search are not supported here and were left out"'
        )
    assert [tool["name"] for tool in body["tools"]] == ["shell"]
    assert body["prompt_cache_key"] == CODEX["prompt_cache_key"]
    probe = await post(server, RESPONSES, {**CODEX, "max_output_tokens": 1})
    assert (probe["status"], probe["usage"]["output_tokens"]) == ("incomplete", 1)
    forced = {**CODEX, "tools": CODEX["tools"][1:], "tool_choice": "required"}  # of those that were left out
    error = (await post(server, RESPONSES, forced, status=400))["error"]
    assert (error["param"], error["message"]) == ("tool_choice", "tool_choice is only allowed with tools")
