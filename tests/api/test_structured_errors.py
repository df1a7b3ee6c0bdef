"""What cannot be enforced is refused before anything runs: a 400 with the field that was used and the reason."""

import json
from typing import Any

import aiohttp
import pytest

from chairlift.engine.sampling import compiled_grammar
from chairlift.engine.text import grammar
from tests.api.conftest import Server
from tests.api.contract import CHAT, COMPLETIONS, error_of, post, user

HELLO = user("Hello!")


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "schema": ({"response_format": json_schema({"type": "nonsense"})}, "response_format", "Invalid type: nonsense"),
    "keyword": ({"guided_json": {"not": {}}}, "guided_json", "not"),
    "missing reference": ({"guided_json": {"$ref": "#/$defs/X"}}, "guided_json", "/$defs/X"),
    "foreign reference": ({"guided_json": {"$ref": "https://example.org/x"}}, "guided_json", "https://example.org/x"),
    "unsatisfiable property": (
        {"guided_json": {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}},
        "guided_json",
        "nsatisfiable",
    ),
    "no JSON": ({"guided_json": "{"}, "guided_json", ""),
    "pattern": ({"guided_json": {"type": "string", "pattern": "(a"}}, "guided_json", "unclosed group"),
    "regex": ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    "lookahead": ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
    "back reference": ({"structured_outputs": {"regex": r"(a)\1"}}, "structured_outputs", "backreferences"),
    "empty regex": ({"guided_regex": ""}, "guided_regex", "at least 1 character"),
    "no choices": ({"guided_choice": []}, "guided_choice", "at least 1 item"),
    "empty choice": ({"guided_choice": ["a", ""]}, "guided_choice", "at least 1 character"),
    "Lark": ({"guided_grammar": "start: nowhere"}, "guided_grammar", "nowhere"),
    "Lark without start": ({"guided_grammar": 'x: "a"'}, "guided_grammar", "start"),
    "GBNF": ({"guided_grammar": 'root ::= "a'}, "guided_grammar", "Unexpected end"),
    "deep JSON": ({"guided_json": "[" * 100_000}, "guided_json", "too deeply nested or too large; simplify it"),
    "a long schema": (
        {"response_format": json_schema({"enum": ["x" * 100] * 3000})},
        "response_format",
        "response_format: the schema has more than 262144 characters; simplify it",
    ),
    "long choices": (
        {"guided_choice": ["x" * 1000] * 300},
        "guided_choice",
        "guided_choice: the list of choices has more than 262144 characters; simplify it",
    ),
    "two of them": ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex and guided_choice"),
    "two in one": ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "regex and choice"),
    "none in one": ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    "text for a boolean": ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs", "valid boolean"),
    "a schema of no name": ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "name"),
    "a schema in the wrong type": (
        {"response_format": {"type": "json_object", "json_schema": {"name": "x"}}},
        "response_format",
        "type json_schema",
    ),
    "a type without its schema": ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    "a field of our own code": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema_": {"type": "integer"}}}},
        "response_format.json_schema.schema_",
        "unknown",
    ),
    "an unknown type": ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
}


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED.values(), ids=REFUSED.keys())
async def test_what_cannot_be_compiled_is_refused_with_the_field_and_the_reason(
    server: Server, fields: dict[str, Any], param: str, words: str
) -> None:
    error = await error_of(server, CHAT, {"messages": HELLO, "max_tokens": 3, **fields})
    assert error["param"] == param
    assert words in error["message"]
    error = await error_of(server, COMPLETIONS, {"prompt": "a", "stream": True, **fields})
    assert error["param"] == param
    reply = await post(server, CHAT, {"messages": HELLO, "guided_choice": ["all else goes on"]})
    assert reply["choices"][0]["message"]["content"] == "all else goes on"


async def test_a_structure_beside_tools_that_is_deep_text_is_refused(server: Server) -> None:
    tools = [{"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}]
    error = await error_of(server, CHAT, {"messages": HELLO, "tools": tools, "guided_json": "[" * 100_000})
    assert error["param"] in ("guided_json", "tools")


async def test_too_many_grammars_at_once_are_a_503_that_says_so(server: Server) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar, "_MAX_UNFINISHED", 0)
        reply = await post(server, COMPLETIONS, {"prompt": "a", "guided_regex": "never seen before"}, status=503)
    assert (reply["error"]["type"], reply["error"]["code"]) == ("server_error", "grammars_busy")
    assert reply["error"]["message"] == (
        "this grammar cannot be compiled now: 0 other grammars are being compiled; try again later"
    )


async def test_a_grammar_that_becomes_too_costly_is_the_clients_mistake_too(server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 150, "guided_grammar": 'start: e\ne: e e | "a"\n'}
    words = "the grammar failed: too many alternatives, optional parts or repetitions at once; simplify it"
    with pytest.MonkeyPatch.context() as patch:  # where grammars are in use, but not where they are tried out
        limits = {**compiled_grammar.PARSER_LIMITS, "max_items_in_row": 50}
        patch.setattr(compiled_grammar, "PARSER_LIMITS", limits)
        assert (await error_of(server, COMPLETIONS, body))["message"] == words
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{server.url}{COMPLETIONS}", json={**body, "stream": True}) as response,
        ):
            first, *_, end, _ = (await response.text()).split("\n\n")
    assert '"text":"a' in first
    error = json.loads(end.removeprefix("data: "))["error"]
    assert (error["type"], error["message"]) == ("invalid_request_error", words)
    reply = await post(server, COMPLETIONS, {"prompt": "a", "guided_choice": ["all else goes on"]})
    assert reply["choices"][0]["text"] == "all else goes on"
