"""Calls as JSON: Hermes' and Llama 3's, however models write them."""

import json

import pytest

from chairlift.api.tools import AnswerReader, ToolFamily
from chairlift.api.tools.text import CallPiece, ContentPiece
from tests.api.tools.calls import Call, assert_streams, read, read_whole

# --- Hermes


HERMES = ToolFamily.HERMES
CALL_F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALL_G = '<tool_call>\n{"name": "g", "arguments": {"b": [2]}}\n</tool_call>'
F = Call("f", '{"a": 1}')
G = Call("g", '{"b": [2]}')


def call_text(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("", []),
        ("just text", ["just text"]),
        (" \n text \n ", [" \n text \n "]),
        (" \n ", [" \n "]),
        (CALL_F, [F]),
        (f"Let me see.\n\n{CALL_F}", ["Let me see.", F]),
        (f"\n{CALL_F}", [F]),
        (f"{CALL_F}\n{CALL_G}", [F, G]),
        (f"{CALL_F}{CALL_G}{CALL_F}", [F, G, F]),
        (f"{CALL_F}\n \n", [F]),
        (f"{CALL_F}\nDone. ", [F, "\nDone. "]),
        (f"{CALL_F}\nand \n{CALL_G}\n", [F, "\nand", G]),
    ],
)
def test_text_and_calls_are_told_apart(text: str, items: list[str | Call]) -> None:
    assert read_whole(HERMES, text) == items


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name":"f","arguments":{"a": 1}}</tool_call>',
        '<tool_call>\n\n {\n "name" : "f" ,\n\t"arguments" : {"a": 1}\r\n}\n </tool_call>',
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        '<tool_call>{"id": "x}", "name": "f", "arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "f", "type": {"t": "}"}, "arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": [1, "]}"]}</tool_call>',
        '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>',
        '<tool_call>{"\\u006eame": "\\u0066", "arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        '<tool_call>{"arguments": "{\\"a\\": 1}", "name": "f"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1}}',
        '<tool_call>{"name": "f", "arguments": {"a": 1}}\n</tool_c',
        '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1}',
    ],
)
def test_models_may_write_a_call_in_other_ways(text: str) -> None:
    assert read_whole(HERMES, text) == [F]


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "arguments": {}}', "{}"),
        ('{"name": "f", "arguments": { "a" :1.0,\n"b":"\\u00e9"}}', '{ "a" :1.0,\n"b":"\\u00e9"}'),
        ('{"name": "f", "arguments": {"html": "<tool_call></tool_call>"}}', '{"html": "<tool_call></tool_call>"}'),
        ('{"name": "f", "arguments": {"q": "\\"}\\\\"}}', '{"q": "\\"}\\\\"}'),
        ('{"name": "f", "arguments": [1]}', "[1]"),
        ('{"name": "f", "arguments": 5}', "5"),
        ('{"name": "f", "arguments": "not JSON"}', '"not JSON"'),
        ('{"name": "f", "arguments": "\\"\\ud800\\""}', '"\\"\\ud800\\""'),
        ('{"arguments": {"line\nbreak": 1}, "name": "f"}', '{"line\\nbreak": 1}'),
    ],
)
def test_arguments_are_the_raw_text_of_the_value(body: str, arguments: str) -> None:
    assert read_whole(HERMES, call_text(body)) == [Call("f", arguments)]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "not JSON",
        "{}",
        "[]",
        '{"arguments": {}}',
        '{"name": 5, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "f, "arguments": {}}',
        '{"name": "f" "arguments": {}}',
        '{"name": f, "arguments": {}}',
        '{"arguments": {"a": tru}, "name": "f"}',
        '{"arguments": {"a" 1}, "name": "f"}',
        "{'name': 'f', 'arguments': {}}",
        '{"name": "f",, "arguments": {}}',
        '{"arguments": ' + "[" * 100_000 + "]" * 100_000 + ', "name": "f"}',
        "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>",
    ],
)
def test_what_is_no_call_is_content_with_its_markers(body: str) -> None:
    text = f"See: \n{call_text(body)}\n"
    assert read_whole(HERMES, text) == [text]


def test_a_call_after_a_broken_one_is_still_found() -> None:
    assert read_whole(HERMES, f"<tool_call>oops</tool_call>\n{CALL_F}") == ["<tool_call>oops</tool_call>", F]
    assert read_whole(HERMES, f"<tool_call>\n{CALL_F}") == ["<tool_call>\n", F]
    assert read_whole(HERMES, f'<tool_call>{{"name": {CALL_F}') == ['<tool_call>{"name": ', F]


def test_a_call_that_breaks_while_it_streams_keeps_what_remains_of_its_value() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": \'x\'} </tool_call>\nbye'
    assert read_whole(HERMES, text) == [Call("f", "{\"a\": 'x'} "), "\nbye"]
    text = '<tool_call>{"name": "f", "arguments": ?oops}'
    assert read_whole(HERMES, text) == [Call("f", "?oops}")]
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": 1 </tool_call>{CALL_G}'
    assert read_whole(HERMES, text) == [Call("f", '{"a": 1 '), G]
    text = '<tool_call>{"name": "f", "arguments": {"a": 1; </tool_c'
    assert read_whole(HERMES, text) == [Call("f", '{"a": 1; </tool_c')]


def test_what_follows_complete_arguments_and_is_not_of_the_object_is_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}}\n</tool_call>'
    assert read_whole(HERMES, text) == [F, "}\n</tool_call>"]
    text = '<tool_call>{"name": "f", "arguments": {"a": 1} and so on'
    assert read_whole(HERMES, text) == [F, " and so on"]
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": ?}</tool_call>'
    assert read_whole(HERMES, text) == [F, ', "id": ?}</tool_call>']


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("hello <tool_cal", ["hello <tool_cal"]),
        ("hello \n<tool_call>", ["hello \n<tool_call>"]),
        ('<tool_call>\n{"name": "f", "argu', ['<tool_call>\n{"name": "f", "argu']),
        ('<tool_call>\n{"arguments": {"a": 1}, "na', ['<tool_call>\n{"arguments": {"a": 1}, "na']),
        ('<tool_call>\n{"name": "f", "arguments":', [Call("f", "")]),
        ('<tool_call>\n{"name": "f", "arguments": {"a": "b', [Call("f", '{"a": "b')]),
        ('<tool_call>\n{"name": "f", "arguments": "{\\"a', [Call("f", '"{\\"a')]),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}, "id": "x', [F]),
        (f"{CALL_F}\n<tool", [F, "\n<tool"]),
    ],
)
def test_an_answer_that_is_cut_off_keeps_what_it_has(text: str, items: list[str | Call]) -> None:
    assert read_whole(HERMES, text) == items


@pytest.mark.parametrize("tail", [f"\n{CALL_G}", "\ntext", "\n", "", "</tool_call>", '<tool_call>{"na'])
def test_everything_after_the_last_wanted_call_is_swallowed(tail: str) -> None:
    assert read_whole(HERMES, f"Text {CALL_F}{tail}", max_calls=1) == ["Text", F]


def test_max_calls_counts_calls_not_markers() -> None:
    text = f"<tool_call>oops</tool_call>{CALL_F}{CALL_G}{CALL_F}"
    assert read_whole(HERMES, text, max_calls=2) == ["<tool_call>oops</tool_call>", F, G]


def test_a_broken_call_counts_and_streams_to_its_end() -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {{?}}</tool_call>{CALL_G}'
    assert read_whole(HERMES, text, max_calls=1) == [Call("f", "{?}")]


def test_pieces_come_as_early_as_they_can() -> None:
    parser = AnswerReader(HERMES)
    assert_streams(
        parser,
        ("Hel", [ContentPiece("Hel")]),
        ("lo ", [ContentPiece("lo")]),
        ("you\n", [ContentPiece(" you")]),
        ("<tool", []),
        ("box> <to", [ContentPiece("\n<toolbox>")]),
        ("ol_call>\n", []),
        ('{"name": "f"', []),
        (', "arguments"', []),
        (":", [CallPiece(0, "f", "")]),
        (' {"a', [CallPiece(0, None, '{"a')]),
        ('": "}', [CallPiece(0, None, '": "}')]),
        ('"', [CallPiece(0, None, '"')]),
        ("}}\n</tool_", [CallPiece(0, None, "}")]),
        ("call>\n<tool_call>", []),
        ('{"name": "g", "arguments": {}', [CallPiece(1, "g", ""), CallPiece(1, None, "{}")]),
        ("}</tool_call>", []),
    )
    assert parser.finish() == []


def test_arguments_before_the_name_come_in_one_piece() -> None:
    texts = ["<tool_call>", '{"arguments": {"a"', ": 1}, ", '"name": "f"', "}", "</tool_call>"]
    assert read(HERMES, texts) == [CallPiece(0, "f", '{"a": 1}')]


@pytest.mark.parametrize("step", [3, 10_000_000])
def test_a_long_answer_is_read_in_linear_time(step: int) -> None:
    """Half a million characters in the places that hold text back or read it again; quadratic: minutes."""
    filler = " ".join("x" * 7 for _ in range(20_000))
    arguments = json.dumps({"text": filler})
    buffered = f'<tool_call>{{"arguments": {arguments}, "name": "f"}}</tool_call>'
    streamed = f'<tool_call>{{"name": "g", "arguments": {arguments}}}'
    text = filler + CALL_F * 2_000 + buffered + streamed
    pieces = read(HERMES, (text[at : at + step] for at in range(0, len(text), step)))
    assert sum(len(piece.text) for piece in pieces if isinstance(piece, ContentPiece)) == len(filler)
    num_characters = sum(len(piece.arguments) for piece in pieces if isinstance(piece, CallPiece))
    assert num_characters == 2 * len(arguments) + 2_000 * len(F.arguments)


# --- Llama 3


LLAMA = ToolFamily.LLAMA3_JSON
LLAMA_F = '{"name": "f", "parameters": {"a": 1}}'
LLAMA_G = '{"name": "g", "parameters": {"b": [2]}}'


@pytest.mark.parametrize(
    "text",
    [
        LLAMA_F,
        f" \n{LLAMA_F} \n",
        f"<|python_tag|>{LLAMA_F}",
        f"\n<|python_tag|> {LLAMA_F};",
        '{"name": "f", "arguments": {"a": 1}}',
        '{"parameters": {"a": 1}, "name": "f"}',
        '{"type": "function", "name": "f", "parameters": {"a": 1}}',
        '{"name":"f","parameters":{"a": 1},"id":7}',
        '{"name": "f", "parameters": {"a": 1}, "arguments": {"b": 2}, "name": "g"}',
        '{"name": "f", "parameters": "{\\"a\\": 1}"}',
        '{"name": "f", "parameters": {"a": 1}',
    ],
)
def test_an_answer_that_is_a_call(text: str) -> None:
    assert read_whole(LLAMA, text) == [F]


@pytest.mark.parametrize("separator", [";", "; ", " ;\n", "\n", " ", "", "; <|python_tag|>", "<|python_tag|>\n"])
def test_several_calls(separator: str) -> None:
    assert read_whole(LLAMA, separator.join([LLAMA_F, LLAMA_G, LLAMA_F])) == [F, G, F]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "Hello.",
        f"Sure: {LLAMA_F}",
        f"[{LLAMA_F}]",
        f";{LLAMA_F}",
        '"text"',
        " \n<|python_tag|>print(1)",
        "<|python_tag|>",
        "<|python",
        "Let me compute that: <|python_tag|>print(1)",
        "Sure. <|python_tag|>",
        "Sure. <|python_tag|> \n",
        'Sure. <|python_tag|>{"answer": 42} <|pyth',
        "{",
        "{}",
        '{"answer": 42, "why": ["a", {"name": "f"}]}\n',
        '{"name": "Bob", "age": 5}',
        '{"name": "Bob"}',
        '{"name": 1, "parameters": {}}',
        '{"name": "", "parameters": {}}',
        '{"parameters": {}, "name": null}',
        '{"parameters": {"a": }, "name": "f"}',
        "{not JSON} at all \n",
        f"{{ {LLAMA_F}",
        f'{{"answer": 1}}; {LLAMA_F}',
        '{"name": "f", "parame',
        ' {"a": "b',
    ],
)
def test_any_other_answer_is_content_to_the_last_character(text: str) -> None:
    assert read_whole(LLAMA, text) == ([text] if text else [])
    assert "".join(piece.text for piece in read(LLAMA, text) if isinstance(piece, ContentPiece)) == text


@pytest.mark.parametrize(
    ("text", "items"),
    [
        (f"Let me see.<|python_tag|>{LLAMA_F}", ["Let me see.", F]),
        (f"Let me see.\n<|python_tag|> {LLAMA_F}; {LLAMA_G}", ["Let me see.\n", F, G]),
        (f"a <|python_tag|>{LLAMA_F} b <|python_tag|>{LLAMA_G}", ["a ", F, " b ", G]),
        (f'{{"answer": 1}} <|python_tag|>{LLAMA_F}', ['{"answer": 1} ', F]),
        (f"<|python_tag|><|python_tag|>{LLAMA_F}", ["<|python_tag|>", F]),
        (f"<|python_tag|>print(1)\n<|python_tag|>{LLAMA_F}", ["<|python_tag|>print(1)\n", F]),
        (f'a <|python_tag|>{{"x": 1}} <|python_tag|>{LLAMA_F}', ['a <|python_tag|>{"x": 1} ', F]),
    ],
)
def test_a_call_that_is_marked_may_come_after_text(text: str, items: list[str | Call]) -> None:
    assert read_whole(LLAMA, text) == items


@pytest.mark.parametrize(
    ("text", "items"),
    [
        (f"{LLAMA_F}\nThat was it.\n", [F, "\nThat was it.\n"]),
        (f"{LLAMA_F}; then {LLAMA_G}", [F, f"; then {LLAMA_G}"]),
        (f"{LLAMA_F};; {LLAMA_G}", [F, f";; {LLAMA_G}"]),
        (f'{LLAMA_F}; {{"answer": 1}}; {LLAMA_G}', [F, f'; {{"answer": 1}}; {LLAMA_G}']),
        (f"{LLAMA_F}; <|pyth", [F, "; <|pyth"]),
        (f'{LLAMA_F}; {{"name": "g", "para', [F, '; {"name": "g", "para']),
        (f"{LLAMA_F}}} {LLAMA_G}", [F, f"}} {LLAMA_G}"]),
        (f"{LLAMA_F[:-1]}; {LLAMA_G}", [F, G]),
        (f"{LLAMA_F[:-1]} or so", [F, " or so"]),
    ],
)
def test_what_comes_after_a_call_and_is_none_is_content(text: str, items: list[str | Call]) -> None:
    assert read_whole(LLAMA, text) == items


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('{"name": "f", "parameters": ', Call("f", "")),
        ('{"name": "f", "parameters": {"a": "b', Call("f", '{"a": "b')),
        ('{"name": "f", "parameters": {"a": 1}, "x": "', F),
        ('{"name": "f", "parameters": {"a": <b>}}; x', Call("f", '{"a": <b>}}; x')),
    ],
)
def test_a_call_that_breaks_or_is_cut_off_while_it_streams_keeps_what_it_has(text: str, call: Call) -> None:
    assert read_whole(LLAMA, text) == [call]


@pytest.mark.parametrize("tail", [f"; {LLAMA_G}", "\ntext", ";", "", "; {"])
def test_everything_after_llamas_last_wanted_call_is_swallowed(tail: str) -> None:
    assert read_whole(LLAMA, f"{LLAMA_F}{tail}", max_calls=1) == [F]


def test_pieces_of_llamas_calls_come_as_early_as_they_can() -> None:
    parser = AnswerReader(LLAMA)
    assert_streams(
        parser,
        (" ", []),
        ("<|python_", []),
        ("tag|>", []),
        ('{"name": "f", "param', []),
        ('eters":', [CallPiece(0, "f", "")]),
        (' {"a": ', [CallPiece(0, None, '{"a": ')]),
        ("1}", [CallPiece(0, None, "1}")]),
        ("}; ", []),
        ('{"name": "g", "parameters": {"b"', [CallPiece(1, "g", ""), CallPiece(1, None, '{"b"')]),
        (": 2}}", [CallPiece(1, None, ": 2}")]),
    )
    assert parser.finish() == []


def test_text_streams_at_once() -> None:
    assert_streams(
        AnswerReader(LLAMA),
        ("\n", []),
        ("Hel", [ContentPiece("\nHel")]),
        ("lo \n", [ContentPiece("lo \n")]),
        ('{"name"', [ContentPiece('{"name"')]),
    )


def test_an_object_streams_as_content_from_where_it_cannot_be_a_call_any_more() -> None:
    assert_streams(
        AnswerReader(LLAMA),
        ('{"a": ', []),
        ("1, ?", [ContentPiece('{"a": 1, ?')]),
        (" c", [ContentPiece(" c")]),
    )
