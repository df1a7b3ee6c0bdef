"""Functions for grammars to be of, the text of calls of them, and what tests of grammars are run over."""

import pytest
from pydantic import BaseModel, ConfigDict

from chairlift.api.tools import FunctionSpec, ToolFamily
from tests.api.tools.driving import byte_tokenizer, long_tokenizer

FAMILIES = pytest.mark.parametrize("family", list(ToolFamily))
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
    if family is ToolFamily.HERMES:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def separator(family: ToolFamily) -> str:
    return "\n" if family is ToolFamily.HERMES else "; "


PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["weather", "weathers", "Bob"]}, "age": {"$ref": "#/$defs/Age"}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"Age": {"type": "integer"}},
}
