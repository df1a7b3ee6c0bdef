"""Structured output over HTTP: it always parses and validates, whatever the model would rather say, or it is refused.

The judge of schemas is jsonschema-rs, which knows nothing of the library that enforces them; the client's own helper
`parse` is asked, too.
"""

import json
import re
from enum import Enum
from typing import Any, Literal

import aiohttp
import jsonschema_rs
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from chairlift.api import ServerConfig
from chairlift.engine.text.grammar import CompilerLimits
from tests.api.conftest import Server, serving
from tests.api.contract import CHAT, COMPLETIONS, check_chat, error_of, post, text_of, user, warning_of
from tests.support.engines import grammars_limited, parser_limits

HELLO = user("Tell me a story about a fox.")
TEXT = {"type": "string"}


def closed(*required: str, **properties: Any) -> dict[str, Any]:
    """The schema of an object of these properties, all of which are required unless some are named."""
    named = list(required or properties)
    return {"type": "object", "properties": properties, "required": named, "additionalProperties": False}


SCHEMAS: dict[str, dict[str, Any]] = {
    "enum": {"enum": ["red", 7, None, {"a": [1.5, True]}]},
    "const": {"const": {"z": 1, "a": "é😀"}},
    "nested objects": closed(z=closed(k={"type": "boolean"}), a=closed(k={"type": "null"})),
    "bounds": {
        "type": "array",
        "items": {"type": "integer", "minimum": -3, "maximum": 3},
        "minItems": 2,
        "maxItems": 4,
    },
    "tuple": {"prefixItems": [{"type": "boolean"}, {"type": "string", "maxLength": 3}], "items": False, "minItems": 2}
    | {"type": "array"},
    "references": closed(first={"$ref": "#/$defs/Age"}, second={"$ref": "#/$defs/Age"})
    | {"$defs": {"Age": {"type": "integer", "minimum": 18, "maximum": 99}}},
    "anyOf": {"anyOf": [{"type": "integer", "minimum": 100, "maximum": 999}, {"pattern": "^[A-C]{2}$", **TEXT}]},
    "pattern": {"pattern": r"^\d{4}-(0[1-9]|1[0-2])-[0-3]\d$", **TEXT},
    "format": {"format": "date", **TEXT},
    "lengths": {"minLength": 3, "maxLength": 6, **TEXT},
    "numbers": {"type": "number", "exclusiveMinimum": 0, "maximum": 1, "multipleOf": 0.25},
    "optional": closed("b", a={"enum": [1]}, b={"enum": [2]}, c={"enum": [3]}),
    "allOf": {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 9}]},
}


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


async def contents(server: Server, **fields: Any) -> list[str]:
    """The texts of answers that came to their ends."""
    reply = check_chat(await post(server, CHAT, {"messages": HELLO, **fields}))
    assert {choice.finish_reason for choice in reply.choices} == {"stop"}
    return [choice.message.content or "" for choice in reply.choices]


async def content(server: Server, **fields: Any) -> str:
    (text,) = await contents(server, **fields)
    return text


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
async def test_every_answer_is_an_instance_of_its_schema(server: Server, schema: dict[str, Any]) -> None:
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    form = json_schema(schema)
    greedy = await content(server, temperature=0, response_format=form)
    for text in [greedy, *await contents(server, temperature=3, seed=1, n=3, response_format=form)]:
        validator.validate(json.loads(text))


async def test_a_schema_may_refer_to_itself(server: Server) -> None:
    schema = closed(name={"enum": ["leaf", "node"]}, child={"anyOf": [{"$ref": "#"}, {"type": "null"}]})
    deeper, flat = {str(ord("{")): 100}, {str(ord("n")): 100}  # how a child begins, and how null does
    text = await content(server, temperature=0, guided_json=schema, logit_bias=flat)
    assert json.loads(text) == {"name": "node", "child": None}
    body = {"messages": HELLO, "guided_json": schema, "temperature": 0, "logit_bias": deeper, "max_tokens": 100}
    cut = (await post(server, CHAT, body))["choices"][0]["message"]["content"]
    assert cut.count('{"name": ') == cut.count('"child": ') + 1 > 2


async def test_every_field_that_names_a_structure_means_the_same(server: Server) -> None:
    schema = SCHEMAS["references"]
    asked: list[dict[str, Any]] = [
        {"response_format": json_schema(schema)},
        {"structured_outputs": {"json": schema}},
        {"structured_outputs": {"json": json.dumps(schema)}},
        {"guided_json": schema},
        {"guided_json": json.dumps(schema)},
        {"json_schema": schema},
    ]
    assert len({await content(server, temperature=0, **fields) for fields in asked}) == 1
    texts = {
        await text_of(server, {"prompt": "A fox", "max_tokens": 60, "temperature": 0, **fields}) for fields in asked
    }
    assert len(texts) == 1
    jsonschema_rs.validator_for(schema).validate(json.loads(texts.pop()))


SHAPE = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"response_format": {"type": "json_object", "schema": SHAPE}}),
        (CHAT, {"response_format": {"type": "json_schema", "schema": SHAPE}}),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": SHAPE}}}),
        ("/v1/responses", {"text": {"format": {"type": "json_object", "schema": SHAPE}}}),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "schema": SHAPE}}}),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SHAPE}}, "max_tokens": 99}),
    ],
)
async def test_a_schema_is_enforced_however_it_is_written(server: Server, path: str, fields: dict[str, Any]) -> None:
    asked = {"input": "Hi"} if path == "/v1/responses" else {"messages": HELLO}
    reply = await post(server, path, {**asked, **fields})
    assert '{\\"a\\": 1}' in json.dumps(reply)


async def test_keys_without_a_name_are_the_servers_choice() -> None:
    form = {"response_format": json_schema(SHAPE), "logit_bias": {str(ord(",")): 100}, "max_tokens": 30}
    longer = {**form, "structured_outputs": {"json": SHAPE, "disable_additional_properties": False}}
    del longer["response_format"]
    async with serving() as server:
        assert await content(server, **form) == '{"a": 1}'
        more = await post(server, CHAT, {"messages": HELLO, **longer})
    async with serving(ServerConfig(allow_additional_properties=True)) as server:
        reply = await post(server, CHAT, {"messages": HELLO, **form})
    for each in (more, reply):
        assert each["choices"][0]["message"]["content"].startswith('{"a": 1, "')


async def test_what_of_a_schema_is_not_enforced_is_a_warning(server: Server) -> None:
    either = {"oneOf": [{"const": 1}, {"enum": [1, 2]}]}
    wide = {"type": "number", "maximum": 3.4028234663852886e38}
    function = {"name": "f", "parameters": closed(a=either), "strict": True}
    tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    one_of = "oneOf is enforced as anyOf, so a value may fit several of its schemas"
    bias = {str(ord("1")): 100}
    for path, fields, warnings in (
        (CHAT, {"messages": HELLO, "response_format": json_schema(either)}, [f"response_format: {one_of}"]),
        (COMPLETIONS, {"prompt": "a", "guided_json": wide}, ["guided_json: bounds beyond 2^63 are not enforced"]),
        (CHAT, {"messages": HELLO, **tools}, [f"tools: the parameters of function 'f': {one_of}"]),
        (CHAT, {"messages": HELLO, "response_format": json_schema({"oneOf": [{"const": 1}, {"const": 2}]})}, []),
    ):
        header = await warning_of(server, path, {"logit_bias": bias, "max_tokens": 40, **fields})
        assert header == (", ".join(f'299 - "{each}"' for each in warnings) or None)


async def test_properties_come_in_the_order_of_the_schema_and_in_the_style_of_json_dumps(server: Server) -> None:
    text = await content(server, temperature=2, seed=4, response_format=json_schema(SCHEMAS["nested objects"]))
    assert re.fullmatch(r'\{"z": \{"k": (true|false)\}, "a": \{"k": null\}\}', text)
    fixed = await content(server, response_format=json_schema(SCHEMAS["const"]))
    assert fixed == '{"z": 1, "a": "é😀"}'


@pytest.mark.parametrize("form", [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x"}}])
async def test_json_object_is_an_object(server: Server, form: dict[str, Any]) -> None:
    # The model alone would write on and on; a bias for closing marks is what makes it come to an end.
    bias = {str(ord(mark)): 12.0 for mark in '"}]'}
    text = await content(server, temperature=1.0, seed=2, logit_bias=bias, response_format=form)
    assert isinstance(json.loads(text), dict)


CHOICES = [
    ["yes", "no"],
    ["a", "ab", "abc"],
    ['with "quotes" and \\', "two\nlines"],
    ["日本", "日光"],
    ["a\x7fb"],
    ["a", "a"],
]


@pytest.mark.parametrize("choices", CHOICES)
async def test_a_guided_choice_is_one_of_the_texts(server: Server, choices: list[str]) -> None:
    for named in ({"guided_choice": choices}, {"structured_outputs": {"choice": choices}}):
        assert {*await contents(server, temperature=2, seed=1, n=3, **named)} <= {*choices}


@pytest.mark.parametrize("regex", [r"\d{3}-[A-F]{2}", "(?i)abc|xyz", r"[^a-z\n]{5}", "é|日{2}", r"a?b+c{2,3}"])
async def test_a_guided_regex_is_matched_by_the_whole_text(server: Server, regex: str) -> None:
    for named in ({"guided_regex": regex}, {"structured_outputs": {"regex": regex}}):
        for text in await contents(server, temperature=1.5, seed=1, n=2, logit_bias={str(ord("c")): 5.0}, **named):
            assert re.fullmatch(regex, text)


async def test_a_bias_chooses_within_the_grammar_and_never_beyond_it(server: Server) -> None:
    fields = {"temperature": 0, "guided_choice": ["cat", "dog"]}
    assert await content(server, logit_bias={str(ord("d")): 100}, **fields) == "dog"
    assert await content(server, logit_bias={str(ord("c")): 100}, **fields) == "cat"
    assert await content(server, logit_bias={str(ord("x")): 100, str(ord("d")): -100}, **fields) == "cat"


LARK = 'start: sum " = " NUMBER\nsum: NUMBER (" + " NUMBER)~1..2\nNUMBER: /[1-9][0-9]?/\n'
GBNF = 'root ::= number (" + " number){1,2} " = " number\nnumber ::= [1-9] [0-9]?\n'


@pytest.mark.parametrize("grammar", [LARK, GBNF, 'start: "12 + 3 = 15"  // not "::=" by any means\n'])
async def test_a_guided_grammar_is_followed_in_larks_notation_and_in_gbnf(server: Server, grammar: str) -> None:
    for text in await contents(server, temperature=1.5, seed=1, n=3, guided_grammar=grammar):
        assert re.fullmatch(r"[1-9][0-9]?( \+ [1-9][0-9]?){1,2} = [1-9][0-9]?", text)


Colour = Enum("Colour", {"RED": "red", "GREEN": "green"})


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=20)
    colours: list[Colour] = Field(min_length=1, max_length=2)


class Owner(BaseModel):
    name: Literal["Ada", "Bob"]
    pet: Pet | None


async def test_parse_with_a_pydantic_model(client: AsyncOpenAI) -> None:
    fields: Any = {"model": "bundled", "messages": user("Who?"), "temperature": 2.0, "seed": 1, "n": 3}
    for choice in (await client.chat.completions.parse(**fields, response_format=Owner)).choices:
        assert isinstance(choice.message.parsed, Owner)
        assert choice.message.parsed.name in ("Ada", "Bob")


class Person(BaseModel):
    name: str = Field(max_length=30)
    age: int = Field(ge=0, le=150)


@pytest.mark.parametrize(
    ("sentence", "name", "age"),
    [("Maria is 34 years old and lives in Oslo.", "Maria", 34), ("Tom is 7 years old.", "Tom", 7)],
)
async def test_the_bundled_model_extracts_what_a_sentence_says(
    client: AsyncOpenAI, sentence: str, name: str, age: int
) -> None:
    conversation: Any = user(f"Extract the name and age as JSON: {sentence}")
    fields: dict[str, Any] = {"model": "bundled", "messages": conversation, "temperature": 0}
    reply = await client.chat.completions.parse(**fields, response_format=Person)
    assert reply.choices[0].message.parsed == Person(name=name, age=age)
    free = await client.chat.completions.create(**fields, response_format={"type": "json_object"})
    assert json.loads(free.choices[0].message.content or "") == {"name": name, "age": age}


TOO_LONG = "{} has more than 262144 characters; simplify it"
OUR_OWN_NAME = {"name": "x", "schema_": {"type": "integer"}}  # in our code, not in JSON
REFUSED: list[tuple[str, Any, str]] = [
    ("response_format", json_schema({"type": "nonsense"}), "Invalid type: nonsense"),
    ("guided_json", {"not": {}, "if": {}}, 'these keywords cannot be enforced: "if", "not"; leave them out'),
    ("guided_json", {"type": "number", "minimum": 1e19}, "minimum 1e+19 cannot be enforced, because it is beyond 2^63"),
    ("guided_json", "[]", "the schema is not an object"),
    ("guided_json", {"$ref": "#/$defs/X"}, "/$defs/X"),
    ("guided_json", {"$ref": "https://example.org/x"}, "'https://example.org/x' leads out of the schema; only"),
    ("guided_json", {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}, "nsatisfiable"),
    ("guided_json", "{", ""),
    ("guided_json", {"type": "string", "pattern": "(a"}, "unclosed group"),
    ("guided_regex", "(a", "unclosed group"),
    ("guided_regex", "(?=a)b", "look-around"),
    ("structured_outputs", {"regex": r"(a)\1"}, "backreferences"),
    ("guided_regex", "", "at least 1 character"),
    ("guided_choice", [], "at least 1 item"),
    ("guided_choice", ["a", ""], "at least 1 character"),
    ("guided_grammar", "start: nowhere", "nowhere"),
    ("guided_grammar", 'x: "a"', "start"),
    ("guided_grammar", 'root ::= "a', "Unexpected end"),
    ("guided_json", "[" * 100_000, "too deeply nested or too large; simplify it"),
    ("response_format", json_schema({"enum": ["x" * 100] * 3000}), TOO_LONG.format("response_format: the schema")),
    ("guided_choice", ["x" * 1000] * 300, TOO_LONG.format("guided_choice: the list of choices")),
    ("structured_outputs", {"regex": "a", "choice": ["a"]}, "regex and choice"),
    ("structured_outputs", {}, "exactly one"),
    ("structured_outputs", {"json_object": "yes"}, "valid boolean"),
    ("response_format", {"type": "json_schema", "json_schema": {"name": ""}}, "name"),
    ("response_format", {"type": "text", "schema": {}}, "schema goes with json_object"),
    ("response_format", {"type": "json_schema", "schema": {}, "json_schema": {}}, "schema goes with json_object"),
    ("response_format", {"type": "json_object", "json_schema": {"name": "x"}}, "type json_schema"),
    ("response_format", {"type": "json_schema"}, "json_schema"),
    ("response_format.json_schema.schema_", {"type": "json_schema", "json_schema": OUR_OWN_NAME}, "unknown"),
    ("response_format", {"type": "xml"}, "json_schema"),
]


async def test_what_cannot_be_compiled_is_refused_with_the_field_and_the_reason(server: Server) -> None:
    for param, value, words in REFUSED:
        fields = {param.partition(".")[0]: value}
        whole = await error_of(server, CHAT, {"messages": HELLO, "max_tokens": 3, **fields})
        streamed = await error_of(server, COMPLETIONS, {"prompt": "a", "stream": True, **fields})
        assert (whole["param"], streamed["param"]) == (param, param), str(fields)[:80]
        assert words in whole["message"]
    assert await content(server, guided_choice=["all else goes on"]) == "all else goes on"


async def test_two_structures_and_deep_text_beside_tools_are_refused(server: Server) -> None:
    error = await error_of(server, CHAT, {"messages": HELLO, "guided_regex": "a", "guided_choice": ["a"]})
    assert error["param"] == "guided_choice"
    assert "guided_regex and guided_choice" in error["message"]
    tools = [{"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}]
    error = await error_of(server, CHAT, {"messages": HELLO, "tools": tools, "guided_json": "[" * 100_000})
    assert error["param"] in ("guided_json", "tools")


async def test_too_many_grammars_at_once_are_a_503_that_says_so(server: Server) -> None:
    with grammars_limited(server.llm, CompilerLimits(max_unfinished=0)):
        reply = await post(server, COMPLETIONS, {"prompt": "a", "guided_regex": "never seen before"}, status=503)
    assert (reply["error"]["type"], reply["error"]["code"]) == ("server_error", "grammars_busy")
    assert reply["error"]["message"] == (
        "this grammar cannot be compiled now: 0 other grammars are being compiled; try again later"
    )


async def test_a_grammar_that_becomes_too_costly_is_the_clients_mistake_too(server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 150, "guided_grammar": 'start: e\ne: e e | "a"\n'}
    words = "the grammar failed: too many alternatives, optional parts or repetitions at once; simplify it"
    with grammars_limited(server.llm, parser_limits(max_items_in_row=50)):
        assert (await error_of(server, COMPLETIONS, body))["message"] == words
        streamed = {**body, "stream": True}
        async with aiohttp.ClientSession(server.url) as http, http.post(COMPLETIONS, json=streamed) as response:
            first, *_, end, _ = (await response.text()).split("\n\n")
    assert '"text":"a' in first
    error = json.loads(end.removeprefix("data: "))["error"]
    assert (error["type"], error["message"]) == ("invalid_request_error", words)
    assert await content(server, guided_choice=["all else goes on"]) == "all else goes on"
