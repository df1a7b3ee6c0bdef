"""Tool calls over HTTP: which calls may be made, what they look like to the client, and the way back.

The server reads calls as Hermes writes them. Arguments are of kinds that end by themselves, so that any model will do.
"""

import json
from typing import Any, Literal

import jsonschema_rs
import openai
import pytest
from openai import AsyncOpenAI

from tests.api.contract import counts
from tests.api.tool_support import (
    BEGIN_A_CALL,
    BEGIN_AN_OBJECT,
    NAMED,
    PAINT_SCHEMA,
    QUESTION,
    assert_is_valid,
    body,
    complete,
    tool,
)

# --- tool_choice


@pytest.mark.parametrize("temperature", [0.0, 2.0])
async def test_a_required_call_is_made_and_is_valid(hermes: AsyncOpenAI, temperature: float) -> None:
    reply = await complete(
        hermes, tool_choice="required", temperature=temperature, seed=1, n=3, parallel_tool_calls=False
    )
    for choice in reply.choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls
        assert_is_valid(call)
    assert len({choice.message.tool_calls[0].id for choice in reply.choices}) == 3


async def test_the_tool_that_is_named_is_called(hermes: AsyncOpenAI) -> None:
    for seed in range(3):
        reply = await complete(hermes, tool_choice=NAMED, temperature=2.0, seed=seed, parallel_tool_calls=False)
        (choice,) = reply.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert [call.function.name for call in choice.message.tool_calls] == ["paint"]
        assert_is_valid(choice.message.tool_calls[0])


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


async def test_a_strict_function_is_called_with_what_fits_also_under_auto(hermes: AsyncOpenAI) -> None:
    strict = [tool("get_weather", strict=True)]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 1}}}
    for seed in range(3):
        reply = await complete(
            hermes,
            tools=strict,
            response_format=form,
            logit_bias=BEGIN_A_CALL,
            temperature=2.0,
            seed=seed,
            parallel_tool_calls=False,
        )
        assert reply.choices[0].finish_reason == "tool_calls"
        assert_is_valid(reply.choices[0].message.tool_calls[0])


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
