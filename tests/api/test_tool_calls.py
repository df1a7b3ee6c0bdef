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

from tests.api.contract import check_chat, counts

WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Rome", "São Paulo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}

PAINT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colours": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 2}},
    "required": ["colours"],
    "additionalProperties": False,
}

SCHEMAS = {"get_weather": WEATHER_SCHEMA, "paint": PAINT_SCHEMA}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMAS[name], **fields}}


WEATHER, PAINT = tool("get_weather", description="The forecast"), tool("paint")
NAMED = {"type": "function", "function": {"name": "paint"}}
QUESTION = [{"role": "user", "content": "What is the weather in Oslo?"}]
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


# --- tool_choice


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize(("choice", "names"), [("required", SCHEMAS.keys()), (NAMED, {"paint"})])
async def test_a_forced_call_is_made_and_is_valid(
    hermes: AsyncOpenAI, choice: Any, names: Collection[str], temperature: float
) -> None:
    reply = await complete(hermes, tool_choice=choice, temperature=temperature, seed=1, n=3, parallel_tool_calls=False)
    for answer in reply.choices:
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        (call,) = answer.message.tool_calls
        assert call.function.name in names
        assert_is_valid(call)
    assert len({answer.message.tool_calls[0].id for answer in reply.choices}) == 3


async def test_none_means_that_the_model_does_not_even_hear_of_tools(hermes: AsyncOpenAI) -> None:
    without = await complete(hermes, tools=openai.NOT_GIVEN)
    none = await complete(hermes, tool_choice="none")
    assert none.choices[0].message == without.choices[0].message
    assert none.choices[0].message.tool_calls is None
    assert counts(none.usage) == counts(without.usage)
    assert none.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["auto", None])
async def test_auto_leaves_it_to_the_model(hermes: AsyncOpenAI, choice: Literal["auto"] | None) -> None:
    """Beside a wanted format the answer is either that or a call; a bias for the first character makes it sure."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": {"a": 1}}}}
    strict = [tool("get_weather", strict=True), tool("paint", strict=True)]
    fields = {"tools": strict, "tool_choice": choice, "response_format": form, "parallel_tool_calls": False}
    called = await complete(hermes, **fields, logit_bias=BEGIN_A_CALL)
    answered = await complete(hermes, **fields, logit_bias=BEGIN_AN_OBJECT)
    assert (called.choices[0].finish_reason, called.choices[0].message.content) == ("tool_calls", None)
    (call,) = called.choices[0].message.tool_calls
    assert_is_valid(call)
    assert (answered.choices[0].finish_reason, answered.choices[0].message.content) == ("stop", '{"a": 1}')
    assert answered.choices[0].message.tool_calls is None


async def test_calls_may_be_several_unless_they_must_not(hermes: AsyncOpenAI) -> None:
    """The bias makes the model go on with another call for as long as it may."""
    fields = {"tool_choice": NAMED, "logit_bias": {"10": 100, "60": 100, "257": -100}, "max_tokens": 300}
    several = (await complete(hermes, **fields)).choices[0]
    single = (await complete(hermes, **fields, parallel_tool_calls=False)).choices[0]
    assert len(several.message.tool_calls) > 1
    assert several.finish_reason == "length"
    assert len({call.id for call in several.message.tool_calls}) == len(several.message.tool_calls)
    for call in several.message.tool_calls[:-1]:
        assert_is_valid(call)
    assert (len(single.message.tool_calls), single.finish_reason) == (1, "tool_calls")


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
UNCONSTRAINED: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_answer_with_at_most_one_call_ends_with_it(client: AsyncOpenAI, is_streamed: bool) -> None:
    """Nobody would see what follows, so nobody pays for it. Nothing is enforced here, and no end token counts."""
    fields: Any = {
        **body(tools=UNCONSTRAINED, max_tokens=300, parallel_tool_calls=False, extra_body={"ignore_eos": True}, n=2),
        "stream": is_streamed,
        **({"stream_options": {"include_usage": True}} if is_streamed else {}),
    }
    if is_streamed:
        chunks = [chunk async for chunk in await client.chat.completions.create(**fields)]
        usage = chunks[-1].usage
        reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    else:
        reply = await client.chat.completions.create(**fields)
        usage = reply.usage
        reasons = [choice.finish_reason for choice in reply.choices]
        for choice in reply.choices:
            ((call,), content) = (choice.message.tool_calls or [], choice.message.content)
            assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
            assert content is None
    assert reasons == ["tool_calls", "tool_calls"]
    assert usage.completion_tokens < 2 * 100


async def test_a_response_with_at_most_one_call_ends_with_it(client: AsyncOpenAI) -> None:
    tools: Any = [{"type": "function", **UNCONSTRAINED[0]["function"]}]
    reply = await client.responses.create(
        model="bundled",
        input=QUESTION[0]["content"],
        tools=tools,
        parallel_tool_calls=False,
        max_output_tokens=300,
        extra_body={"ignore_eos": True},
    )
    assert (reply.status, [item.type for item in reply.output]) == ("completed", ["function_call"])
    assert reply.usage is not None
    assert reply.usage.output_tokens < 100


async def test_a_forced_call_wins_over_a_wanted_format(hermes: AsyncOpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 1}}}
    for choice in (NAMED, "required"):
        reply = await complete(hermes, tool_choice=choice, response_format=form, parallel_tool_calls=False)
        (call,) = reply.choices[0].message.tool_calls
        assert_is_valid(call)
        assert (reply.choices[0].finish_reason, reply.choices[0].message.content) == ("tool_calls", None)


async def test_a_call_that_max_tokens_cuts_has_ended_for_that_reason(hermes: AsyncOpenAI) -> None:
    (choice,) = (await complete(hermes, tool_choice=NAMED, max_tokens=56)).choices
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls
    assert call.function.name == "paint"
    assert call.function.arguments.startswith('{"colours"')


# --- streams


async def test_a_streamed_call_that_the_client_puts_together_is_the_whole_one(hermes: AsyncOpenAI) -> None:
    fields = body(tool_choice="required", parallel_tool_calls=False)
    whole = (await hermes.chat.completions.create(**fields)).choices[0]
    async with hermes.chat.completions.stream(**fields) as stream:
        kinds = [event.type async for event in stream]
        final = (await stream.get_final_completion()).choices[0]
    assert final.finish_reason == whole.finish_reason == "tool_calls"
    assert final.message.content is None or final.message.content == ""
    (streamed,), (call,) = final.message.tool_calls or [], whole.message.tool_calls or []
    assert streamed.function.name == call.function.name
    assert streamed.function.arguments == call.function.arguments
    assert "tool_calls.function.arguments.delta" in kinds
    assert kinds.count("tool_calls.function.arguments.done") == 1


async def test_the_deltas_of_a_call_name_it_once_and_then_bring_its_arguments(hermes: AsyncOpenAI) -> None:
    stream = await hermes.chat.completions.create(
        **body(tool_choice=NAMED, parallel_tool_calls=False, stream=True, stream_options={"include_usage": True})
    )
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
    jsonschema_rs.validator_for(PAINT_SCHEMA).validate(json.loads(arguments))
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


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no such tool": ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "no tool 'x'"),
    "a named choice without tools": (
        {"tools": None, "tool_choice": {"type": "function", "function": {"name": "paint"}}},
        "tool_choice",
        "only allowed with tools",
    ),
    "required without tools": ({"tools": [], "tool_choice": "required"}, "tool_choice", "only allowed with tools"),
    "an unknown choice": ({"tool_choice": "perhaps"}, "tool_choice", "'none', 'auto' or 'required'"),
    "an unknown kind of tool": ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools", "'function'"),
    "a name with blanks": ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "pattern"),
    "parameters that are no object": (
        {"tools": [tool("paint", parameters={"type": "array"}, strict=True)]},
        "tools",
        "must be a JSON schema of type object",
    ),
    "a strict schema that cannot be compiled": (
        {"tools": [tool("paint", parameters={"properties": {"a": {"type": "nonsense"}}}, strict=True)]},
        "tools",
        "the parameters of function 'paint' cannot be compiled: Invalid type: nonsense",
    ),
    "the second of two schemas that must be enforced": (
        {"tools": [WEATHER, tool("paint", parameters={"$ref": "#/x"}, strict=True)], "tool_choice": "required"},
        "tools",
        "the parameters of function 'paint' cannot be compiled: Pointer '/x' does not exist",
    ),
    "an answer's schema beside tools": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "string", "pattern": "(a"}},
            }
        },
        "response_format",
        "response_format: the schema cannot be compiled: regex parse error: (a ^ error: unclosed group",
    ),
    "a schema that is nested too deeply": (
        {"tools": [WEATHER, tool("paint", parameters=nested(70), strict=True)]},
        "tools",
        "tools: the schema of the parameters of function 'paint' is nested more than 120 levels deep; simplify it",
    ),
    "a schema of too many references": (
        {"tools": [WEATHER, tool("paint", parameters=chained(2500), strict=True)], "tool_choice": NAMED},
        "tools",
        "tools: the parameters of function 'paint' cannot be compiled: too deeply nested or too large; simplify it",
    ),
    "a schema that is too long": (
        {"tools": [WEATHER, tool("paint", parameters={"title": "x" * 300_000}, strict=True)]},
        "tools",
        "tools: the schema of the parameters of function 'paint' has more than 262144 characters; simplify it",
    ),
    "schemas that are too long together": (
        {"tools": [tool("paint", parameters={"title": "x" * 100_000}, strict=True)] * 3},
        "tools",
        "tools: the schemas are too large together; leave out some tools",
    ),
    "more tools than the specification allows": ({"tools": [WEATHER] * 129}, "tools", "at most 128"),
    "a regex beside tools": ({"extra_body": {"guided_regex": "a"}}, "guided_regex", "only ask for JSON"),
    "arguments that are no object": (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "[1]"}}],
                }
            ]
        },
        "messages",
        "not a JSON object: '[1]'",
    ),
    "calls of a user": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": "a",
                    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                }
            ]
        },
        "messages.0.tool_calls",
        "unknown or unsupported field: messages.0.tool_calls",
    ),
}


async def test_what_makes_no_sense_is_refused_by_name(hermes: AsyncOpenAI) -> None:
    for name, (fields, param, words) in REFUSED.items():
        with pytest.raises(openai.BadRequestError) as caught:
            await hermes.chat.completions.create(**body(**fields))
        assert caught.value.param == param, name
        assert words in caught.value.message, name
        assert not any(generated in caught.value.message for generated in ("%json", "call_0", "x-guidance")), name
