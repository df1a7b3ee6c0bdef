import pytest
from llguidance import LLTokenizer

from chairlift.api.tools import ToolFamily
from chairlift.api.tools.grammars import free_grammar
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


BOTH, NEITHER, BEGUN, SEVERAL = (COMPLETE, COMPLETE), (REFUSED, REFUSED), (INCOMPLETE, INCOMPLETE), (REFUSED, COMPLETE)
HERMES_CALL, LLAMA_CALL = call_text(HERMES, "weather", ARGUMENTS), call_text(LLAMA, "weather", ARGUMENTS)
# What is free until a call begins, and what unless a call begins it: with at most one call, and with any number.
FREE_TEXTS: dict[ToolFamily, dict[str, tuple[Verdict, Verdict]]] = {
    HERMES: {
        "": BOTH,
        'Text.\n {"name": "é <tool </tool_call> <tool_cal': BOTH,
        "Text <tool_call>": BEGUN,
        "Text <tool_call>x": NEITHER,
        "Text <tool_call>\nx": NEITHER,
        'Text <tool_call>\n{"name": "wrong"': NEITHER,
        "<<tool_call>x": NEITHER,
        HERMES_CALL: BOTH,
        f"Text\n{HERMES_CALL}": BOTH,
        f"Text\n{HERMES_CALL}\n": (REFUSED, INCOMPLETE),
        f"Text\n{HERMES_CALL}\n{HERMES_CALL}": SEVERAL,
        f"Text\n{HERMES_CALL}\nText": NEITHER,
        f"Text\n{HERMES_CALL}Text": NEITHER,
        call_text(HERMES, "weather", "{}"): NEITHER,
        call_text(HERMES, "search", '{"not": ["q"]}'): BOTH,  # not strict: any object
        call_text(HERMES, "search", "[]"): NEITHER,
    },
    LLAMA: {
        "": BOTH,
        " \n": BOTH,
        "Text é {}": BOTH,
        " Text": BOTH,
        "<|python": BOTH,
        "<|python_tag|>": BEGUN,
        "a <|python_tag|>": BEGUN,
        "a <|python_tag|>print(1)": NEITHER,
        f"<|python_tag|>{LLAMA_CALL}": BOTH,
        f"a\n<|python_tag|>{LLAMA_CALL}": BOTH,
        f"a <|python_tag|>{LLAMA_CALL}; {LLAMA_CALL}": SEVERAL,
        "{": BEGUN,
        " {": NEITHER,
        "{x": NEITHER,
        '{"answer": 1}': NEITHER,
        LLAMA_CALL: BOTH,
        f"{LLAMA_CALL}; ": (REFUSED, INCOMPLETE),
        f"{LLAMA_CALL}; {LLAMA_CALL}": SEVERAL,
        f"{LLAMA_CALL}\n{LLAMA_CALL}": NEITHER,
        f"{LLAMA_CALL} Text": NEITHER,
        call_text(LLAMA, "weather", "{}"): NEITHER,
        call_text(LLAMA, "search", '{"not": ["q"]}'): BOTH,
    },
}


@TOKENIZERS
@pytest.mark.parametrize("family", FREE_TEXTS)
def test_text_is_free_up_to_calls(family: ToolFamily, tokenizer: LLTokenizer) -> None:
    one, many = (
        free_grammar(family, FUNCTIONS, is_parallel=is_parallel, answer_schema=None, tokens={})
        for is_parallel in (False, True)
    )
    verdicts = FREE_TEXTS[family]
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
