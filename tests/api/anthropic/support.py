"""Holds what the tests of `/v1/messages` share: the official client, and the strictest reading of what the server
says.
"""

import json
from typing import Any

from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from tests.api.conftest import Server
from tests.api.contract import MESSAGES, posted, undeclared

QUESTION: Any = [{"role": "user", "content": "What is 17 + 25?"}]
ANSWER = "17 + 25 = 42."
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


async def whole_of(server: Server, **fields: Any) -> Message:
    """A whole reply, which the client's own model reads strictly and of which it knows every field."""
    async with posted(server, {"max_tokens": 200, "messages": QUESTION, **fields}) as response:
        text = await response.text()
        assert response.status == 200, text
    message = Message.model_validate_json(text, strict=True)
    assert not list(undeclared(message))
    return message


async def events_of(server: Server, **fields: Any) -> list[Any]:
    """A stream's events, each read as strictly. Its name is its type."""
    async with posted(server, {"max_tokens": 200, "messages": QUESTION, **fields, "stream": True}) as response:
        raw = await response.text()
        assert response.status == 200, raw
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    *written, rest = raw.split("\n\n")
    assert rest == ""
    events = []
    for each in written:
        name, data = each.split("\n")
        event = _EVENT.validate_json(data.removeprefix("data: "), strict=True)
        assert name == f"event: {event.type}"
        assert not list(undeclared(event))
        events.append(event)
    return events


async def error_of(server: Server, status: int, body: Any, path: str = MESSAGES, **headers: str) -> dict[str, Any]:
    """The `error` of a reply that has exactly the shape that the specification gives errors."""
    async with posted(server, body, path, **headers) as response:
        reply = json.loads(await response.text())
        assert response.status == status, reply
        assert reply["request_id"] == response.headers["Request-Id"] == response.headers["X-Request-Id"]
    assert (reply["type"], set(reply)) == ("error", {"type", "error", "request_id"})
    assert set(reply["error"]) == {"type", "message"}
    error: dict[str, Any] = reply["error"]
    return error
