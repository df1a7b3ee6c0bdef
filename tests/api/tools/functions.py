"""Functions for grammars to be of, the text of calls of them, and what tests of grammars are run over."""

import json

import pytest
from pydantic import BaseModel, ConfigDict

from chairlift.api.tools import ToolFamily
from chairlift.api.tools.grammars import FunctionSpec
from tests.api.tools.driving import byte_tokenizer, long_tokenizer

FAMILIES = pytest.mark.parametrize("family", list(ToolFamily))
JSON_FAMILIES = pytest.mark.parametrize("family", [ToolFamily.HERMES, ToolFamily.LLAMA3_JSON, ToolFamily.MISTRAL])
TOKENIZERS = pytest.mark.parametrize("tokenizer", [byte_tokenizer(), long_tokenizer()], ids=["bytes", "long tokens"])


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    city: str
    tags: list[str]


class WeatherArguments(BaseModel):
    """Its schema has a `$ref` into `$defs`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    place: Place
    days: int


WEATHER = FunctionSpec("weather", WeatherArguments.model_json_schema(), strict=True, description="The forecast.")
WEATHER_2 = FunctionSpec("weather_2", {"type": "object", "properties": {"n": {"type": "integer"}}}, True, None)
SEARCH = FunctionSpec(
    "search", {"type": "object", "required": ["q"], "properties": {"q": {"type": "string"}}}, False, None
)
ANYTHING = FunctionSpec("anything", {}, strict=False, description=None)
FUNCTIONS = [WEATHER, WEATHER_2, SEARCH, ANYTHING]

ARGUMENTS = '{"place": {"city": "Rome", "tags": ["a", "b"]}, "days": 3}'


def call_text(family: ToolFamily, name: str, arguments: str) -> str:
    """One call. Of Mistral's two ways: the list."""
    return calls_text(family, (name, arguments))


def calls_text(family: ToolFamily, *calls: tuple[str, str]) -> str:
    match family:
        case ToolFamily.HERMES:
            return "\n".join(f'<tool_call>\n{{"name": "{f}", "arguments": {a}}}\n</tool_call>' for f, a in calls)
        case ToolFamily.LLAMA3_JSON:
            return "; ".join(f'{{"name": "{f}", "parameters": {a}}}' for f, a in calls)
        case ToolFamily.MISTRAL:
            objects = [f'{{"name": "{f}", "arguments": {a}}}' for f, a in calls]
            return f"[TOOL_CALLS][{', '.join(objects)}]"
        case ToolFamily.QWEN3_CODER:
            return "\n".join(f"<tool_call>\n<function={f}>\n{_elements(a)}</function>\n</tool_call>" for f, a in calls)
        case ToolFamily.PYTHONIC:
            return "[" + ", ".join(f"{f}({_keywords(a)})" for f, a in calls) + "]"


def _elements(arguments: str) -> str:
    written = ((key, value if isinstance(value, str) else _json(value)) for key, value in json.loads(arguments).items())
    return "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in written)


def _keywords(arguments: str) -> str:
    return ", ".join(f"{key}={_json(value)}" for key, value in json.loads(arguments).items())


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["weather", "weathers", "Bob"]}, "age": {"$ref": "#/$defs/Age"}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"Age": {"type": "integer"}},
}
