"""Writes tools, calls and their results in the format that the chat template gives them.

The system turn ends in one line per tool, such as `get_weather(city: string)`. A call is
`<tool_call>`, a line of JSON with "name" and "arguments", and `</tool_call>`, each on its own line; its
result comes back in a user turn as `<tool_response>`, the text, and `</tool_response>`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Value = str | int | float

_BUNDLED = Path(__file__).parents[2] / "chairlift" / "models" / "bundled"

CHAT_TEMPLATE = (_BUNDLED / "chat_template.jinja").read_text(encoding="utf-8")
"""The bundled model's own, so that to train it anew changes nothing of it."""


@dataclass(frozen=True)
class Tool:
    """Holds a function that is offered: its name, and the names and JSON types of its parameters."""

    name: str
    parameters: tuple[tuple[str, str], ...]

    def line(self) -> str:
        """Returns the tool as the system turn lists it: `add(a: integer, b: integer)`."""
        return f"{self.name}({', '.join(f'{name}: {kind}' for name, kind in self.parameters)})"

    def schema(self) -> dict[str, Any]:
        """Returns the tool in the shape of the OpenAI API."""
        properties = {name: {"type": kind} for name, kind in self.parameters}
        parameters = {"type": "object", "properties": properties}
        return {"type": "function", "function": {"name": self.name, "description": "", "parameters": parameters}}


@dataclass(frozen=True)
class Call:
    """Holds one call of a tool."""

    name: str
    arguments: dict[str, Value]

    def text(self) -> str:
        """Returns the call as the assistant writes it."""
        body = json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"

    def as_message_part(self) -> dict[str, Any]:
        """Returns the call in the shape of the OpenAI API, with its arguments as an object."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def system_text(tools: Sequence[Tool], instructions: str) -> str:
    """Writes the system turn's text: instructions, if there are any, and the tools."""
    lines = [instructions] if instructions else []
    return "\n".join([*lines, "Tools:", *(tool.line() for tool in tools)])


def calls_text(calls: Sequence[Call]) -> str:
    """Writes what the assistant says to make some calls."""
    return "\n".join(call.text() for call in calls)


def response_text(content: str) -> str:
    """Returns the text of the user turn that brings back a tool's result."""
    return f"<tool_response>\n{content}\n</tool_response>"
