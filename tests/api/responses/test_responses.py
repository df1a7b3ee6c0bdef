"""`/v1/responses` as the official client uses it: answers, structure, tools, the way back; what is stored; Codex."""

import json
from typing import Any, Literal

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response
from pydantic import BaseModel

from chairlift.api import ServerConfig
from chairlift.api.store import ReplyStore, StoredReply
from tests.api.conftest import SLOTS, Server, serving
from tests.api.contract import CHAT, client_of, post, user

RESPONSES = "/v1/responses"
QUESTION = "What is 17 + 25?"
ANSWER = "17 + 25 = 42."
LOGPROBS: Any = ["message.output_text.logprobs"]
CITY = {"type": "string", "enum": ["Oslo", "Rome"]}
SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
TOOL: Any = {"type": "function", "name": "get_weather", "description": "The weather of a city."}
TOOL |= {"parameters": SCHEMA, "strict": True}
NAMED: Any = {"type": "function", "name": "get_weather"}


class Trip(BaseModel):
    """Whatever the model would rather say, it ends."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]


def check(payload: dict[str, Any]) -> Response:
    """The client's own model reads it strictly, and knows all of it but what OpenAI sends without declaring it."""
    response = Response.model_validate_json(json.dumps(payload), strict=True)
    assert response.model_extra is not None
    assert set(response.model_extra) == {"store", "presence_penalty", "frequency_penalty"}
    return response


async def test_the_whole_reply_is_what_the_clients_model_expects(server: Server) -> None:
    payload = await post(server, RESPONSES, {"model": "bundled", "input": QUESTION})
    reply = check(payload)
    assert reply.id.startswith("resp_")
    assert reply.created_at <= (reply.completed_at or 0)
    assert (reply.status, reply.error, reply.incomplete_details, reply.output_text) == ("completed", None, None, ANSWER)
    (message,) = payload["output"]
    assert (message["role"], message["status"], message["id"][:4]) == ("assistant", "completed", "msg_")
    assert message["content"] == [{"type": "output_text", "text": ANSWER, "annotations": [], "logprobs": []}]
    assert reply.usage is not None
    assert reply.usage.output_tokens == len(ANSWER) + 1  # a byte is a token, and the end is one more
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    assert reply.usage.output_tokens_details.reasoning_tokens == 0
    filled_in = {"object": "response", "model": "bundled", "metadata": {}, "parallel_tool_calls": True, "top_p": 1.0}
    filled_in |= {"temperature": 0.0}  # the bundled model's own default
    filled_in |= {"text": {"format": {"type": "text"}, "verbosity": "medium"}, "tool_choice": "auto", "tools": []}
    filled_in |= {"top_logprobs": 0, "truncation": "disabled", "background": False, "store": False}
    filled_in |= {"service_tier": "default", "reasoning": {"effort": None, "summary": None}}
    filled_in |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    none = ("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "user")
    filled_in |= dict.fromkeys(none)
    assert {name: payload[name] for name in filled_in} == filled_in


async def test_what_was_asked_for_is_repeated(server: Server) -> None:
    asked = {"instructions": "Be brief.", "max_output_tokens": 50, "metadata": {"run": "7"}, "top_logprobs": 3}
    asked |= {"parallel_tool_calls": False, "tools": [{**TOOL, "strict": False}], "tool_choice": "none"}
    asked |= {"temperature": 0.5, "top_p": 0.9, "presence_penalty": 0.25, "frequency_penalty": -0.25}
    asked |= {"reasoning": {"effort": "none", "summary": None}, "user": "u", "safety_identifier": "s"}
    asked |= {"prompt_cache_key": "k"}
    payload = await post(server, RESPONSES, {**asked, "input": QUESTION, "include": LOGPROBS, "store": True})
    check(payload)
    assert {name: payload[name] for name in asked} == asked


OPEN_RESPONSES = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id"),
    *("instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p"),
    *("presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "user", "usage"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata"),
    *("safety_identifier", "prompt_cache_key"),
}


async def test_no_field_that_open_responses_requires_is_missing(server: Server) -> None:
    """Also not of a tool of which only the name was given."""
    body = {"input": QUESTION, "tools": [{"type": "function", "name": "f"}], "tool_choice": "none"}
    payload = await post(server, RESPONSES, body)
    assert set(payload) >= OPEN_RESPONSES
    tool = {"type": "function", "name": "f", "description": None, "parameters": None, "strict": False}
    assert payload["tools"] == [tool]


async def test_instructions_and_turns_are_the_messages_of_a_chat(client: AsyncOpenAI) -> None:
    turns: Any = [
        {"role": "user", "content": "What is 5 + 6?"},
        {"role": "assistant", "content": "5 + 6 = 11."},
        {"role": "user", "content": "How do you spell fox?"},
    ]
    reply: Any = await client.responses.create(model="bundled", instructions="You are Chairlift.", input=turns)
    turns.insert(0, {"role": "system", "content": "You are Chairlift."})
    chat: Any = await client.chat.completions.create(model="bundled", messages=turns)
    assert reply.output_text == chat.choices[0].message.content
    assert reply.usage.input_tokens == chat.usage.prompt_tokens


async def test_output_is_sent_back_as_input_as_it_came(client: AsyncOpenAI) -> None:
    conversation: list[Any] = [{"role": "user", "content": "What is 5 + 6?"}]
    first = await client.responses.create(model="bundled", input=conversation, include=LOGPROBS)
    conversation += [*first.output, {"role": "user", "content": QUESTION}]
    second = await client.responses.create(model="bundled", input=conversation)
    assert (first.output_text, second.output_text) == ("5 + 6 = 11.", ANSWER)


async def test_logprobs_are_those_that_a_chat_reports_and_include_alone_reports_no_others(server: Server) -> None:
    reply = await post(server, RESPONSES, {"input": QUESTION, "include": LOGPROBS, "top_logprobs": 2})
    asked = {"messages": user(QUESTION), "logprobs": True, "top_logprobs": 2}
    chat = await post(server, CHAT, asked)
    logprobs = reply["output"][0]["content"][0]["logprobs"]
    assert [each["token"] for each in logprobs] == [*ANSWER, "<|im_end|>"]
    assert len(logprobs) == reply["usage"]["output_tokens"]
    assert {len(each["top_logprobs"]) for each in logprobs} == {2}
    assert logprobs == chat["choices"][0]["logprobs"]["content"]
    alone = await post(server, RESPONSES, {"input": QUESTION, "include": LOGPROBS})
    told = alone["output"][0]["content"][0]["logprobs"]
    assert [(each["token"], each["top_logprobs"]) for each in told] == [(each["token"], []) for each in logprobs]


async def test_parse_makes_a_pydantic_object_of_the_answer(client: AsyncOpenAI) -> None:
    reply = await client.responses.parse(model="bundled", input="Where to?", text_format=Trip, temperature=2.0)
    assert isinstance(reply.output_parsed, Trip)
    assert Trip.model_validate_json(reply.output_text) == reply.output_parsed
    assert reply.text is not None
    assert reply.text.format is not None
    assert (reply.text.format.type, reply.text.format.name) == ("json_schema", "Trip")  # type: ignore[union-attr]


async def test_a_schema_that_cannot_be_compiled_is_a_400_about_text(client: AsyncOpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError, match="cannot be compiled") as caught:
        await client.responses.create(model="bundled", input=QUESTION, text=text)
    assert caught.value.param == "text"


@pytest.mark.parametrize("tool_choice", ["required", NAMED])
async def test_a_forced_call_fits_its_schema(hermes: AsyncOpenAI, tool_choice: Any) -> None:
    fields: Any = {"model": "bundled", "input": QUESTION, "tools": [TOOL], "parallel_tool_calls": False}
    reply = await hermes.responses.create(**fields, tool_choice=tool_choice)
    (call,) = reply.output
    assert call.type == "function_call"
    assert (call.name, call.status) == ("get_weather", "completed")
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    assert (call.call_id[:5], (call.id or "")[:3]) == ("call_", "fc_")
    assert (reply.status, reply.output_text) == ("completed", "")
    assert reply.tools == [openai.types.responses.FunctionTool(**TOOL)]
    assert reply.tool_choice == (
        openai.types.responses.ToolChoiceFunction(**NAMED) if tool_choice is NAMED else "required"
    )


async def test_a_call_and_its_output_are_sent_back(hermes: AsyncOpenAI) -> None:
    history: list[Any] = user("Weather?")
    first = await hermes.responses.create(model="bundled", input=history, tools=[TOOL], tool_choice=NAMED)
    call: Any = first.output[0]
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    sent = [*history, *first.output, output]
    reply: Any = await hermes.responses.create(model="bundled", input=sent, tools=[TOOL], tool_choice="none")
    function = {"name": "get_weather", "arguments": call.arguments}
    called: Any = {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]}
    told: Any = {"role": "tool", "tool_call_id": call.call_id, "content": "sunny"}
    chat: Any = await hermes.chat.completions.create(model="bundled", messages=[*history, called, told])
    assert (len(first.output), call.type, reply.status) == (1, "function_call", "completed")
    assert reply.output_text == chat.choices[0].message.content
    assert reply.usage.input_tokens == chat.usage.prompt_tokens


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_errors_name_the_fields_of_this_endpoint(client: AsyncOpenAI, server: Server, is_streamed: bool) -> None:
    create: Any = client.responses.create
    with pytest.raises(openai.BadRequestError, match=r"max_output_tokens: .* max_tokens 4000 does not fit") as caught:
        await create(model="bundled", input=QUESTION, max_output_tokens=4000, stream=is_streamed)
    assert caught.value.param == "max_output_tokens"
    with pytest.raises(openai.BadRequestError, match=r"input: .* maximum context length is .* too many") as caught:
        await create(model="bundled", input="a" * 600, stream=is_streamed)
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    assert server.num_free_slots == SLOTS


ASKED: Any = {"model": "bundled", "input": QUESTION}
LOOK: Any = {"type": "function", "name": "look", "parameters": {"const": {"at": "a"}}}


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
        forced: Any = {"tools": [LOOK], "tool_choice": "required", "parallel_tool_calls": False}
        called = await client.responses.create(**ASKED, **forced, store=True)
        (call,) = called.output
        assert call.type == "function_call"
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "b"}
        reply = await client.responses.create(model="bundled", input=[output], previous_response_id=called.id)
        assert reply.status == "completed"


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
    store = ReplyStore(max_bytes=10_000)

    def keep(key: str, name: str, num_bytes: int) -> None:
        store.keep(key, name, StoredReply(b"", b"a" * (num_bytes - 1024)))

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


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /[^z]*/'}
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
            '299 - "tools of type local_shell, namespace, web_search are not supported here and were left out"'
        )
    assert [tool["name"] for tool in body["tools"]] == ["shell", "apply_patch"]
    assert body["prompt_cache_key"] == CODEX["prompt_cache_key"]
    probe = await post(server, RESPONSES, {**CODEX, "max_output_tokens": 1})
    assert (probe["status"], probe["usage"]["output_tokens"]) == ("incomplete", 1)
    forced = {**CODEX, "tools": CODEX["tools"][2:], "tool_choice": "required"}  # of those that were left out
    error = (await post(server, RESPONSES, forced, status=400))["error"]
    assert error["param"] == "tool_choice"
    assert error["message"].startswith("tool_choice is only allowed with tools: tools of type local_shell, ")
