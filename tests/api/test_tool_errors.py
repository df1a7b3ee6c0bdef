"""Requests with tools that make no sense: a 400 that names the field."""

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.api.tool_support import NAMED, WEATHER, body, tool


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
