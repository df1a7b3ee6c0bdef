"""The way of a call back to the model, with its result; and the client's own helpers for tools."""

import json
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict, Field

from tests.api.contract import counts
from tests.api.test_tool_calls import QUESTION, body, complete


async def test_what_a_tool_said_in_parts_is_the_same(hermes: AsyncOpenAI) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "paint", "arguments": '{"colours": ["red"]}'}}
    said = {"role": "tool", "tool_call_id": "a"}
    asked = [*QUESTION, {"role": "assistant", "tool_calls": [call]}]
    whole = await complete(hermes, messages=[*asked, {**said, "content": "done"}])
    parts = [{"type": "text", "text": "do"}, {"type": "text", "text": "ne"}]
    pieces = await complete(hermes, messages=[*asked, {**said, "content": parts}])
    assert counts(pieces.usage) == counts(whole.usage)
    assert pieces.choices[0].message.content == whole.choices[0].message.content


# --- with the client's own helpers


class Forecast(BaseModel):
    """The forecast for a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=7)


async def test_parse_gives_a_calls_arguments_as_the_model_that_described_them(hermes: AsyncOpenAI) -> None:
    reply = await hermes.chat.completions.parse(
        model="bundled",
        messages=[{"role": "user", "content": "Oslo?"}],
        tools=[openai.pydantic_function_tool(Forecast)],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=2.0,
        seed=1,
    )
    (call,) = reply.choices[0].message.tool_calls or []
    assert call.function.name == "Forecast"
    assert isinstance(call.function.parsed_arguments, Forecast)


@pytest.mark.parametrize("form", ["as the client's object", "dumped", "to_dict"])
async def test_what_the_clients_helpers_return_can_be_sent_back(hermes: AsyncOpenAI, form: str) -> None:
    """They add fields of their own to it: parsed, parsed_arguments, and index where the call was streamed."""
    fields = body(tools=[openai.pydantic_function_tool(Forecast)], tool_choice="required", parallel_tool_calls=False)
    parsed: Any = (await hermes.chat.completions.parse(**fields)).choices[0].message
    async with hermes.chat.completions.stream(**fields) as stream:
        streamed: Any = (await stream.get_final_completion()).choices[0].message
    for message in (parsed, streamed):
        sent = {"dumped": message.model_dump(), "to_dict": message.to_dict()}.get(form, message)
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny."}
        reply = await complete(hermes, messages=[*QUESTION, sent, result], tools=openai.NOT_GIVEN, max_tokens=3)
        assert reply.choices[0].finish_reason in ("stop", "length")


# --- what the bundled model knows


def function(name: str, **properties: str) -> Any:
    fields = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [function("get_weather", city="string"), function("add", a="integer", b="integer")]


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
    messages: list[Any] = [{"role": "user", "content": question}]
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
    messages: list[Any] = [{"role": "user", "content": "Hello!"}]
    reply = await client.chat.completions.create(model="bundled", tools=TOOLS, messages=messages, temperature=0)
    assert reply.choices[0].finish_reason == "stop"
    assert (reply.choices[0].message.content or "").startswith("Hello")
    assert reply.choices[0].message.tool_calls is None
