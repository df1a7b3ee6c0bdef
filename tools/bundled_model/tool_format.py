"""How tools, calls and their results are written: the format that the chat template gives them.

The system turn ends in one line per tool, such as `get_weather(city: string)`. A call is
`<tool_call>`, a line of JSON with "name" and "arguments", and `</tool_call>`, each on its own line; its
result comes back in a user turn as `<tool_response>`, the text, and `</tool_response>`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Value = str | int | float

CHAT_TEMPLATE = """\
{%- if tools %}
    {%- set lines = namespace(text='Tools:') %}
    {%- for tool in tools %}
        {%- set function = tool['function'] %}
        {%- set found = namespace(parameters=[]) %}
        {%- for name, schema in ((function['parameters'] or {})['properties'] or {})|items %}
            {%- set type = schema['type'] or 'string' %}
            {%- set type = type if type is string else type[0] %}
            {%- set found.parameters = found.parameters + [name + ': ' + type] %}
        {%- endfor %}
        {%- set lines.text = lines.text + '\\n' + function['name'] + '(' + found.parameters|join(', ') + ')' %}
    {%- endfor %}
    {%- set first_is_system = messages and messages[0]['role'] == 'system' %}
    {%- set text = messages[0]['content'] if first_is_system else '' %}
    {{- '<|system|>' + (text + '\\n' if text else '') + lines.text + '<|im_end|>' }}
    {%- set messages = messages[1:] if first_is_system else messages %}
{%- endif %}
{%- for message in messages %}
    {%- set content = message['content'] or '' %}
    {%- if message['role'] == 'tool' %}
        {{- '<|user|><tool_response>\\n' + content + '\\n</tool_response><|im_end|>' }}
    {%- else %}
        {{- '<|' + message['role'] + '|>' + content }}
        {%- for call in message['tool_calls'] or [] %}
            {%- set arguments = call['function']['arguments'] %}
            {{- '\\n' if content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": ' + call['function']['name']|tojson + ', "arguments": ' }}
            {{- arguments if arguments is string else arguments|tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


@dataclass(frozen=True)
class Tool:
    """A function that is offered: its name, and the names and JSON types of its parameters."""

    name: str
    parameters: tuple[tuple[str, str], ...]

    def line(self) -> str:
        """The tool as the system turn lists it: `add(a: integer, b: integer)`."""
        return f"{self.name}({', '.join(f'{name}: {kind}' for name, kind in self.parameters)})"

    def schema(self) -> dict[str, Any]:
        """The tool in the shape of the OpenAI API."""
        properties = {name: {"type": kind} for name, kind in self.parameters}
        parameters = {"type": "object", "properties": properties}
        return {"type": "function", "function": {"name": self.name, "description": "", "parameters": parameters}}


@dataclass(frozen=True)
class Call:
    """One call of a tool."""

    name: str
    arguments: dict[str, Value]

    def text(self) -> str:
        """The call as the assistant writes it."""
        body = json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"

    def as_message_part(self) -> dict[str, Any]:
        """The call in the shape of the OpenAI API, with its arguments as an object."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def system_text(tools: Sequence[Tool], instructions: str) -> str:
    """The system turn's text: instructions, if there are any, and the tools."""
    lines = [instructions] if instructions else []
    return "\n".join([*lines, "Tools:", *(tool.line() for tool in tools)])


def calls_text(calls: Sequence[Call]) -> str:
    """What the assistant says to make some calls."""
    return "\n".join(call.text() for call in calls)


def response_text(content: str) -> str:
    """The text of the user turn that brings back a tool's result."""
    return f"<tool_response>\n{content}\n</tool_response>"
