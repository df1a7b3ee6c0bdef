"""Formats by name and by template, thoughts before an answer, calls that are code; and wherever a text is cut."""

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.api.answers import (
    FORMATS,
    AnswerReader,
    ReasoningFamily,
    Thoughts,
    ToolFamily,
    family_of_template,
    reasoning_of_template,
)
from chairlift.api.answers.formats import Schemas
from chairlift.api.answers.functions import FunctionSpec, enforced_arguments
from chairlift.api.answers.grammars import forced_calls_grammar
from chairlift.api.answers.text import CallPiece, ContentPiece, ReasoningPiece
from tests.api.answers.calls import (
    FAMILIES,
    JSON_VALUES,
    NO_SCHEMAS,
    Call,
    Table,
    assert_streams,
    calls_of,
    every_split,
    joined,
    read,
    read_whole,
)

QWEN = r"""{{- "\n\nFor each function call, return a json object with function name and arguments within
<tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n
</tool_call><|im_end|>\n" }}"""

QWEN_3 = (
    QWEN
    + r"""{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"""
)
LLAMA_3_2 = """{{- 'Respond with {"name": function name, "parameters": dictionary of arguments}.' }}
{%- elif message.role == "tool" or message.role == "ipython" %}
    {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}"""
LLAMA_4 = """{{- "put it in the format of [func_name1(params_name1=params_value1, params_name2=params_value2)]" }}
{{- "<|header_start|>ipython<|header_end|>" }}"""
MISTRAL = """{{- "[TOOL_CALLS] [" }}{{- '{"name": ' + tool_call.function|tojson }}"""
DEEPSEEK_R1 = r"""{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{'<|tool_calls_begin|>'}}{% if add_generation_prompt %}{{'<|Assistant|><think>\n'}}{% endif %}"""
NONE = ReasoningFamily.NONE


@pytest.mark.parametrize(
    ("template", "family", "reasoning"),
    [
        (QWEN, ToolFamily.HERMES, NONE),
        (QWEN_3, ToolFamily.HERMES, ReasoningFamily.THINK),
        (r"{{- '<tool_call>\n<function=example_function_name>\n<parameter=example' }}", ToolFamily.QWEN3_CODER, NONE),
        ("<seed:tool_call>\n<function=f>\n<parameter=a>1</parameter>", ToolFamily.SEED_OSS, NONE),
        ("""{{- "<|python_tag|>" + tool_call.name + ".call(" }}""", ToolFamily.LLAMA3_JSON, NONE),
        (LLAMA_3_2, ToolFamily.LLAMA3_JSON, NONE),
        (LLAMA_4, ToolFamily.PYTHONIC, NONE),
        (MISTRAL, ToolFamily.MISTRAL, NONE),
        (MISTRAL + "[THINK]", ToolFamily.MISTRAL, ReasoningFamily.MISTRAL),
        (DEEPSEEK_R1, None, ReasoningFamily.THINK),
        ("""{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking }}""", ToolFamily.HARMONY, NONE),
        (QWEN + LLAMA_3_2, ToolFamily.HERMES, NONE),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key></tool_call>", None, NONE),  # GLM
        ("<function=name>{arguments}</function>, or code after <|python_tag|> {%- if 'ipython' %}", None, NONE),
        ("in <tool_call></tool_call> tags: <tool_calls>[{name: ...}]</tool_calls>", None, NONE),  # Apriel
        ("""{"tool_name": title of the tool in the specification, "parameters": a dict of parameters}""", None, NONE),
        ("<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>", None, NONE),
        ("", None, NONE),
    ],
)
def test_the_template_tells_how_calls_and_thoughts_are_written(
    template: str, family: ToolFamily | None, reasoning: ReasoningFamily
) -> None:
    assert (family_of_template(template), reasoning_of_template(template)) == (family, reasoning)


def test_families_have_the_names_that_users_give_and_some_models_names_mean_how_they_think() -> None:
    assert [*ToolFamily] == ["hermes", "llama3_json", "mistral", "qwen3_coder", "seed_oss", "pythonic", "harmony"]
    assert ToolFamily("openai") is ToolFamily.HARMONY
    assert [*ReasoningFamily] == ["think", "mistral", "seed_oss", "none"]
    assert [ReasoningFamily(name) for name in ("qwen3", "deepseek_r1")] == [ReasoningFamily.THINK] * 2


MAY_BEGIN, HAS_BEGUN = Thoughts("<think>", "</think>", False), Thoughts("<think>", "</think>", True)


def told(
    thoughts: Thoughts, texts: list[str], family: ToolFamily | None = None, is_whole: bool = False
) -> tuple[str, str, list[str]]:
    """Reasoning, content, and the names of calls. Reasoning comes before all else."""
    reader = AnswerReader(family, thoughts=thoughts)
    pieces = [piece for text in texts for piece in reader.push(text)] + reader.push("", True, is_whole)
    kinds = [isinstance(piece, ReasoningPiece) for piece in pieces]
    assert kinds == sorted(kinds, reverse=True)
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece))
    content = "".join(piece.text for piece in pieces if isinstance(piece, ContentPiece))
    return reasoning, content, [piece.name for piece in pieces if isinstance(piece, CallPiece) and piece.name]


@pytest.mark.parametrize(
    ("thoughts", "text", "reasoning", "content"),
    [
        (MAY_BEGIN, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (MAY_BEGIN, "\n<think>Hm.</think>Yes.\n", "Hm.", "Yes.\n"),
        (MAY_BEGIN, "<think>\n\n</think>\n\nYes.", "", "Yes."),
        (MAY_BEGIN, "<think>\nHm", "Hm", ""),
        (MAY_BEGIN, "<think>Hm </thi", "Hm </thi", ""),
        (MAY_BEGIN, "Yes.", "", "Yes."),
        (MAY_BEGIN, "\n Yes. <think>no</think>", "", "\n Yes. <think>no</think>"),
        (MAY_BEGIN, "<thin", "", "<thin"),
        (MAY_BEGIN, "", "", ""),
        (HAS_BEGUN, "Hm.\n\nHm.\n</think>\n\nYes.", "Hm.\n\nHm.", "Yes."),
        (HAS_BEGUN, "<think>\nHm.</think>Yes. </think>", "Hm.", "Yes. </think>"),
        (HAS_BEGUN, "</think>\n\n  Yes.", "", "  Yes."),
        (HAS_BEGUN, " Hm\n", " Hm\n", ""),
    ],
)
def test_thoughts_end_where_the_mark_stands(thoughts: Thoughts, text: str, reasoning: str, content: str) -> None:
    for texts in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        assert told(thoughts, texts) == (reasoning, content, [])


@pytest.mark.parametrize("family", [ToolFamily.HERMES, ToolFamily.QWEN3_CODER, ToolFamily.LLAMA3_JSON])
def test_calls_are_looked_for_behind_the_thoughts_only(family: ToolFamily) -> None:
    calls = {
        ToolFamily.HERMES: '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        ToolFamily.QWEN3_CODER: "<tool_call><function=f></function></tool_call>",
        ToolFamily.LLAMA3_JSON: '{"name": "f", "parameters": {}}',
    }
    text = f"{calls[family]}</think>\n\n{calls[family]}"
    for texts in ([text], list(text)):
        assert told(HAS_BEGUN, texts, family) == (calls[family], "", ["f"])


PING = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "names"),
    [
        (f"I ask.\n\n{PING}", "I ask.", "", ["ping"]),
        (f"{PING}\n{PING}\n", "", "", ["ping", "ping"]),
        (f"<tool_call> is how. So\n{PING} Done.", "<tool_call> is how. So", " Done.", ["ping"]),
        ("I know\n\n<tool_call>, and no more.\n", "I know\n\n<tool_call>, and no more.\n", "", []),
        (f"{PING}? No.\n</think>\nNo.", f"{PING}? No.", "No.", []),
        (f"{PING}? No.\n</think>\n{PING}", f"{PING}? No.", "", ["ping"]),
    ],
)
def test_thoughts_that_are_never_closed_may_end_with_calls(
    text: str, reasoning: str, content: str, names: list[str]
) -> None:
    for texts in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        assert told(HAS_BEGUN, texts, ToolFamily.HERMES, is_whole=True) == (reasoning, content, names)


def test_calls_in_thoughts_that_were_cut_off_are_thoughts() -> None:
    assert told(HAS_BEGUN, [f"I ask.\n{PING}"], ToolFamily.HERMES) == (f"I ask.\n{PING}", "", [])


def test_no_more_calls_than_wanted_are_read_out_of_thoughts() -> None:
    reader = AnswerReader(ToolFamily.HERMES, max_calls=1, thoughts=HAS_BEGUN)
    assert reader.push(PING + PING, True, True) == [CallPiece(0, "ping", ""), CallPiece(0, None, "{}")]
    assert reader.is_full


def test_thoughts_stream_at_once() -> None:
    assert_streams(
        AnswerReader(None, thoughts=MAY_BEGIN),
        ("<thi", []),
        ("nk>\n", []),
        ("Hm. ", [ReasoningPiece("Hm. ")]),
        ("So\n</", [ReasoningPiece("So")]),
        ("b>", [ReasoningPiece("\n</b>")]),
        ("</think>", []),
        ("\n\nYes", [ContentPiece("Yes")]),
    )


CODER, PYTHONIC = ToolFamily.QWEN3_CODER, ToolFamily.PYTHONIC

MAYBE, EITHER = {"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": ["number", "string"]}
PROPERTIES = {"text": {"type": "string"}, "mode": {"enum": ["a", "b"]}, "n": {"type": "integer"}, "maybe": MAYBE}
LISTS = {"list": {"type": "array"}, "many": {"type": ["array", "string"]}, "each": {"allOf": [{"type": "string"}]}}
SCHEMAS = {"f": {"properties": {**PROPERTIES, "either": EITHER, **LISTS}}}
F, G = Call("f", '{"a": 1}'), Call("g", "{}")


def element(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def coder_call(*elements: str, name: str = "f") -> str:
    return f"<tool_call>\n<function={name}>\n{''.join(elements)}</function>\n</tool_call>"


CODER_F = coder_call(element("a", "1"))


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        *(("text", text, text) for text in ("5", '"quoted"\n  <b>\\ é', "\n  indented\n", "")),
        *(("mode", "a", "a"), ("n", "5", 5), ("n", "five", "five"), ("maybe", "null", None), ("maybe", "5", "5")),
        *(("either", "5", 5), ("either", "true", "true"), ("unknown", "5", 5), ("unknown", "[1, two]", "[1, two]")),
        *(("list", '["a", {"b": null}]', ["a", {"b": None}]), ("list", "['a', True]", ["a", True])),
        ("list", '["</parameter>"]', ["</parameter>"]),
        # An array that stands in a string, is escaped as if it did, mixes Python and JSON, or is malformed.
        *(
            ("list", each, ["a", True])
            for each in ('"[\\"a\\", true]"', '[\\"a\\", true]', "['a', true]", '["a", true')
        ),
        *(("list", "no list", "no list"), ("many", "5", "5"), ("many", "[a", "[a"), ("each", "5", "5")),
    ],
)
def test_values_of_elements_are_of_the_types_of_the_schema(key: str, written: str, value: object) -> None:
    (call,) = every_split(CODER, coder_call(element(key, written)), schemas=SCHEMAS)
    assert isinstance(call, Call)
    assert json.loads(call.arguments) == {key: value}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        *(("-1.5e3", -1500.0), ("True", True), ("true", True), ("None", None), ("null", None), ("(1, 2)", [1, 2])),
        *(('"x, y)"', "x, y)"), ("'it\\'s'", "it's"), ('"\\d\\n"', "\\d\n"), ("[1, [2, 'a']]", [1, [2, "a"]])),
        ("{'k': {'l': None}}", {"k": {"l": None}}),
        *((text, text) for text in ("g(1)", "x", "{1, 2}", "1e999")),
    ],
)
def test_python_literals_become_json_and_anything_else_text(written: str, value: object) -> None:
    (call,) = every_split(PYTHONIC, f"[f(a={written})]")
    assert isinstance(call, Call)
    assert (call.name, json.loads(call.arguments)) == ("f", {"a": value})


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": 5},
        {"properties": {"a": 5}},
        {"properties": {"a": {"type": 5, "enum": 5, "anyOf": 5, "oneOf": [5, None]}}, "required": 5},
        {"properties": {"a": {"type": [{}], "anyOf": [{"type": "integer"}]}}},
    ],
)
def test_a_schema_that_is_none_does_no_harm(parameters: dict[str, Any]) -> None:
    reader = AnswerReader(CODER, None, {"f": parameters})
    assert joined(reader.push(CODER_F, is_last=True)) == [F]
    for family in (CODER, PYTHONIC):
        functions = enforced_arguments([FunctionSpec("f", parameters, True, None)])
        assert forced_calls_grammar(family, functions, True, {})


ANSWERS: dict[ToolFamily, Table] = {
    CODER: {
        coder_call(): [Call("f", "{}")],
        "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>": [F],
        f"Well.\n{CODER_F}\n{coder_call(name='g')}": ["Well.", F, G],
        "Well. <function=f><parameter=a>1</parameter></function>": ["Well.", F],
        coder_call(element("a", "1"), element("text", "x")): [Call("f", '{"a": 1, "text": "x"}')],
        "<tool_call>\n<function=f>\n<parameter=text>\nhel": [Call("f", '{"text": "hel')],
        "<tool_call>\n<function=f>\n<parameter=a>\n[1, ": [Call("f", '{"a": [1,')],
        f"<tool_call><function=f>{element('a', '1')}oops": [F, "\noops"],
        "<tool_call>oops</tool_call>": ["<tool_call>oops</tool_call>"],
        "<tool_call><function=f>oops": ["<tool_call><function=f>oops"],
        "<tool_call>\n<functio": ["<tool_call>\n<functio"],
    },
    PYTHONIC: {
        " [ f ( a = 1 , ) ]\n": [F],
        '[f(a=1, b="x"), g()]': [Call("f", '{"a": 1, "b": "x"}'), G],
        "<|python_start|>[f(a=1)]<|python_end|>": [F],
        "Well. <|python_start|>[f(a=1)]<|python_end|>": ["Well. ", F],
        "[f(a=1)] and more": [F, " and more"],
        "[f(a=1), oops]": [F, ", oops]"],
        "[f(a=1) and g()]": [F, " and g()]"],
        "[f(a=1)\n g(), ])]": [F, G],
        "<|python_start|>[f(a=1)]]<|python_end|>": [F],
        "[f(a='\\ud83d')]": [Call("f", '{"a": "\ufffd"}')],
        "[f(a=1": [Call("f", '{"a": 1')],
        '[f(a="Ro': [Call("f", '{"a": "Ro')],
        "[f(a=1]": [F],
        **{text: [text] for text in ("Well: [h(a=1)]", "[1, 2]", "[a link](http://x)", "[f(1)]", "[f(", "[")},
    },
}


ENDS: Table = {  # of Qwen3-Coder's elements, as models forget, repeat and misplace them
    "<tool_call>\n<function=f>\n<parameter=a>\n1\n<parameter=text>\nx\n</parameter>\n</function>\n</tool_call>": [
        Call("f", '{"a": 1, "text": "x"}')
    ],
    **{
        f"<tool_call>\n<function=f>\n<parameter=text>\nx y{end}\nbye": [Call("f", '{"text": "x y"}'), "\nbye"]
        for end in (
            "\n</function>\n</tool_call>",
            "</function></tool_call>",
            "\n</tool_call>",
            "</parameter></tool_call>",
        )
    },
    "<tool_call><function=f><parameter=a>1</tool_call><function=f><parameter=a>1</function></tool_call>": [F, F],
    "<tool_call><function=f><parameter=text>x</function>\n<function=g></function></tool_call>": [
        Call("f", '{"text": "x"}'),
        G,
    ],
    "<tool_call><function=f></parameter><parameter=a>1</parameter></parameter></function></tool_call>": [F],
    f"</parameter></function>\n</tool_call>\n{CODER_F}</tool_call>": [F],
    "Well.\n\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n": ["Well.", F],
    "<tool_call><function=f\n<parameter=a\n>1</parameter></function></tool_call>": [F],
    "<tool_call><function='f'><parameter=\"a\">1</parameter></function></tool_call>": [F],
    "<tool_call>\n<function=g>\n</tool_call>": [G],
    "<tool_call><function=g\n</function></tool_call>": [G],
    "<tool_call><function=g>": ["<tool_call><function=g>"],
    "<tool_call><function=></function></tool_call>": ["<tool_call><function=></function></tool_call>"],
    coder_call(element("text", "call </function> or <parameter=other> or </param")): [
        Call("f", '{"text": "call </function> or <parameter=other> or </param"}')
    ],
    "<tool_call><function=f><parameter=list>['a', {'b': None}]</function></tool_call>": [
        Call("f", '{"list": ["a", {"b": null}]}')
    ],
    '<tool_call><function=f><parameter=list>["</tool_call>"]\n</function></tool_call>': [
        Call("f", '{"list": ["</tool_call>"]}')
    ],
}


def test_an_element_ends_with_its_mark_or_where_the_next_begins() -> None:
    assert {text: every_split(CODER, text, schemas=SCHEMAS) for text in ENDS} == ENDS


@pytest.mark.parametrize(
    ("family", "text", "arguments"),
    [
        (CODER, "<tool_call><function=f><parameter=text>x", '{"text": "x"}'),
        (CODER, "<tool_call><function=f><parameter=n>5", '{"n": 5}'),
        (CODER, "<tool_call><function=f><parameter=text>x</parameter><parameter=n>5", '{"text": "x", "n": 5}'),
        (PYTHONIC, "[f(a=1", '{"a": 1}'),
        (PYTHONIC, "[f(a='x', b=[1]", '{"a": "x", "b": [1]}'),
        (PYTHONIC, "[f(a='x", '{"a": \'x'),  # half a string
    ],
)
def test_a_call_ends_with_an_answer_that_nothing_cut_off(family: ToolFamily, text: str, arguments: str) -> None:
    reader = AnswerReader(family, schemas=SCHEMAS)
    pieces = [piece for character in text for piece in reader.push(character)]
    assert joined(pieces + reader.push("", is_last=True, is_whole=True)) == [Call("f", arguments)]


@pytest.mark.parametrize(
    ("element", "arguments"),
    [
        ("<parameter=text>x</parameter>", '{"text": "x"}'),
        ("<parameter=text>x\n</parameter>", '{"text": "x\\n"}'),  # no line break but the text's own
        ("<parameter=text>\nx\n\n</parameter>", '{"text": "x\\n"}'),
        ("<parameter=text></parameter>", '{"text": ""}'),
        ("<parameter=text>x\n<parameter=n>\n5\n</parameter>", '{"text": "x", "n": 5}'),
        ("<parameter=text>a </tool_call>", '{"text": "a </tool_call>"}'),
    ],
)
def test_seed_oss_writes_values_right_between_their_marks(element: str, arguments: str) -> None:
    call = f"<seed:tool_call>\n<function=f>\n{element}\n</function>\n</seed:tool_call>"
    items = [Call("f", arguments)]
    assert every_split(ToolFamily.SEED_OSS, f"Well.\n{call}\n", schemas=SCHEMAS) == ["Well.", *items]
    assert every_split(ToolFamily.SEED_OSS, f"{call}\n{call}", schemas=SCHEMAS) == items * 2


@pytest.mark.parametrize("family", ANSWERS)
def test_calls_are_elements_or_a_list_of_python_calls(family: ToolFamily) -> None:
    assert {text: every_split(family, text, schemas=SCHEMAS) for text in ANSWERS[family]} == ANSWERS[family]
    text = {CODER: CODER_F * 2, PYTHONIC: "[f(a=1), f(a=1)] more"}[family]
    assert every_split(family, text, max_calls=1) == [F]


def test_text_of_an_element_streams_while_it_is_written_and_arguments_of_a_python_call_one_by_one() -> None:
    assert_streams(
        AnswerReader(CODER, None, SCHEMAS),
        ("Well. \n<tool", [ContentPiece("Well.")]),
        ("_call>\n<function=f>\n", []),
        ("<parameter=text>", [CallPiece(0, "f", ""), CallPiece(0, None, '{"text": ')]),
        ('\nsay "a', [CallPiece(0, None, '"say \\"a')]),
        ("b\n</par", [CallPiece(0, None, "b")]),
        ("agraph>\n", [CallPiece(0, None, "\\n</paragraph>")]),
        ("</parameter>\n", [CallPiece(0, None, '"')]),
        ("<parameter=n>\n1", [CallPiece(0, None, ', "n": ')]),
        ("2\n</parameter>", [CallPiece(0, None, "12")]),
        ("</function></tool_call>", [CallPiece(0, None, "}")]),
    )
    assert_streams(
        AnswerReader(PYTHONIC),
        ("[weather(city", []),
        ("=", [CallPiece(0, "weather", ""), CallPiece(0, None, '{"city": ')]),
        ("'Rome'", []),
        (", da", [CallPiece(0, None, '"Rome"')]),
        ("ys=3", [CallPiece(0, None, ', "days": ')]),
        (")]", [CallPiece(0, None, "3}")]),
    )


LLAMA = ToolFamily.LLAMA3_JSON
KNOWN: Schemas = {"f": {}}
IN_TEXT: dict[ToolFamily, Table] = {
    LLAMA: {
        'Sure: {"name": "f", "parameters": {"a": 1}} Done.': ["Sure: ", F, " Done."],
        '```json\n{"name": "f", "arguments": {"a": 1}}\n```': ["```json\n", F],
        'A {1} {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}': ["A {1} ", F, G],
        **{
            text: [text]
            for text in (
                'Sure: {"name": "g", "parameters": {}}',
                'Sure: {"name": "f"}',
                'if (a) { b({"name": "f", x}); }',
                '{"tool": {"name": "f", "parameters": {}}}',
            )
        },
    },
    PYTHONIC: {
        "Sure: [f(a=1)] Done.": ["Sure: ", F, " Done."],
        "See [1], [f(a=1), g()]\n": ["See [1], ", F, G],
        "f(a=1), g()": [F, G],
        "f(a=1)\nf(a=1)": [F, F],
        **{text: [text] for text in ("Sure: [g()]", "g()", "f of x", "See [f(1)] and a[f]", "Sure: f(a=1)")},
    },
}


@pytest.mark.parametrize("family", IN_TEXT)
def test_a_call_of_a_known_function_is_found_in_a_text_without_marks(family: ToolFamily) -> None:
    assert {text: every_split(family, text, schemas=KNOWN) for text in IN_TEXT[family]} == IN_TEXT[family]


# Everything that some state of a parser looks out for, whole and in halves, and calls of every kind.
FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<tool", "_call>", "</tool_c", "<", "</", "<|python_tag|>", "<|py", "thon_tag|>"),
    *('{"name": "f", "arguments": ', '{"name": "g", "parameters":', '{"name": "h"', ', "arguments": '),
    *('{"arguments": {}', '{"a": "b\\"}', "{}", "}", "{", '"', "\\", '\\"', ":", ",", ";", "; ", "[1, 2", "]", "null"),
    *("12", "x", "é", " ", "\n", " \n ", "\u00a0", "text", "?", "'", "[TOOL_CALLS]", "[TOOL", "[ARGS]", "[", "[{"),
    *("f[ARGS]{", "<function=f>", "<parameter=a>", "</parameter>", "</function>", "<parameter", "</func"),
    *("[f(", "a=", "b='x\\'", "g(", "(", ")", ")]", "<|python_start|>", "<|python_end|>"),
    *('"name": "k"', '{"name": "s", "arguments": "{\\"a\\": 1}"}', '{"arguments": {"b": [2]}, "name": "r"}'),
    *('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', '{"name": "f", "parameters": {"a": {}}}; '),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)
CUTS = st.lists(st.integers(min_value=0, max_value=200), max_size=8)


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[begin:end] for begin, end in pairwise(edges)]


def without(marks: Sequence[str], text: str) -> str:
    return re.sub("|".join(map(re.escape, marks)) or "(?!)", "", text)


@FAMILIES
@given(
    text=TEXTS,
    places=CUTS,
    max_calls=st.integers(min_value=1, max_value=3),
    schemas=st.sampled_from([NO_SCHEMAS, {"f": {}, "g": {}}]),
)
def test_the_split_does_not_matter_nothing_is_lost_and_a_limit_of_calls_only_cuts_the_end_off(
    family: ToolFamily, text: str, places: list[int], max_calls: int, schemas: Schemas
) -> None:
    items, limited = (joined(read(family, [text], limit, schemas)) for limit in (None, max_calls))
    for texts in (cut(text, places), text):  # also character by character
        assert joined(read(family, texts, schemas=schemas)) == items
        assert joined(read(family, texts, max_calls, schemas)) == limited
    assert limited == items[: len(limited)]
    assert len(calls_of(limited)) == min(len(calls_of(items)), max_calls)
    assert limited == items or len(calls_of(items)) >= max_calls
    closings = FORMATS[family].closings
    contents = [without(closings, item) for item in items if isinstance(item, str)]
    rest = without(closings, text)  # some close nothing, and are left out
    assert calls_of(items) or "".join(contents) in (rest, rest.lstrip())
    for content in contents:  # verbatim, and in the order of the text
        _, found, rest = rest.partition(content)
        assert found


ARGUMENTS = st.dictionaries(st.text(max_size=8), JSON_VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.text(min_size=1, max_size=8), ARGUMENTS), min_size=1, max_size=3)


@pytest.mark.parametrize("family", [ToolFamily.HERMES, ToolFamily.LLAMA3_JSON])
@given(calls=CALLS, indent=st.sampled_from([None, 1]), is_name_first=st.booleans())
def test_calls_come_out_as_they_were_written(
    family: ToolFamily, calls: list[tuple[str, dict[str, object]]], indent: int | None, is_name_first: bool
) -> None:
    is_hermes = family is ToolFamily.HERMES
    key = "arguments" if is_hermes else "parameters"
    objects: list[dict[str, object]] = [{"name": name, key: arguments} for name, arguments in calls]
    if not is_name_first:
        objects = [dict(reversed(each.items())) for each in objects]
    texts = [json.dumps(each, indent=indent) for each in objects]
    text = "\n".join(f"<tool_call>{each}</tool_call>" for each in texts) if is_hermes else "; ".join(texts)
    for items in (read_whole(family, text), joined(read(family, text))):
        assert [(item.name, json.loads(item.arguments)) for item in calls_of(items)] == calls
