"""Custom tools as functions: how their inputs are read from arguments while these are written, and enforced."""

import json
import re
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from chairlift.api.answers import AnswerReader, ToolFamily
from chairlift.api.answers.custom import CustomCallPiece, CustomInputs, InputGrammar, call_arguments, custom_function
from chairlift.api.answers.functions import FunctionSpec, enforced_arguments
from chairlift.api.answers.grammars import forced_calls_grammar, free_grammar
from chairlift.api.answers.text import CallPiece, ContentPiece, Piece
from chairlift.errors import InvalidRequest
from tests.api.answers.calls import FAMILIES, Verdict, byte_tokenizer, generate, judge

LINES = InputGrammar("lark", 'start: (SIGN TEXT LF)~1..3 "end"\nSIGN: "+" | "-"\nTEXT: /.{0,3}/\n%import common.LF')
LINES_PATTERN = r"(?:[+-].{0,3}\n){1,3}end"


def input_of(*arguments: str) -> str:
    """The input in these pieces of a custom tool's arguments."""
    pieces: list[Piece] = [CallPiece(0, "edit" if not i else None, each) for i, each in enumerate(arguments)]
    inputs = CustomInputs({"edit"})
    told = [piece for each in pieces for piece in inputs.read([each], is_last=False)] + inputs.read([], is_last=True)
    assert all(isinstance(piece, CustomCallPiece) for piece in told)
    assert [piece.name for piece in told if isinstance(piece, CallPiece)] == ["edit"] + [None] * (len(told) - 1)
    return "".join(piece.text for piece in told)


@given(st.text(), st.booleans(), st.lists(st.integers(0, 400), max_size=4))
def test_an_input_is_the_same_however_its_arguments_are_split(text: str, is_ascii: bool, cuts: list[int]) -> None:
    written = json.dumps({"input": text}, ensure_ascii=is_ascii)
    bounds = [0, *sorted(cuts), len(written)]
    assert input_of(*(written[begin:end] for begin, end in pairwise(bounds))) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (' { "input" : "a\\nb" , "why": 1}', "a\nb"),
        ('{"input": "cut \\u00e9 off\\u12', "cut é off"),
        ('{"input": "half \\ud83d."}', "half \ufffd."),
        ('{"input": "not \\q JSON"}', "not \\q JSON"),
        ('{"patch": "a\\nb"}', "a\nb"),
        ('"a\\nb"', "a\nb"),
        ('{"a": "b", "c": "d"}', '{"a": "b", "c": "d"}'),
        ('{"input": 7}', '{"input": 7}'),
        ("{}", ""),
        ("", ""),
    ],
)
def test_arguments_of_another_form_are_the_input(arguments: str, text: str) -> None:
    assert input_of(arguments) == text
    assert input_of(*arguments, "") == text


def test_an_input_is_told_while_it_is_written() -> None:
    inputs = CustomInputs({"edit"})
    told: list[Piece] = []
    written = [CallPiece(0, "edit", '{"inp'), CallPiece(0, None, 'ut": "a\\'), CallPiece(0, None, 'nb"}')]
    others: list[Piece] = [CallPiece(1, "other", '{"input": "c"}'), ContentPiece("d")]
    for piece in [*written, *others]:
        told += inputs.read([piece], is_last=False)
    called = [CustomCallPiece(0, "edit", ""), CustomCallPiece(0, None, "a"), CustomCallPiece(0, None, "\nb")]
    assert told == [*called, *others]


OTHER = FunctionSpec("other", {"type": "object", "properties": {}}, False, None)


@FAMILIES
@pytest.mark.parametrize("is_forced", [True, False])
def test_inputs_match_their_grammar_in_every_format(family: ToolFamily, is_forced: bool) -> None:
    edit = custom_function("edit", "Edits.", LINES)
    functions = enforced_arguments([edit, OTHER], is_forced)
    grammar = forced_calls_grammar(family, functions, True, {}) if is_forced else ""
    grammar = grammar or free_grammar(family, functions, True, {"const": 1}, {})
    assert LLMatcher.validate_grammar(grammar, byte_tokenizer()) == ""
    inputs: list[str] = []
    for seed in range(40):
        reader = AnswerReader(family, schemas={"edit": edit.schema, "other": {}}, custom={"edit"})
        pieces = reader.push(generate(grammar, Random(seed), byte_tokenizer(), budget=100), is_last=True)
        texts: dict[int, str] = {}
        for piece in pieces:
            if isinstance(piece, CustomCallPiece):
                texts[piece.index] = texts.get(piece.index, "") + piece.text
        inputs += texts.values()
    assert len(inputs) >= 5
    assert all(re.fullmatch(LINES_PATTERN, text) for text in inputs)


@pytest.mark.parametrize("definition", ["^[a-c]/\n?$", "[a-c]/\n?"])
def test_a_regular_expression_matches_the_whole_input(definition: str) -> None:
    functions = enforced_arguments([custom_function("edit", None, InputGrammar("regex", definition))])
    hermes = '<tool_call>\n{"name": "edit", "arguments": ARGUMENTS}\n</tool_call>'
    coder = "<tool_call>\n<function=edit>\n<parameter=input>\nTEXT\n</parameter>\n</function>\n</tool_call>"
    for family, call in ((ToolFamily.HERMES, hermes), (ToolFamily.QWEN3_CODER, coder)):
        grammar = forced_calls_grammar(family, functions, False, {})
        verdicts = []
        for text in ("a/", "a/\n", "a", "xa/", "a/x"):
            written = call.replace("TEXT", text).replace("ARGUMENTS", call_arguments(text))
            verdicts.append(judge(grammar, written) is Verdict.COMPLETE)
        assert verdicts == [True, True, False, False, False]


def test_a_custom_tool_is_shown_as_a_function_with_its_grammar() -> None:
    shown = custom_function("edit", "Edits.", InputGrammar("regex", "a+")).as_template_input()["function"]
    about = {"type": "string", "description": "the input of the tool, which must match this regex:\na+"}
    assert (shown["name"], shown["description"], shown["parameters"]["properties"]) == (
        "edit",
        "Edits.",
        {"input": about},
    )
    assert "strict" not in shown


def test_a_grammar_that_is_not_regular_is_told_and_one_that_is_none_refused() -> None:
    nested = custom_function("calc", None, InputGrammar("lark", 'start: "(" start ")" | "x"'))
    assert nested.left_out == ("tools: the grammar of custom tool 'calc' is not enforced: rule start contains itself",)
    assert not nested.is_enforced
    with pytest.raises(InvalidRequest, match="the grammar of custom tool 'calc' cannot be read: rule start is not def"):
        custom_function("calc", None, InputGrammar("lark", 'begin: "x"'))
