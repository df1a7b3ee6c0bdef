"""Tools whose calls end by themselves whatever the model, and a client's requests and replies with them."""

import json
from typing import Any

import jsonschema_rs
from openai import AsyncOpenAI

from tests.api.contract import check_chat

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
