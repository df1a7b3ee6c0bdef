"""Whatever is sampled under a grammar's masks, the parser reads as what the grammar stands for."""

import json
import re
from random import Random
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel

from chairlift.api.tools import ToolFamily
from chairlift.api.tools.grammars import forced_calls_grammar, free_grammar
from tests.api.tools.driving import generate
from tests.api.tools.functions import (
    FAMILIES,
    FUNCTIONS,
    PERSON,
    TOKENIZERS,
    WeatherArguments,
)
from tests.api.tools.reading import Call, calls_of, read_whole

SIGNS = {  # a text that nothing but a call can follow, and a pattern that is in a text just if it holds a call
    ToolFamily.HERMES: ("<tool_call>", "<tool_call>"),
    ToolFamily.LLAMA3_JSON: ("{", '"parameters"'),
    ToolFamily.MISTRAL: ("[TOOL_CALLS]", r"\[TOOL_CALLS\]"),
    ToolFamily.QWEN3_CODER: ("<tool_call>", "<function="),
    ToolFamily.PYTHONIC: ("[search(", r"^\[\w+\("),
}


@FAMILIES
@pytest.mark.parametrize("is_parallel", [False, True])
@pytest.mark.parametrize("answer_schema", [None, {"type": "object"}, {"type": "array"}])
@TOKENIZERS
def test_every_grammar_is_valid(
    family: ToolFamily, is_parallel: bool, answer_schema: dict[str, Any] | None, tokenizer: LLTokenizer
) -> None:
    free = free_grammar(family, FUNCTIONS, is_parallel, answer_schema, {})
    assert LLMatcher.validate_grammar(free, tokenizer) == ""
    assert LLMatcher.validate_grammar(forced_calls_grammar(family, FUNCTIONS, is_parallel, {}), tokenizer) == ""


MODELS: dict[str, type[BaseModel] | None] = {
    "weather": WeatherArguments,
    "weather_2": None,
    "search": None,
    "anything": None,
}


def check_calls(family: ToolFamily, text: str) -> list[str | Call]:
    items = read_whole(family, text)
    for call in calls_of(items):
        assert isinstance(json.loads(call.arguments), dict)
        model = MODELS[call.name]
        if model is not None:
            model.model_validate_json(call.arguments)
    return items


@FAMILIES
@TOKENIZERS
@pytest.mark.parametrize("is_parallel", [False, True])
def test_whatever_is_sampled_under_a_forced_grammar_is_calls(
    family: ToolFamily, tokenizer: LLTokenizer, is_parallel: bool
) -> None:
    grammar = forced_calls_grammar(family, FUNCTIONS, is_parallel, {})
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
    grammar = free_grammar(family, FUNCTIONS, is_parallel=True, answer_schema=answer_schema, tokens={})
    begin, sign = SIGNS[family]
    for seed in range(12):
        for start in ["", begin] if answer_schema is None else [""]:
            text = generate(grammar, Random(seed), tokenizer, start)
            items = check_calls(family, text)
            assert bool(calls_of(items)) == (re.search(sign, text) is not None)
            if answer_schema is not None and not calls_of(items):
                assert json.loads(text).keys() == {"name", "age"}
