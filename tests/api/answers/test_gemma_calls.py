"""Grammars of Gemma 4's calls: which texts they take, and that what is sampled under their masks is read as calls."""

import json
from random import Random
from typing import Any

import pytest
from llguidance import LLTokenizer

from chairlift.api.answers import AnswerReader
from chairlift.api.answers.declared.shipped import DeclaredFamily, shipped_format
from chairlift.api.answers.functions import FunctionSpec, enforced_arguments
from chairlift.api.answers.gemma_calls import forced_calls_grammar, free_grammar
from chairlift.params import StructuredOutputs
from tests.api.answers.calls import (
    ANYTHING,
    ARGUMENTS,
    FUNCTIONS,
    TOKENIZERS,
    Call,
    Verdict,
    WeatherArguments,
    generate,
    joined,
    judge,
)

COMPLETE, INCOMPLETE, REFUSED = Verdict.COMPLETE, Verdict.INCOMPLETE, Verdict.REFUSED
FORM = shipped_format(DeclaredFamily.GEMMA4)
TAGS = '[<|"|>a<|"|>,<|"|>b<|"|>]'
WEATHER = f'weather{{place:{{city:<|"|>Rome<|"|>,tags:{TAGS}}},days:3}}'


def text_of(*calls: str) -> str:
    return "".join(f"<|tool_call>call:{each}<tool_call|>" for each in calls)


def calls_in(text: str) -> list[str | Call]:
    return joined(AnswerReader(FORM).push(text, is_last=True))


def forced(functions: list[FunctionSpec] = FUNCTIONS, *, is_parallel: bool = False) -> str:
    return forced_calls_grammar(enforced_arguments(functions), is_parallel, tokens={})


def free(answer_schema: dict[str, Any] | None = None) -> str:
    return free_grammar(enforced_arguments(FUNCTIONS, is_forced=False), True, answer_schema, tokens={})


def of(schema: dict[str, Any], **definitions: Any) -> str:
    """The grammar of a call of `f` with one argument `x`."""
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": definitions}
    return forced([FunctionSpec("f", parameters, strict=True, description=None)])


@TOKENIZERS
@pytest.mark.parametrize(
    ("call", "verdict"),
    [
        (WEATHER, COMPLETE),
        (WEATHER.replace("3", '<|"|>3<|"|>'), REFUSED),
        (WEATHER.replace("days", "day"), REFUSED),
        (WEATHER.replace(",days:3", ""), REFUSED),
        (f'weather{{days:3,place:{{city:<|"|>Rome<|"|>,tags:{TAGS}}}}}', REFUSED),  # order of the schema
        (WEATHER.replace(TAGS, "[]"), COMPLETE),
        (WEATHER.replace(",", ", "), REFUSED),
        (WEATHER.replace('<|"|>Rome<|"|>', '"Rome"'), REFUSED),
        ("weather_2{n:-12}", COMPLETE),
        ("weather_2{}", COMPLETE),
        ("weather_2null", REFUSED),
        ('search{q:<|"|>"é" {a: 1}\n<tool_call|><|"|>}', COMPLETE),
        ('search{q:<|"|><|"|>}', COMPLETE),
        ("search{q:1}", REFUSED),
        ('anything{a:[1.5e3,{b:null},[true,[]]],c:<|"|>d<|"|>}', COMPLETE),
        ("anything{}", COMPLETE),
        ("anything[]", REFUSED),
        ("weathe{}", REFUSED),
    ],
)
def test_a_forced_call_is_of_one_of_the_functions(tokenizer: LLTokenizer, call: str, verdict: Verdict) -> None:
    assert judge(forced(), text_of(call), tokenizer) is verdict


def test_such_calls_are_read() -> None:
    assert calls_in(text_of(WEATHER, "anything{}")) == [Call("weather", ARGUMENTS), Call("anything", "{}")]


def test_forced_calls_are_all_there_is() -> None:
    one, many = forced(), forced(is_parallel=True)
    call, two = text_of(WEATHER), text_of(WEATHER, "anything{}")
    assert [judge(one, text) for text in ("", call[:-1], call, two, f"a{call}", f"{call} ")] == [
        *(INCOMPLETE, INCOMPLETE, COMPLETE, REFUSED, REFUSED, REFUSED)
    ]
    assert [judge(many, text) for text in (call, two, text_of(*[WEATHER] * 3), f"{call} ")] == [
        *(COMPLETE, COMPLETE, COMPLETE, REFUSED)
    ]


TREE = {"type": "object", "properties": {"n": {"type": "integer"}, "next": {"$ref": "#/$defs/Tree"}}}


@pytest.mark.parametrize(
    ("schema", "complete", "refused"),
    [
        ({"enum": ["a", "b c"]}, ['<|"|>b c<|"|>'], ['<|"|>b<|"|>', '"a"']),
        ({"type": "string", "const": ""}, ['<|"|><|"|>'], ['<|"|> <|"|>']),
        ({"enum": ["a", 1]}, ['"a"', "1"], ["2"]),
        ({"type": "integer", "minimum": 3}, ["3"], ["2", "3.5"]),
        ({"type": ["string", "null"]}, ['<|"|>a<|"|>', "null"], ["1"]),
        ({"anyOf": [{"type": "boolean"}, {"type": "number"}]}, ["true", "1.5"], ["null"]),
        ({"type": "string", "pattern": "^[ab]+$"}, ['"abba"'], ['"abc"', '<|"|>abba<|"|>']),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, ["[1,2]"], ["[1]"]),
        ({"type": "array"}, ["[]", '[1,<|"|>a<|"|>,{b:[]}]'], ["{}"]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, ['{"a":1,"b":2}'], ['{"a":"b"}']),
        (
            {"type": "object", "properties": {"a b": {}}, "additionalProperties": True},
            ['{"a b":1,c:2}', "{c:2}"],
            ["1"],
        ),
        ({"$ref": "#/$defs/Tree"}, ["{n:1,next:{next:{n:2}}}", "{}"], ["{n:1,next:2}", "{next:{},n:1}"]),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/Tree"}}, ['[{"n":1}]'], ["[]", '[{"n":true}]']),
        ({"$ref": "#/properties/x/$defs/y", "$defs": {"y": {"type": "null"}}}, ["null"], ["1"]),
    ],
)
def test_values_are_those_of_the_schema(schema: dict[str, Any], complete: list[str], refused: list[str]) -> None:
    grammar = of(schema, Tree=TREE)
    verdicts = {value: judge(grammar, text_of(f"f{{x:{value}}}")) for value in (*complete, *refused)}
    assert verdicts == dict.fromkeys(complete, COMPLETE) | dict.fromkeys(refused, REFUSED)
    assert all(calls_in(text_of(f"f{{x:{value}}}")) != [] for value in complete)


def test_optional_keys_keep_their_order_with_commas_between_them() -> None:
    integer = {"type": "integer"}
    parameters = {"properties": {"a": integer, "b": integer, "c": integer}, "required": ["b"]}
    grammar = forced([FunctionSpec("f", parameters, strict=True, description=None)])
    complete = {"{b:1}", "{a:1,b:1}", "{b:1,c:1}", "{a:1,b:1,c:1}"}
    tried = [*complete, "{}", "{a:1}", "{a:1,c:1}", "{,b:1}", "{b:1,}", "{b:1,a:1}"]
    assert {each for each in tried if judge(grammar, text_of(f"f{each}")) is COMPLETE} == complete


def test_text_is_free_up_to_a_call() -> None:
    grammar = free()
    texts = ["", "Hi <|tool", f"Hi.{text_of(WEATHER)}", text_of(WEATHER, "weather_2{n:1}"), 'search{q:1} {"a": 1}']
    assert [judge(grammar, text) for text in texts] == [COMPLETE] * 5
    assert judge(grammar, "Hi.<|tool_call>call:nothing") is REFUSED
    assert judge(grammar, f"{text_of(WEATHER)} And") is REFUSED


def test_with_a_schema_the_answer_is_calls_or_json() -> None:
    grammar = free({"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": False})
    assert [judge(grammar, text) for text in ('{"n": 1}', text_of(WEATHER), "Hi")] == [COMPLETE, COMPLETE, REFUSED]


@TOKENIZERS
def test_what_is_sampled_is_read_as_calls_that_fit(tokenizer: LLTokenizer) -> None:
    for seed in range(10):
        text = generate(forced(is_parallel=True), Random(seed), tokenizer, end='<|"|>')
        calls = [each for each in calls_in(text) if isinstance(each, Call)]
        assert calls
        assert len(calls) == text.count("<|tool_call>call:")
        for call in calls:
            if call.name == "weather":
                WeatherArguments.model_validate_json(call.arguments)
            assert isinstance(json.loads(call.arguments), dict)


def test_a_custom_tool_takes_texts_of_its_pattern() -> None:
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    tool = FunctionSpec("sum", schema, strict=None, description=None, is_custom=True, input_pattern=r"\d+/\d+")
    grammar = forced([tool, ANYTHING])
    written = ['sum{input:<|"|>1/22<|"|>}', 'sum{input:<|"|>1+2<|"|>}']
    assert [judge(grammar, text_of(each)) for each in written] == [COMPLETE, REFUSED]
    StructuredOutputs(grammar=grammar)
