import pytest
from llguidance import LLTokenizer

from chairlift.api.tools import ToolFamily, free_grammar
from tests.api.tools.driving import Verdict, judge
from tests.api.tools.functions import (
    ARGUMENTS,
    FAMILIES,
    FUNCTIONS,
    PERSON,
    TOKENIZERS,
    call_text,
    calls_text,
)

HERMES, LLAMA = ToolFamily.HERMES, ToolFamily.LLAMA3_JSON
COMPLETE, INCOMPLETE, REFUSED = Verdict.COMPLETE, Verdict.INCOMPLETE, Verdict.REFUSED


@TOKENIZERS
def test_hermes_text_is_free_until_a_call_begins(tokenizer: LLTokenizer) -> None:
    one = free_grammar(HERMES, FUNCTIONS, is_parallel=False, answer_schema=None, tokens={})
    many = free_grammar(HERMES, FUNCTIONS, is_parallel=True, answer_schema=None, tokens={})
    call = call_text(HERMES, "weather", ARGUMENTS)
    verdicts = {
        "": (COMPLETE, COMPLETE),
        'Text.\n {"name": "é <tool </tool_call> <tool_cal': (COMPLETE, COMPLETE),
        "Text <tool_call>": (INCOMPLETE, INCOMPLETE),
        "Text <tool_call>x": (REFUSED, REFUSED),
        "Text <tool_call>\nx": (REFUSED, REFUSED),
        'Text <tool_call>\n{"name": "wrong"': (REFUSED, REFUSED),
        "<<tool_call>x": (REFUSED, REFUSED),
        call: (COMPLETE, COMPLETE),
        f"Text\n{call}": (COMPLETE, COMPLETE),
        f"Text\n{call}\n": (REFUSED, INCOMPLETE),
        f"Text\n{call}\n{call}": (REFUSED, COMPLETE),
        f"Text\n{call}\nText": (REFUSED, REFUSED),
        f"Text\n{call}Text": (REFUSED, REFUSED),
        call_text(HERMES, "weather", "{}"): (REFUSED, REFUSED),
        call_text(HERMES, "search", '{"not": ["q"]}'): (COMPLETE, COMPLETE),  # not strict: any object
        call_text(HERMES, "search", "[]"): (REFUSED, REFUSED),
    }
    assert {text: (judge(one, text, tokenizer), judge(many, text, tokenizer)) for text in verdicts} == verdicts


@TOKENIZERS
def test_llama_text_is_free_unless_a_call_begins_it(tokenizer: LLTokenizer) -> None:
    one = free_grammar(LLAMA, FUNCTIONS, is_parallel=False, answer_schema=None, tokens={})
    many = free_grammar(LLAMA, FUNCTIONS, is_parallel=True, answer_schema=None, tokens={})
    call = call_text(LLAMA, "weather", ARGUMENTS)
    verdicts = {
        "": (COMPLETE, COMPLETE),
        " \n": (COMPLETE, COMPLETE),
        "Text é {}": (COMPLETE, COMPLETE),
        " Text": (COMPLETE, COMPLETE),
        "<|python": (COMPLETE, COMPLETE),
        "<|python_tag|>": (INCOMPLETE, INCOMPLETE),
        "a <|python_tag|>": (INCOMPLETE, INCOMPLETE),
        "a <|python_tag|>print(1)": (REFUSED, REFUSED),
        f"<|python_tag|>{call}": (COMPLETE, COMPLETE),
        f"a\n<|python_tag|>{call}": (COMPLETE, COMPLETE),
        f"a <|python_tag|>{call}; {call}": (REFUSED, COMPLETE),
        "{": (INCOMPLETE, INCOMPLETE),
        " {": (REFUSED, REFUSED),
        "{x": (REFUSED, REFUSED),
        '{"answer": 1}': (REFUSED, REFUSED),
        call: (COMPLETE, COMPLETE),
        f"{call}; ": (REFUSED, INCOMPLETE),
        f"{call}; {call}": (REFUSED, COMPLETE),
        f"{call}\n{call}": (REFUSED, REFUSED),
        f"{call} Text": (REFUSED, REFUSED),
        call_text(LLAMA, "weather", "{}"): (REFUSED, REFUSED),
        call_text(LLAMA, "search", '{"not": ["q"]}'): (COMPLETE, COMPLETE),
    }
    assert {text: (judge(one, text, tokenizer), judge(many, text, tokenizer)) for text in verdicts} == verdicts


@FAMILIES
@TOKENIZERS
def test_with_an_answer_schema_it_is_calls_or_that_json(family: ToolFamily, tokenizer: LLTokenizer) -> None:
    grammar = free_grammar(family, FUNCTIONS, is_parallel=True, answer_schema=PERSON, tokens={})
    call = call_text(family, "weather", ARGUMENTS)
    verdicts = {
        "": INCOMPLETE,
        "Text": REFUSED,
        '{"name": "Bob", "age": 5}': COMPLETE,
        '{"name": "weather", "age": 5}': COMPLETE,  # begins as a call does
        '{"name": "weathers", "age": 5}': COMPLETE,
        '{"name": "Bob", "age": "5"}': REFUSED,
        '{"name": "Bob","age": 5}': REFUSED,
        '{"age": 5, "name": "Bob"}': REFUSED,
        call: COMPLETE,
        calls_text(family, *[("weather", ARGUMENTS)] * 2): COMPLETE,
        call_text(family, "Bob", ARGUMENTS): REFUSED,
        call_text(family, "weather", "{}"): REFUSED,
        call_text(family, "search", '{"any": 1}'): COMPLETE,
        "Text " + call: REFUSED,
        '{"name": "Bob", "age": 5}' + call: REFUSED,
    }
    assert {text: judge(grammar, text, tokenizer) for text in verdicts} == verdicts


@pytest.mark.parametrize("text", ["{}", '{"answer": [1, 2]}', '{"nam": 1}', '{"names": 1}', '{"name": {"a": 1}}'])
def test_the_beginning_of_a_call_does_not_shut_out_answers(text: str) -> None:
    grammar = free_grammar(LLAMA, FUNCTIONS, is_parallel=True, answer_schema={"type": "object"}, tokens={})
    assert judge(grammar, text) is COMPLETE
