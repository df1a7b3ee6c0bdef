"""Grammars of calls: which texts they take, and that the parser reads what is sampled under their masks."""

import json
import re
from random import Random
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from chairlift.api.answers import ToolFamily
from chairlift.api.answers.functions import FunctionSpec, enforced_arguments
from chairlift.api.answers.grammars import forced_calls_grammar, free_grammar
from chairlift.errors import InvalidRequest
from tests.api.answers.calls import (
    ANYTHING,
    ARGUMENTS,
    FAMILIES,
    FUNCTIONS,
    JSON_FAMILIES,
    PERSON,
    TOKENIZERS,
    Call,
    Verdict,
    WeatherArguments,
    byte_tokenizer,
    call_text,
    calls_of,
    calls_text,
    generate,
    judge,
    read_whole,
)

HERMES, LLAMA = ToolFamily.HERMES, ToolFamily.LLAMA3_JSON
COMPLETE, INCOMPLETE, REFUSED = Verdict.COMPLETE, Verdict.INCOMPLETE, Verdict.REFUSED
# With at most one call, and with any number.
BOTH, NEITHER, BEGUN, SEVERAL = (COMPLETE, COMPLETE), (REFUSED, REFUSED), (INCOMPLETE, INCOMPLETE), (REFUSED, COMPLETE)


def forced(family: ToolFamily, functions: list[FunctionSpec] = FUNCTIONS, is_parallel: bool = False) -> str:
    return forced_calls_grammar(family, enforced_arguments(functions), is_parallel, tokens={})


def free(family: ToolFamily, is_parallel: bool = True, answer_schema: dict[str, Any] | None = None) -> str:
    functions = enforced_arguments(FUNCTIONS, is_forced=False)
    return free_grammar(family, functions, is_parallel, answer_schema, tokens={})


def strict(name: str, parameters: dict[str, Any]) -> FunctionSpec:
    return FunctionSpec(name, parameters, strict=True, description=None)


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
    text = call_text(family, name, arguments)
    assert judge(forced(family), text, tokenizer) is verdict
    if verdict is COMPLETE:
        assert read_whole(family, text) == [Call(name, arguments)]


@FAMILIES
def test_forced_calls_are_all_there_is(family: ToolFamily) -> None:
    one, many = forced(family), forced(family, is_parallel=True)
    call = call_text(family, "weather", ARGUMENTS)
    two = calls_text(family, ("weather", ARGUMENTS), ("anything", "{}"))
    three = calls_text(family, *[("weather", ARGUMENTS)] * 3)
    verdicts = {"": BEGUN, call[:-1]: BEGUN, call: BOTH, two: SEVERAL, three: SEVERAL}
    verdicts |= dict.fromkeys((call + call, call + " ", " " + call, "text" + call, "text"), NEITHER)
    assert {text: (judge(one, text), judge(many, text)) for text in verdicts} == verdicts


@JSON_FAMILIES
def test_names_are_escaped(family: ToolFamily) -> None:
    name = 'a"b\\c\x7f</tool_call>é%json {}'
    grammar = forced(family, [strict(name, {})])
    written = json.dumps(name, ensure_ascii=False)[1:-1]
    assert judge(grammar, call_text(family, written, "{}")) is COMPLETE
    assert read_whole(family, call_text(family, written, "{}")) == [Call(name, "{}")]


@JSON_FAMILIES
def test_references_work_in_every_function_on_its_own(family: ToolFamily) -> None:
    """The same name means something else in each; the last refers to itself as a whole."""
    of_x = {"properties": {"x": {"$ref": "#/$defs/X"}}, "required": ["x"]}
    seven = {"X": of_x | {"properties": {"x": {"const": 7}}}}
    functions = [
        strict("number", {**of_x, "$defs": {"X": {"type": "integer"}}}),
        strict("text", {**of_x, "$defs": {"X": {"type": "string"}}}),
        strict("root", {"$ref": "#/$defs/X", "$defs": seven}),
        strict("tree", {"properties": {"x": {"$ref": "#"}}, "additionalProperties": False}),
    ]
    grammar = forced(family, functions)
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
    grammar = forced(family, [strict("f", guided)])
    assert judge(grammar, call_text(family, "f", '{"a": 1, "b": 2}')) is COMPLETE
    assert judge(grammar, call_text(family, "f", '{"a": 1;"b": 2}')) is REFUSED


@pytest.mark.parametrize("kind", ["array", "string", ["object", "null"], None])
def test_parameters_must_be_an_object(kind: object) -> None:
    functions = [ANYTHING, strict("f", {"type": kind})]
    complaint = "function 'f' must be a JSON schema of type object, not "
    with pytest.raises(InvalidRequest, match=complaint) as caught:
        forced(HERMES, functions)
    assert caught.value.param == "tools"
    with pytest.raises(InvalidRequest, match=complaint):
        enforced_arguments(functions, is_forced=False)


@JSON_FAMILIES
def test_what_cannot_be_enforced_is_refused_of_strict_functions_and_passed_over_in_others(family: ToolFamily) -> None:
    parameters = {"properties": {"x": {"type": "string", "not": {"const": ""}}}, "required": ["x"]}
    grammar = forced(family, [strict("f", parameters)])
    assert 'Unimplemented keys: ["not"]' in LLMatcher.validate_grammar(grammar, byte_tokenizer())
    lax = forced(family, [FunctionSpec("f", parameters, False, None)])
    assert judge(lax, call_text(family, "f", '{"x": "y"}')) is COMPLETE
    assert judge(lax, call_text(family, "f", '{"x": 1}')) is REFUSED


HERMES_CALL, LLAMA_CALL = call_text(HERMES, "weather", ARGUMENTS), call_text(LLAMA, "weather", ARGUMENTS)

# What is free until a call begins, and what unless a call begins it.
FREE_TEXTS: dict[ToolFamily, dict[tuple[Verdict, Verdict], list[str]]] = {
    HERMES: {
        BOTH: [
            *("", 'Text.\n {"name": "é <tool </tool_call> <tool_cal', HERMES_CALL, f"Text\n{HERMES_CALL}"),
            call_text(HERMES, "search", '{"not": ["q"]}'),  # not strict: any object
        ],
        BEGUN: ["Text <tool_call>"],
        NEITHER: [
            *("Text <tool_call>x", "Text <tool_call>\nx", 'Text <tool_call>\n{"name": "wrong"', "<<tool_call>x"),
            *(f"Text\n{HERMES_CALL}\nText", f"Text\n{HERMES_CALL}Text"),
            *(call_text(HERMES, "weather", "{}"), call_text(HERMES, "search", "[]")),
        ],
        (REFUSED, INCOMPLETE): [f"Text\n{HERMES_CALL}\n"],
        SEVERAL: [f"Text\n{HERMES_CALL}\n{HERMES_CALL}"],
    },
    LLAMA: {
        BOTH: [
            *("", " \n", "Text é {}", " Text", "<|python", LLAMA_CALL, call_text(LLAMA, "search", '{"not": ["q"]}')),
            *(f"<|python_tag|>{LLAMA_CALL}", f"a\n<|python_tag|>{LLAMA_CALL}", f"\n\n{LLAMA_CALL}"),
        ],
        BEGUN: ["<|python_tag|>", "a <|python_tag|>", "{", " {"],
        NEITHER: [
            *("a <|python_tag|>print(1)", " {x", "{x", '{"answer": 1}', f"{LLAMA_CALL}\n{LLAMA_CALL}"),
            *(f"{LLAMA_CALL} Text", call_text(LLAMA, "weather", "{}")),
        ],
        (REFUSED, INCOMPLETE): [f"{LLAMA_CALL}; "],
        SEVERAL: [f"{LLAMA_CALL}; {LLAMA_CALL}", f"a <|python_tag|>{LLAMA_CALL}; {LLAMA_CALL}"],
    },
}


@TOKENIZERS
@pytest.mark.parametrize("family", FREE_TEXTS)
def test_text_is_free_up_to_calls(family: ToolFamily, tokenizer: LLTokenizer) -> None:
    one, many = free(family, is_parallel=False), free(family)
    verdicts = {text: verdict for verdict, texts in FREE_TEXTS[family].items() for text in texts}
    assert {text: (judge(one, text, tokenizer), judge(many, text, tokenizer)) for text in verdicts} == verdicts


@TOKENIZERS
@pytest.mark.parametrize("family", [LLAMA, ToolFamily.PYTHONIC])
def test_whitespace_may_precede_calls_without_marks(family: ToolFamily, tokenizer: LLTokenizer) -> None:
    text = "\n\n" + call_text(family, "weather_2", '{"n": -12}')
    assert judge(free(family), text, tokenizer) is COMPLETE
    assert calls_of(read_whole(family, text)) == [Call("weather_2", '{"n": -12}')]
    assert judge(free(family), text.replace("-12", '"x"'), tokenizer) is REFUSED


@FAMILIES
@TOKENIZERS
def test_with_an_answer_schema_it_is_calls_or_that_json(family: ToolFamily, tokenizer: LLTokenizer) -> None:
    grammar = free(family, answer_schema=PERSON)
    call = call_text(family, "weather", ARGUMENTS)
    person = '{"name": "Bob", "age": 5}'
    complete = [
        *(person, call, calls_text(family, *[("weather", ARGUMENTS)] * 2), call_text(family, "search", '{"any": 1}')),
        *('{"name": "weather", "age": 5}', '{"name": "weathers", "age": 5}'),  # begins as a call does
    ]
    refused = [
        *("Text", '{"name": "Bob", "age": "5"}', '{"name": "Bob","age": 5}', '{"age": 5, "name": "Bob"}'),
        *(call_text(family, "Bob", ARGUMENTS), call_text(family, "weather", "{}"), "Text " + call, person + call),
    ]
    verdicts = {"": INCOMPLETE, **dict.fromkeys(complete, COMPLETE), **dict.fromkeys(refused, REFUSED)}
    assert {text: judge(grammar, text, tokenizer) for text in verdicts} == verdicts


@pytest.mark.parametrize("text", ["{}", '{"answer": [1, 2]}', '{"nam": 1}', '{"names": 1}', '{"name": {"a": 1}}'])
def test_the_beginning_of_a_call_does_not_shut_out_answers(text: str) -> None:
    assert judge(free(LLAMA, answer_schema={"type": "object"}), text) is COMPLETE


SIGNS = {  # a text that nothing but a call can follow, and a pattern that is in a text just if it holds a call
    ToolFamily.HERMES: ("<tool_call>", "<tool_call>"),
    ToolFamily.LLAMA3_JSON: ("{", '"parameters"'),
    ToolFamily.MISTRAL: ("[TOOL_CALLS]", r"\[TOOL_CALLS\]"),
    ToolFamily.QWEN3_CODER: ("<tool_call>", "<function="),
    ToolFamily.SEED_OSS: ("<seed:tool_call>", "<function="),
    ToolFamily.PYTHONIC: ("[search(", r"^\[\w+\("),
}


@FAMILIES
@pytest.mark.parametrize("is_parallel", [False, True])
@TOKENIZERS
def test_every_grammar_is_valid(family: ToolFamily, is_parallel: bool, tokenizer: LLTokenizer) -> None:
    answer_schemas: list[dict[str, Any] | None] = [None, {"type": "object"}, {"type": "array"}]
    grammars = [free(family, is_parallel, schema) for schema in answer_schemas]
    for grammar in [*grammars, forced(family, is_parallel=is_parallel)]:
        assert LLMatcher.validate_grammar(grammar, tokenizer) == ""


def check_calls(family: ToolFamily, text: str) -> list[str | Call]:
    items = read_whole(family, text)
    for call in calls_of(items):
        assert isinstance(json.loads(call.arguments), dict)
        if call.name == "weather":
            WeatherArguments.model_validate_json(call.arguments)
    return items


@FAMILIES
@TOKENIZERS
@pytest.mark.parametrize("is_parallel", [False, True])
def test_whatever_is_sampled_under_a_forced_grammar_is_calls(
    family: ToolFamily, tokenizer: LLTokenizer, is_parallel: bool
) -> None:
    grammar = forced(family, is_parallel=is_parallel)
    nums_calls = set()
    for seed in range(12):
        items = check_calls(family, generate(grammar, Random(seed), tokenizer))
        assert items == calls_of(items)
        nums_calls.add(len(items))
    assert min(nums_calls) == 1
    assert (max(nums_calls) > 1) == is_parallel


@FAMILIES
@TOKENIZERS
@pytest.mark.parametrize("answer_schema", [None, PERSON], ids=["text", "answer"])
def test_whatever_is_sampled_under_a_free_grammar_is_content_or_calls(
    family: ToolFamily, tokenizer: LLTokenizer, answer_schema: dict[str, Any] | None
) -> None:
    grammar = free(family, answer_schema=answer_schema)
    begin, sign = SIGNS[family]
    for seed in range(8):
        for start in ["", begin] if answer_schema is None else [""]:
            text = generate(grammar, Random(seed), tokenizer, start)
            items = check_calls(family, text)
            assert bool(calls_of(items)) == (re.search(sign, text) is not None)
            if answer_schema is not None and not calls_of(items):
                assert json.loads(text).keys() == {"name", "age"}
