"""The bundled model's chat template: its prompts as in training, byte for byte, in time that grows with their size."""

import time
from pathlib import Path
from typing import Any

import pytest

from chairlift.engine.text.tokenizer import ChatOptions, Tokenizer
from chairlift.errors import InvalidRequest
from chairlift.models.checkpoint import find_model

# What the model was trained with. It joins lists and texts in loops, which takes time by the square of their number.
TRAINED_WITH = """\
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
PLAIN = [{"role": "user", "content": "What is 2 + 2?"}]
SYSTEM = [{"role": "system", "content": "You add."}, *PLAIN]
CALLED: list[dict[str, Any]] = [
    *SYSTEM,
    {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "zwei é"}}},
            {"type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}},
        ],
    },
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "4"},
    *PLAIN,
]


def tool(name: str, properties: Any = None, **parameters: Any) -> dict[str, Any]:
    if properties is not None:
        parameters["properties"] = properties
    return {"type": "function", "function": {"name": name, "description": "does it", "parameters": parameters}}


TOOL_SETS: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "one": [tool("add", {"a": {"type": "integer"}, "b": {"type": "number", "description": "second"}})],
    "without parameters": [tool("now"), {"type": "function", "function": {"name": "later"}}, tool("never", {})],
    "null parameters": [{"type": "function", "function": {"name": "f", "parameters": None}}],
    "several types": [tool("f", {"a": {"type": ["string", "null"]}, "b": {}, "c": {"enum": [1]}, "d": {"type": ""}})],
    "several": [tool("f", {"a": {"type": "string"}}), tool("g"), tool("h", {"x": {"type": "array"}, "y": {}})],
    "odd names": [tool("f(x)\n", {"a, b": {"type": "é"}, "": {"type": "object", "properties": {}}})],
}


def load(template: str, directory: Path) -> Tokenizer:
    path = directory / "template.jinja"
    path.write_text(template)
    return Tokenizer(find_model("bundled"), str(path))


@pytest.fixture(scope="module")
def bundled() -> Tokenizer:
    return Tokenizer(find_model("bundled"))


@pytest.mark.parametrize("messages", [PLAIN, SYSTEM, CALLED], ids=["plain", "system", "called"])
@pytest.mark.parametrize("name", TOOL_SETS)
def test_prompts_are_those_of_training(
    bundled: Tokenizer, tmp_path: Path, name: str, messages: list[dict[str, Any]]
) -> None:
    trained = load(TRAINED_WITH, tmp_path)
    for begins_answer in (True, False):
        options = ChatOptions(tools=list(TOOL_SETS[name]), add_generation_prompt=begins_answer)
        assert bundled.render_chat(messages, options) == trained.render_chat(messages, options)


@pytest.mark.parametrize("schema", [7, [], None, {"type": 7}, {"type": []}])
def test_what_it_cannot_show_is_refused_as_before(bundled: Tokenizer, tmp_path: Path, schema: Any) -> None:
    options = ChatOptions(tools=[tool("f", {"a": schema})])
    assert outcome(bundled, options) == outcome(load(TRAINED_WITH, tmp_path), options)


def outcome(tokenizer: Tokenizer, options: ChatOptions) -> str:
    try:
        return tokenizer.render_chat(PLAIN, options)
    except InvalidRequest as error:
        return str(error)


@pytest.mark.parametrize("num_tools", [1, 20_000])
def test_time_grows_with_tools_and_properties_and_not_by_their_square(bundled: Tokenizer, num_tools: int) -> None:
    properties = {f"property_{index}": {"type": "string"} for index in range(100_000 // num_tools)}
    options = ChatOptions(tools=[tool("f", properties)] * num_tools)
    start = time.process_time()
    rendered = bundled.render_chat(PLAIN, options)
    assert time.process_time() - start < 4.0  # some 12 and 6 s if texts and lists are joined in loops
    assert rendered.count(": string") == 100_000
