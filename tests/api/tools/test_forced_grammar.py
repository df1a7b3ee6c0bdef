import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from chairlift.api.tools import ToolFamily
from chairlift.api.tools.grammars import FunctionSpec, forced_calls_grammar, free_grammar
from chairlift.errors import InvalidRequest
from tests.api.tools.driving import Verdict, byte_tokenizer, judge
from tests.api.tools.functions import (
    ANYTHING,
    ARGUMENTS,
    FAMILIES,
    FUNCTIONS,
    JSON_FAMILIES,
    TOKENIZERS,
    call_text,
    calls_text,
)
from tests.api.tools.reading import Call, read_whole

HERMES, LLAMA = ToolFamily.HERMES, ToolFamily.LLAMA3_JSON
COMPLETE, INCOMPLETE, REFUSED = Verdict.COMPLETE, Verdict.INCOMPLETE, Verdict.REFUSED


def test_a_forced_grammar_reads_like_this() -> None:
    style = (
        '"x-guidance": {"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": ", "lenient": true}'
    )
    assert forced_calls_grammar(LLAMA, [ANYTHING], is_parallel=True, tokens={}).splitlines() == [
        "start: calls",
        "calls: body",
        "body: call more_calls",
        'more_calls: ("; " call)*',
        "call: call_0",
        r'call_0: "{" "\"name\"" ": " "\"anything\"" ", " "\"parameters\"" ": " %json {"type": "object", '
        + style
        + '} "}"',
    ]


@JSON_FAMILIES
@TOKENIZERS
@pytest.mark.parametrize(
    ("name", "arguments", "verdict"),
    [
        ("weather", ARGUMENTS, COMPLETE),
        ("weather", ARGUMENTS.replace("3", '"3"'), REFUSED),
        ("weather", ARGUMENTS.replace("days", "day"), REFUSED),
        ("weather", ARGUMENTS.replace(', "days": 3', ""), REFUSED),
        ("weather", '{"days": 3, "place": {"city": "Rome", "tags": []}}', REFUSED),  # order of the schema
        ("weather", ARGUMENTS.replace('", "', '","'), REFUSED),
        ("weather", ARGUMENTS.replace('"city": ', '"city":'), REFUSED),
        ("weather", ARGUMENTS.replace('{"place"', '{ "place"'), REFUSED),
        ("weather_2", '{"n": -12}', COMPLETE),
        ("weather_2", "{}", COMPLETE),
        ("weather_2", "null", REFUSED),
        ("search", '{"q": "</tool_call> \\"é\\u0001\\n"}', COMPLETE),
        ("search", '{"q": "\\u00e9"}', REFUSED),  # é is written as such
        ("search", '{"q": 1}', REFUSED),
        ("anything", '{"a": [1.5e3, {"b": null}, [true, []]], "c": "d"}', COMPLETE),
        ("anything", "{}", COMPLETE),
        ("anything", "[]", REFUSED),
        ("anything", '{"a": [1,2]}', REFUSED),
        ("weathe", ARGUMENTS, REFUSED),
        ("weather_", ARGUMENTS, REFUSED),
        ("", "{}", REFUSED),
    ],
)
def test_a_forced_call_is_of_one_of_the_functions(
    family: ToolFamily, tokenizer: LLTokenizer, name: str, arguments: str, verdict: Verdict
) -> None:
    grammar = forced_calls_grammar(family, FUNCTIONS, is_parallel=False, tokens={})
    text = call_text(family, name, arguments)
    assert judge(grammar, text, tokenizer) is verdict
    if verdict is COMPLETE:
        assert read_whole(family, text) == [Call(name, arguments)]


@FAMILIES
def test_forced_calls_are_all_there_is(family: ToolFamily) -> None:
    one = forced_calls_grammar(family, FUNCTIONS, is_parallel=False, tokens={})
    many = forced_calls_grammar(family, FUNCTIONS, is_parallel=True, tokens={})
    call = call_text(family, "weather", ARGUMENTS)
    two = calls_text(family, ("weather", ARGUMENTS), ("anything", "{}"))
    three = calls_text(family, *[("weather", ARGUMENTS)] * 3)
    verdicts = {
        "": (INCOMPLETE, INCOMPLETE),
        call[:-1]: (INCOMPLETE, INCOMPLETE),
        call: (COMPLETE, COMPLETE),
        two: (REFUSED, COMPLETE),
        three: (REFUSED, COMPLETE),
        call + call: (REFUSED, REFUSED),
        call + " ": (REFUSED, REFUSED),
        " " + call: (REFUSED, REFUSED),
        "text" + call: (REFUSED, REFUSED),
        "text": (REFUSED, REFUSED),
    }
    assert {text: (judge(one, text), judge(many, text)) for text in verdicts} == verdicts


@JSON_FAMILIES
def test_names_are_escaped(family: ToolFamily) -> None:
    name = 'a"b\\c\x7f</tool_call>é%json {}'
    grammar = forced_calls_grammar(family, [FunctionSpec(name, {}, True, None)], is_parallel=False, tokens={})
    written = json.dumps(name, ensure_ascii=False)[1:-1]
    assert judge(grammar, call_text(family, written, "{}")) is COMPLETE
    assert read_whole(family, call_text(family, written, "{}")) == [Call(name, "{}")]


@JSON_FAMILIES
def test_references_work_in_every_function_on_its_own(family: ToolFamily) -> None:
    """The same name means something else in each; the last refers to itself as a whole."""
    of_x = {"properties": {"x": {"$ref": "#/$defs/X"}}, "required": ["x"]}
    functions = [
        FunctionSpec("number", {**of_x, "$defs": {"X": {"type": "integer"}}}, True, None),
        FunctionSpec("text", {**of_x, "$defs": {"X": {"type": "string"}}}, True, None),
        FunctionSpec(
            "root", {"$ref": "#/$defs/X", "$defs": {"X": of_x | {"properties": {"x": {"const": 7}}}}}, True, None
        ),
        FunctionSpec("tree", {"properties": {"x": {"$ref": "#"}}, "additionalProperties": False}, True, None),
    ]
    grammar = forced_calls_grammar(family, functions, is_parallel=False, tokens={})
    assert LLMatcher.validate_grammar(grammar, byte_tokenizer()) == ""
    verdicts = {
        ("number", '{"x": 1}'): COMPLETE,
        ("number", '{"x": "1"}'): REFUSED,
        ("text", '{"x": "1"}'): COMPLETE,
        ("text", '{"x": 1}'): REFUSED,
        ("root", '{"x": 7}'): COMPLETE,
        ("root", '{"x": 8}'): REFUSED,
        ("tree", '{"x": {"x": {}}}'): COMPLETE,
        ("tree", '{"x": {"y": {}}}'): REFUSED,
    }
    assert {key: judge(grammar, call_text(family, *key)) for key in verdicts} == verdicts


@JSON_FAMILIES
def test_what_a_schema_says_about_style_is_not_heard(family: ToolFamily) -> None:
    guided = {"x-guidance": {"item_separator": ";", "whitespace_flexible": True}}
    grammar = forced_calls_grammar(family, [FunctionSpec("f", guided, True, None)], is_parallel=False, tokens={})
    assert judge(grammar, call_text(family, "f", '{"a": 1, "b": 2}')) is COMPLETE
    assert judge(grammar, call_text(family, "f", '{"a": 1;"b": 2}')) is REFUSED


@pytest.mark.parametrize("kind", ["array", "string", ["object", "null"], None])
def test_parameters_must_be_an_object(kind: object) -> None:
    functions = [ANYTHING, FunctionSpec("f", {"type": kind}, True, None)]
    complaint = "function 'f' must be a JSON schema of type object, not "
    with pytest.raises(InvalidRequest, match=complaint) as caught:
        forced_calls_grammar(HERMES, functions, is_parallel=False, tokens={})
    assert caught.value.param == "tools"
    with pytest.raises(InvalidRequest, match=complaint):
        free_grammar(HERMES, functions, is_parallel=False, answer_schema=None, tokens={})


@JSON_FAMILIES
def test_what_cannot_be_enforced_is_refused_of_strict_functions_and_passed_over_in_others(family: ToolFamily) -> None:
    parameters = {"properties": {"x": {"type": "string", "format": "nonsense"}}, "required": ["x"]}
    strict = forced_calls_grammar(family, [FunctionSpec("f", parameters, True, None)], is_parallel=False, tokens={})
    assert "Unknown format: nonsense" in LLMatcher.validate_grammar(strict, byte_tokenizer())
    lax = forced_calls_grammar(family, [FunctionSpec("f", parameters, False, None)], is_parallel=False, tokens={})
    assert LLMatcher.validate_grammar(lax, byte_tokenizer()) == ""
    assert judge(lax, call_text(family, "f", '{"x": "y"}')) is COMPLETE
    assert judge(lax, call_text(family, "f", '{"x": 1}')) is REFUSED
