"""Tool calls over HTTP: which may be made, what they look like to the client, the way back, and what is refused.

The server reads calls as Hermes writes them. Arguments are of kinds that end by themselves, so that any model will do.
"""

import json
from collections.abc import Collection
from typing import Any, Literal

import jsonschema_rs
import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict, Field

from chairlift.api import ServerConfig
from chairlift.api.answers.dialect import Dialect
from chairlift.api.answers.text import CallPiece, ContentPiece
from chairlift.api.openai.chat import ChatCompletionRequest
from tests.api.conftest import Server
from tests.api.contract import check_chat, counts, user

CITY = {"type": "string", "enum": ["Oslo", "Rome", "São Paulo"]}
COLOURS = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 2}


def closed(**properties: Any) -> dict[str, Any]:
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": closed(city=CITY, days={"type": "integer", "minimum": 1, "maximum": 7}),
    "paint": closed(colours=COLOURS),
}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMAS[name], **fields}}


WEATHER, PAINT = tool("get_weather", description="The forecast"), tool("paint")
NAMED = {"type": "function", "function": {"name": "paint"}}
QUESTION = user("What is the weather in Oslo?")
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": {"a": 1}}}}
BEGIN_A_CALL = {str(ord("<")): 100}  # no argument of these tools holds such a mark, so it appears where a call begins
BEGIN_AN_OBJECT = {str(ord("{")): 100}


def body(**fields: Any) -> Any:
    return {"model": "bundled", "messages": QUESTION, "tools": [WEATHER, PAINT], "temperature": 0, **fields}


async def complete(client: AsyncOpenAI, **fields: Any) -> Any:
    """The reply; its shape was checked."""
    raw = await client.chat.completions.with_raw_response.create(**body(**fields))
    return check_chat(json.loads(raw.text))


def assert_is_valid(call: Any) -> None:
    assert call.type == "function"
    assert call.id.startswith("call_")
    jsonschema_rs.validator_for(SCHEMAS[call.function.name]).validate(json.loads(call.function.arguments))


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 2.0}, {"response_format": FORM}])
@pytest.mark.parametrize(("choice", "names"), [("required", SCHEMAS.keys()), (NAMED, {"paint"})])
async def test_a_forced_call_is_made_and_is_valid_whatever_else_is_wanted(
    hermes: AsyncOpenAI, choice: Any, names: Collection[str], fields: dict[str, Any]
) -> None:
    reply = await complete(hermes, tool_choice=choice, seed=1, n=3, parallel_tool_calls=False, **fields)
    for answer in reply.choices:
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        (call,) = answer.message.tool_calls
        assert call.function.name in names
        assert_is_valid(call)
    assert len({answer.message.tool_calls[0].id for answer in reply.choices}) == 3


async def test_none_means_that_the_model_does_not_even_hear_of_tools(hermes: AsyncOpenAI) -> None:
    without = await complete(hermes, messages=user("Hello!"), tools=openai.NOT_GIVEN)
    none = await complete(hermes, messages=user("Hello!"), tool_choice="none")
    assert none.choices[0].message == without.choices[0].message
    assert none.choices[0].message.tool_calls is None
    assert counts(none.usage) == counts(without.usage)
    assert none.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["auto", None])
async def test_auto_leaves_it_to_the_model(hermes: AsyncOpenAI, choice: Literal["auto"] | None) -> None:
    """Beside a wanted format the answer is either that or a call; a bias for the first character makes it sure."""
    strict = [tool("get_weather", strict=True), tool("paint", strict=True)]
    fields = {"tools": strict, "tool_choice": choice, "response_format": FORM, "parallel_tool_calls": False}
    (called,) = (await complete(hermes, **fields, logit_bias=BEGIN_A_CALL)).choices
    (answered,) = (await complete(hermes, **fields, logit_bias=BEGIN_AN_OBJECT)).choices
    assert (called.finish_reason, called.message.content) == ("tool_calls", None)
    (call,) = called.message.tool_calls
    assert_is_valid(call)
    assert (answered.finish_reason, answered.message.content) == ("stop", '{"a": 1}')
    assert answered.message.tool_calls is None


async def test_calls_may_be_several_unless_they_must_not(hermes: AsyncOpenAI) -> None:
    """The bias makes the model go on with another call for as long as it may."""
    fields = {"tool_choice": NAMED, "logit_bias": {"10": 100, "60": 100, "257": -100}, "max_tokens": 200}
    several = (await complete(hermes, **fields)).choices[0]
    single = (await complete(hermes, **fields, parallel_tool_calls=False)).choices[0]
    assert len(several.message.tool_calls) > 1
    assert several.finish_reason == "length"
    assert len({call.id for call in several.message.tool_calls}) == len(several.message.tool_calls)
    for call in several.message.tool_calls[:-1]:
        assert_is_valid(call)
    assert (len(single.message.tool_calls), single.finish_reason) == (1, "tool_calls")


ANY_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
UNCONSTRAINED = {"name": "get_weather", "parameters": ANY_CITY}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_with_at_most_one_call_ends_with_it(client: AsyncOpenAI, stream: bool) -> None:
    """Nobody would see what follows, so nobody pays for it. Nothing is enforced here, and no end token counts."""
    tools = [{"type": "function", "function": UNCONSTRAINED}]
    fields = body(tools=tools, max_tokens=300, parallel_tool_calls=False, extra_body={"ignore_eos": True}, n=2)
    if stream:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        replies = [chunk async for chunk in await client.chat.completions.create(**fields, **options)]
    else:
        replies = [await client.chat.completions.create(**fields)]
        for choice in replies[0].choices:
            ((call,), content) = (choice.message.tool_calls or [], choice.message.content)
            assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
            assert content is None
    reasons = [choice.finish_reason for reply in replies for choice in reply.choices if choice.finish_reason]
    assert reasons == ["tool_calls", "tool_calls"]
    assert replies[-1].usage.completion_tokens < 2 * 100


async def test_a_response_with_at_most_one_call_ends_with_it(client: AsyncOpenAI) -> None:
    fields: Any = {"tools": [{"type": "function", **UNCONSTRAINED}], "extra_body": {"ignore_eos": True}}
    fields |= {"model": "bundled", "input": QUESTION, "parallel_tool_calls": False, "max_output_tokens": 300}
    reply = await client.responses.create(**fields)
    assert (reply.status, [item.type for item in reply.output]) == ("completed", ["function_call"])
    assert reply.usage.output_tokens < 100


async def test_a_call_that_max_tokens_cuts_has_ended_for_that_reason(hermes: AsyncOpenAI) -> None:
    (choice,) = (await complete(hermes, tool_choice=NAMED, max_tokens=56)).choices
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls
    assert call.function.name == "paint"
    assert call.function.arguments.startswith('{"colours"')


async def test_the_deltas_of_a_call_name_it_once_and_then_bring_its_arguments(hermes: AsyncOpenAI) -> None:
    fields = body(tool_choice=NAMED, parallel_tool_calls=False)
    (whole,) = (await complete(hermes, **fields)).choices
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    stream: Any = await hermes.chat.completions.create(**fields, **options)
    *chunks, usage = [chunk async for chunk in stream]
    assert len({(chunk.id, chunk.created) for chunk in [*chunks, usage]}) == 1
    assert (usage.choices, usage.usage is None) == ([], False)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert (deltas[0].role, deltas[0].tool_calls) == ("assistant", None)
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert {call.index for call in calls} == {0}
    assert [(call.id is None, call.type) for call in calls] == [(False, "function")] + [(True, None)] * (len(calls) - 1)
    assert [call.function and call.function.name for call in calls] == ["paint"] + [None] * (len(calls) - 1)
    arguments = "".join(call.function.arguments or "" for call in calls if call.function)
    assert arguments == whole.message.tool_calls[0].function.arguments
    assert not any(delta.content for delta in deltas)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["tool_calls"]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def chained(length: int) -> dict[str, Any]:
    chain = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(length)}
    return {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": {**chain, f"d{length}": {"type": "string"}}}


def strict(parameters: Any) -> dict[str, Any]:
    return tool("paint", parameters=parameters, strict=True)


def said(role: str, arguments: str, **fields: Any) -> list[dict[str, Any]]:
    call = {"id": "a", "type": "function", "function": {"name": "paint", "arguments": arguments}}
    return [{"role": role, "tool_calls": [call], **fields}]


OTHER = {"type": "function", "function": {"name": "x"}}
BROKEN = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string", "pattern": "(a"}}}
PARAMETERS = "the parameters of function 'paint'"
TOO_LONG = f"tools: the schema of {PARAMETERS} has more than 262144 characters; simplify it"
TOO_LARGE = f"tools: {PARAMETERS} cannot be compiled: too deeply nested or too large; simplify it"
TOO_DEEP = f"tools: the schema of {PARAMETERS} is nested more than 120 levels deep; simplify it"
UNCLOSED = "response_format: the schema cannot be compiled: regex parse error: (a ^ error: unclosed group"
SECOND = [WEATHER, strict({"$ref": "#/x"})]
MANY_REFERENCES = [WEATHER, strict(chained(2500))]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("tool_choice", {"tool_choice": OTHER}, "no tool 'x'"),
    ("tool_choice", {"tools": None, "tool_choice": NAMED}, "only allowed with tools"),
    ("tool_choice", {"tools": [], "tool_choice": "required"}, "only allowed with tools"),
    ("tool_choice", {"tool_choice": "perhaps"}, "'none', 'auto' or 'required'"),
    (
        "tools",
        {"tools": [{"type": "mcp", "server_label": "x"}]},
        "type 'mcp' is not supported; known here: function, custom",
    ),
    ("tools", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "pattern"),
    ("tools", {"tools": [strict({"type": "array"})]}, "must be a JSON schema of type object"),
    (
        "tools",
        {"tools": [strict({"properties": {"a": {"type": "nonsense"}}})]},
        f"{PARAMETERS} cannot be compiled: Inv",
    ),
    ("tools", {"tools": SECOND, "tool_choice": "required"}, f"{PARAMETERS} cannot be compiled: Pointer '/x' does not"),
    ("response_format", {"response_format": BROKEN}, UNCLOSED),
    ("tools", {"tools": [WEATHER, strict(nested(70))]}, TOO_DEEP),
    ("tools", {"tools": MANY_REFERENCES, "tool_choice": NAMED}, TOO_LARGE),
    ("tools", {"tools": [WEATHER, strict({"title": "x" * 300_000})]}, TOO_LONG),
    (
        "tools",
        {"tools": [strict({"title": "x" * 100_000})] * 3},
        "tools: the schemas are too large together; leave out",
    ),
    ("tools", {"tools": [WEATHER] * 129}, "at most 128"),
    ("guided_regex", {"extra_body": {"guided_regex": "a"}}, "only ask for JSON"),
    (
        "messages.0.tool_calls",
        {"messages": said("user", "{}", content="a")},
        "unknown or unsupported field: messages.0.t",
    ),
]


async def test_what_makes_no_sense_is_refused_by_name(hermes: AsyncOpenAI) -> None:
    for param, fields, words in REFUSED:
        with pytest.raises(openai.BadRequestError) as caught:
            await hermes.chat.completions.create(**body(**fields))
        assert caught.value.param == param, words
        assert words in caught.value.message
        assert not any(generated in caught.value.message for generated in ("%json", "call_0", "x-guidance")), words


def test_calls_without_marks_are_found_in_a_text_unless_a_grammar_says_where_they_may_be(server: Server) -> None:
    asked = ChatCompletionRequest.model_validate(body(messages=user("Hi")))
    dialect = Dialect(server.llm.inputs, ServerConfig.model_validate({"tool_call_parser": "llama3_json"}))
    text, kinds = 'So: {"name": "paint", "parameters": {}}', []
    for is_free in (True, False):
        reading = dialect.reading(asked, asked.functions_to_call(), [1], is_continued=False, is_free=is_free)
        kinds.append([type(piece) for piece in reading.new_reader().push(text, is_last=True)])
    assert kinds == [[ContentPiece, CallPiece, CallPiece], [ContentPiece]]


async def test_what_a_tool_said_in_parts_is_the_same(hermes: AsyncOpenAI) -> None:
    asked = [*QUESTION, *said("assistant", '{"colours": ["red"]}')]
    parts = [{"type": "text", "text": "do"}, {"type": "text", "text": "ne"}]
    told: list[Any] = [{"role": "tool", "tool_call_id": "a", "content": content} for content in ("done", parts)]
    whole, pieces = [await complete(hermes, messages=[*asked, each]) for each in told]
    assert counts(pieces.usage) == counts(whole.usage)
    assert pieces.choices[0].message.content == whole.choices[0].message.content


class Forecast(BaseModel):
    """The forecast for a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=7)


async def test_what_the_clients_helpers_parse_can_be_sent_back(hermes: AsyncOpenAI) -> None:
    """They add fields of their own to it: parsed, parsed_arguments, and index where the call was streamed."""
    fields = body(tools=[openai.pydantic_function_tool(Forecast)], tool_choice="required", parallel_tool_calls=False)
    parsed: Any = (await hermes.chat.completions.parse(**fields)).choices[0].message
    async with hermes.chat.completions.stream(**fields) as stream:
        streamed: Any = (await stream.get_final_completion()).choices[0].message
    for message in (parsed, streamed):
        (call,) = message.tool_calls
        assert call.function.name == "Forecast"
        assert isinstance(call.function.parsed_arguments, Forecast)
        result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
        for sent in (message, message.model_dump(), message.to_dict()):
            reply = await complete(hermes, messages=[*QUESTION, sent, result], tools=openai.NOT_GIVEN, max_tokens=3)
            assert reply.choices[0].finish_reason in ("stop", "length")


INTEGER = {"type": "integer"}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": closed(city={"type": "string"})}},
    {"type": "function", "function": {"name": "add", "parameters": closed(a=INTEGER, b=INTEGER)}},
]


@pytest.mark.parametrize(
    ("question", "name", "arguments", "result"),
    [
        ("What is the weather in Oslo?", "get_weather", {"city": "Oslo"}, "rainy"),
        ("What is 17 + 25?", "add", {"a": 17, "b": 25}, "42"),
    ],
)
async def test_the_bundled_model_calls_the_right_tool_by_itself_and_uses_what_it_says(
    client: AsyncOpenAI, question: str, name: str, arguments: dict[str, Any], result: str
) -> None:
    fields: dict[str, Any] = {"model": "bundled", "tools": TOOLS, "temperature": 0}
    messages: list[Any] = user(question)
    asked = (await client.chat.completions.create(**fields, messages=messages)).choices[0]
    assert (asked.finish_reason, asked.message.content) == ("tool_calls", None)
    (call,) = asked.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == (name, arguments)
    messages += [asked.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    answered = (await client.chat.completions.create(**fields, messages=messages)).choices[0]
    assert answered.finish_reason == "stop"
    assert result in (answered.message.content or "")


async def test_the_bundled_model_does_not_call_what_it_does_not_need(client: AsyncOpenAI) -> None:
    (choice,) = (await complete(client, tools=TOOLS, messages=user("Hello!"))).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert choice.message.content.startswith("Hello")
