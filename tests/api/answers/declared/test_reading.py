"""The language of response templates: what becomes of each kind of region, as transformers reads it where it can."""

import logging
import time
from typing import Any

import pytest

from chairlift.api.answers import AnswerReader
from chairlift.api.answers.declared import Declared
from chairlift.api.answers.text import CallPiece, ContentPiece, ReasoningPiece
from tests.api.answers.calls import assert_streams
from tests.api.answers.declared.support import Answer, call, declared, every_split, joined, judged, pieces_of

NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
OBJECT = {"type": "function", "function": "{content}"}
THINK = {"open": "<think>", "close": "</think>"}
HERMES = {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "content": "json", "transform": OBJECT}
BY_NAME = {"open_pattern": r"<(?P<name>\w+)>", "close_pattern": r"</\w+>", "content": "json", "transform": NAMED}

F, G = '{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "arguments": {}}'

# Fields, and by text what is read.
JUDGED: list[tuple[dict[str, Any], dict[str, Answer]]] = [
    (
        {"reasoning_content": THINK, "tool_calls": {**HERMES, "repeats": True}, "content": {}},
        {
            " Hi there. ": Answer("Hi there."),
            "<think> Hm. </think> Hi.": Answer("Hi.", "Hm."),
            "<think>Hm.": Answer("", "Hm."),
            f"Hi.\n\n<tool_call>\n{F}\n</tool_call>\n<tool_call>{G}</tool_call>": Answer(
                "Hi.", calls=[call("f", a=1), call("g")]
            ),
            '<tool_call>{"arguments": {"a": "é"}, "name": "f"}</tool_call>': Answer(calls=[call("f", a="é")]),
        },
    ),
    (
        {"thinking": {"open": ["<a>", "<aa>"], "close_pattern": r"</a+>|$"}, "content": {"close": "<|end|>"}},
        {"<aa>x</aaa>y<|end|>": Answer("y", "x"), "<a>x": Answer("", "x"), "<ab>": Answer("<ab>")},
    ),
    (
        # Nothing belongs to text outside of these regions, as in the channels of gpt-oss.
        {
            "thinking": {"open": "<|analysis|>", "close": "<|end|>"},
            "content": {"open": "<|final|>", "close_pattern": r"<\|end\|>|$"},
            "tool_calls": {
                "open_pattern": r"<\|commentary to=(?P<name>[\w.]+)\|>",
                "close": "<|call|>",
                "repeats": True,
                "content": "json",
                "transform": NAMED,
            },
        },
        {
            "noise<|analysis|>Hm.<|end|>noise<|final|> Hi. ": Answer("Hi.", "Hm."),
            '<|commentary to=f.g|>{"a": [1]}<|call|>x': Answer(calls=[call("f.g", a=[1])]),
        },
    ),
    (
        {"content": {"content_args": {"strip": False}, "close_pattern": r"\s*<end>"}},
        {" Hi \n<end>": Answer(" Hi"), " Hi \n": Answer(" Hi \n")},
    ),
    (
        {"content": {"open": "<p>", "close": "</p>", "repeats": True, "join": "\n\n"}},
        {"<p> a </p> - <p>b</p>": Answer("a\n\nb"), "<p>a</p>": Answer("a")},
    ),
    (
        # As Gemma 4 writes calls.
        {
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close": "<tool_call|>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": NAMED,
            },
            "content": {"close": "<turn|>"},
        },
        {
            '<|tool_call>call:weather{city:<|"|>São "P", {x:1}<|"|>,days:3}<tool_call|><turn|>': Answer(
                calls=[call("weather", city='São "P", {x:1}', days=3)]
            ),
            "<|tool_call>call:f{a:{b:[true,null]}}<tool_call|>": Answer(calls=[call("f", a={"b": [True, None]})]),
        },
    ),
    (
        {
            "tool_calls": {
                "open_pattern": r"<call (?P<name>\w+)>",
                "close": "</call>",
                "repeats": True,
                "content": "kv-lines",
                "content_args": {"kv_sep": "="},
                "transform": NAMED,
            },
            "content": {},
        },
        {"<call weather>\ncity = Rome\ndays = 3\n</call>": Answer(calls=[call("weather", city="Rome", days=3)])},
    ),
    (
        {
            "tool_calls": {
                "open_pattern": r"<call (?P<name>\w+)>",
                "close": "</call>",
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": "<(?P<key>[a-z]+)>(?P<value>.*?)</[a-z]+>",
                    "merge_duplicates": True,
                    "value_parser": {"name": "json", "args": {"allow_non_json": True}},
                },
                "repeats": True,
                "transform": NAMED,
            },
            "content": {},
        },
        {"<call f><a>1</a><b>x y</b><a>{}</a></call>": Answer(calls=[call("f", a=[1, {}], b="x y")])},
    ),
]
CASES = [(fields, text) for fields, table in JUDGED for text in table]


@pytest.mark.parametrize(("fields", "text"), CASES)
def test_regions_are_read_as_transformers_reads_them(fields: dict[str, Any], text: str) -> None:
    expected = next(table[text] for known, table in JUDGED if known is fields)
    assert every_split(declared(fields), text) == expected
    assert judged(declared(fields), text) == expected


def test_what_comes_in_several_regions_is_joined_rather_than_overwritten() -> None:
    form = declared({"reasoning_content": THINK, "tool_calls": HERMES, "content": {}})
    made = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    answer = every_split(form, f"Hi {made} there <think>a</think> and <think> b</think>\n{made} again")
    assert answer == Answer("Hi there and again", "a b", [call("f"), call("f")])


@pytest.mark.parametrize("text", ["Hi <tool_call>nothing</tool_call> there.", "<tool_call>[]</tool_call>"])
def test_what_cannot_be_read_as_a_call_is_content_with_its_marks(text: str) -> None:
    assert every_split(declared({"tool_calls": HERMES, "content": {}}), text) == Answer(text)


def test_pieces_come_as_early_as_they_can() -> None:
    form = declared({"reasoning_content": THINK, "tool_calls": BY_NAME, "content": {}})
    assert_streams(
        AnswerReader(form),
        ("<thi", []),
        ("nk>Hm", [ReasoningPiece("Hm")]),
        (". ", [ReasoningPiece(".")]),
        ("No </th", [ReasoningPiece(" No")]),
        ("ink>\nHel", [ContentPiece("Hel")]),
        ("lo <", [ContentPiece("lo")]),
        ("3 <f", [ContentPiece(" <3")]),
        (">", []),
        ('{"a"', [CallPiece(0, "f", ""), CallPiece(0, None, '{"a"')]),
        (': "b', [CallPiece(0, None, ': "b')]),
        ('"}</f>', [CallPiece(0, None, '"}')]),
    )


def test_a_pattern_that_looks_back_is_applied_to_the_complete_answer() -> None:
    fields = {"thinking": {"open_pattern": r"(?<!\w)<t>", "close": "</t>"}, "content": {}}
    form = declared(fields)
    assert not form.is_steady
    assert every_split(form, "a<t> <t>b</t>") == judged(form, "a<t> <t>b</t>") == Answer("a<t>", "b")
    assert_streams(AnswerReader(form), ("Hello", []), (" you", []))


@pytest.mark.parametrize(
    "pattern", [r"<a>(?!b)", r"^<a>", r"\b<a>", r"(<)a>\1", r"(?i)<a>", r"<a>++", r"a{2}+b", r"<a>(?>b|bc)"]
)
def test_patterns_that_need_the_complete_answer(pattern: str) -> None:
    assert not declared({"thinking": {"open_pattern": pattern, "close": "c"}, "content": {}}).is_steady


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (r"ab|abcd", ["abcd-", "abce-", "ab"]),  # the first alternative counts, as in Python
        (r"abcd|ab", ["abcd-", "abce-", "ab", "xabc"]),
        (r"<a.*?>|b", ["<a b", "<a b>", "x b <a>"]),
        (r"foo(?=bar)", ["foobar", "fooba", "foo", "foofoobar"]),
        (r"<[a-z]+>?", ["<ab>c", "<ab", "<", "<<a>b"]),
        (r"[$^]x{2,3}|\$\^", ["$xxxx", "^x$xx", "a$^b"]),
        (r"\s*?x|y{1,2}z", ["a x", "yyyz", "yy", " yz"]),
        (r"x\s*y", ["x \n y", "x \n z x", "xx y"]),
    ],
)
def test_a_mark_is_found_wherever_the_text_is_split(pattern: str, texts: list[str]) -> None:
    form = declared({"thinking": {"open_pattern": pattern, "close": "-"}, "content": {}})
    assert form.is_steady
    for text in texts:
        assert every_split(form, text) == judged(form, text)


def test_the_text_of_a_region_that_replies_have_no_place_for_is_left_out() -> None:
    form = declared({"citations": {"open": "[[", "close": "]]", "content": "json"}, "content": {}})
    assert form.unused_fields == ["citations"]
    assert every_split(form, "Hi [[1]]there.") == Answer("Hi there.")


def test_special_tokens_that_a_template_mentions_are_known() -> None:
    form = declared({"thinking": {"open_pattern": r"<\|a\|>|b", "close": "<c>"}, "content": {"close": ["<d>"]}})
    assert form.marks_among(["<|a|>", "<c>", "<d>", "<e>"]) == ("<|a|>", "<c>", "<d>")
    assert form.reading(calls=True, thoughts=False).marks_among(["<|a|>", "<c>", "<d>", "<e>"]) == ("<d>",)


def test_marks_of_calls_or_thoughts_that_are_not_wanted_are_text() -> None:
    form = declared({"reasoning_content": THINK, "tool_calls": HERMES, "content": {}})
    text = "<think>a</think><tool_call>b</tool_call>"
    assert every_split(form.reading(calls=False, thoughts=True), text) == Answer("<tool_call>b</tool_call>", "a")
    assert every_split(form.reading(calls=False, thoughts=False), text) == Answer(text)
    assert form.reading(calls=False, thoughts=False).is_plain


def test_a_call_that_the_prompt_begins_is_gone_on_with() -> None:
    form = declared({"tool_calls": BY_NAME, "content": {}}).after("<assistant><f>")
    assert form is not None
    assert every_split(form, '{"a": 1}</f>') == Answer(calls=[call("f", a=1)])


def test_only_the_last_turn_of_a_prompt_counts() -> None:
    form = declared({"reasoning_content": THINK, "content": {}})
    begun = form.after("<assistant><think>a<user>b<assistant>")
    assert begun is not None
    assert every_split(begun, "c") == judged(form, "c", "<assistant><think>a<user>b<assistant>") == Answer("c")


def hostile() -> Declared:
    # The begin of a region and its end take exponential time for a text of many a's.
    return declared({"thinking": {"open_pattern": r"<(?:x|x)*y", "close": ">"}, "content": {}})


def test_a_pattern_that_takes_too_long_ends_the_parsing_not_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    text = "Hi <" + "x" * 60 + "z and more."
    with caplog.at_level(logging.ERROR):
        assert joined(pieces_of(hostile(), [text])) == Answer(text)
    assert "a pattern of the response template takes too long" in caplog.text


def test_a_parser_that_takes_too_long_loses_no_text() -> None:
    args = {"tag_pattern": r"<(?P<key>(?:x|xx)+)[>y]"}
    lines = {"open_pattern": r"<l (?P<name>\w+)>", "close": "</l>", "content": "xml-inline", "content_args": args}
    form = declared({"tool_calls": {**lines, "transform": NAMED}, "content": {}})
    text = f"Hi <l f><{'x' * 60}z</l> and <l g></l> more."
    assert joined(pieces_of(form, [text])) == Answer(text)


@pytest.mark.parametrize("step", [3, 10_000_000])
def test_a_long_answer_is_read_in_linear_time(step: int) -> None:
    """A third of a million characters in the places that hold text back; quadratic: minutes."""
    lines = {"open_pattern": r"<l (?P<name>\w+)>", "close": "</l>", "content": "kv-lines", "transform": NAMED}
    form = declared({"reasoning_content": THINK, "tool_calls": lines, "content": {}})
    filler = " ".join("x" * 7 for _ in range(12_000))
    text = f"<think>{filler}</think>{filler}{' ' * 20_000}<l f>\na: {filler}\n</l>{filler}"
    answer = joined(pieces_of(form, (text[at : at + step] for at in range(0, len(text), step))))
    assert answer == Answer(filler * 2, filler, [call("f", a=filler)])


# As Phi-4-mini's, which are letters: they can stand in what is nearly JSON.
LISTS = {
    "open_pattern": r"calls(?=\[)",
    "close": "<end>",
    "content": "json",
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
    "transform_each": True,
}
MADE = [call("f", a=1)]


@pytest.mark.parametrize(
    ("unit", "count", "rest", "calls"),
    [
        ("<tool_call>x", 60_000, "<tool_call>x" * 60_000, []),
        (f'calls[{F}, {{"name"', 2_000, ', {"name"' + f'calls[{F}, {{"name"' * 1_992, MADE * 8),
    ],
)
def test_many_marks_that_begin_no_calls_are_read_in_linear_time(
    unit: str, count: int, rest: str, calls: list[Any]
) -> None:
    """In two seconds of a processor; quadratic: forty, and minutes."""
    kinds = {"tool_calls": LISTS if "calls" in unit[:5] else HERMES}
    form = declared({"reasoning_content": THINK, **kinds, "content": {}})
    begin = time.thread_time()
    answer = joined(pieces_of(form, [unit * count]))
    assert time.thread_time() - begin < 15
    assert answer.calls == calls
    assert answer.content.endswith(rest)
