"""Requests with tools that make no sense: a 400 that names the field."""

from typing import Any

import openai
import pytest

from tests.api.contract import hermes_client
from tests.api.tool_support import WEATHER, body, tool

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no such tool": ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "no tool 'x'"),
    "a choice without tools": ({"tools": None, "tool_choice": "auto"}, "tool_choice", "only allowed with tools"),
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
        "Invalid type: nonsense",
    ),
    "more tools than the specification allows": ({"tools": [WEATHER] * 129}, "tools", "at most 128"),
    "a regex beside tools": ({"extra_body": {"guided_regex": "a"}}, "guided_regex", "only ask for JSON"),
    "a call and a format": (
        {"tool_choice": "required", "response_format": {"type": "json_object"}},
        "tool_choice",
        "response_format",
    ),
    "a result without a call": (
        {"messages": [{"role": "tool", "content": "4"}]},
        "messages",
        "tool_call_id belongs to messages with role tool",
    ),
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
        "messages",
        "only an assistant's message",
    ),
}


@pytest.mark.asyncio
async def test_what_makes_no_sense_is_refused_by_name() -> None:
    async with hermes_client() as client:
        for name, (fields, param, words) in REFUSED.items():
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(**body(**fields))
            assert caught.value.param == param, name
            assert words in caught.value.message, name
