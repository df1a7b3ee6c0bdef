import pytest

from chairlift.api.tools import AnswerReader, ToolFamily
from chairlift.api.tools.text import CallPiece, ContentPiece
from tests.api.tools.reading import Call, assert_streams, read, read_whole

LLAMA = ToolFamily.LLAMA3_JSON

CALL_F = '{"name": "f", "parameters": {"a": 1}}'
CALL_G = '{"name": "g", "parameters": {"b": [2]}}'
F = Call("f", '{"a": 1}')
G = Call("g", '{"b": [2]}')


@pytest.mark.parametrize(
    "text",
    [
        CALL_F,
        f" \n{CALL_F} \n",
        f"<|python_tag|>{CALL_F}",
        f"\n<|python_tag|> {CALL_F};",
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
    assert read_whole(LLAMA, separator.join([CALL_F, CALL_G, CALL_F])) == [F, G, F]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "Hello.",
        f"Sure: {CALL_F}",
        f"[{CALL_F}]",
        f";{CALL_F}",
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
        f"{{ {CALL_F}",
        f'{{"answer": 1}}; {CALL_F}',
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
        (f"Let me see.<|python_tag|>{CALL_F}", ["Let me see.", F]),
        (f"Let me see.\n<|python_tag|> {CALL_F}; {CALL_G}", ["Let me see.\n", F, G]),
        (f"a <|python_tag|>{CALL_F} b <|python_tag|>{CALL_G}", ["a ", F, " b ", G]),
        (f'{{"answer": 1}} <|python_tag|>{CALL_F}', ['{"answer": 1} ', F]),
        (f"<|python_tag|><|python_tag|>{CALL_F}", ["<|python_tag|>", F]),
        (f"<|python_tag|>print(1)\n<|python_tag|>{CALL_F}", ["<|python_tag|>print(1)\n", F]),
        (f'a <|python_tag|>{{"x": 1}} <|python_tag|>{CALL_F}', ['a <|python_tag|>{"x": 1} ', F]),
    ],
)
def test_a_call_that_is_marked_may_come_after_text(text: str, items: list[str | Call]) -> None:
    assert read_whole(LLAMA, text) == items


@pytest.mark.parametrize(
    ("text", "items"),
    [
        (f"{CALL_F}\nThat was it.\n", [F, "\nThat was it.\n"]),
        (f"{CALL_F}; then {CALL_G}", [F, f"; then {CALL_G}"]),
        (f"{CALL_F};; {CALL_G}", [F, f";; {CALL_G}"]),
        (f'{CALL_F}; {{"answer": 1}}; {CALL_G}', [F, f'; {{"answer": 1}}; {CALL_G}']),
        (f"{CALL_F}; <|pyth", [F, "; <|pyth"]),
        (f'{CALL_F}; {{"name": "g", "para', [F, '; {"name": "g", "para']),
        (f"{CALL_F}}} {CALL_G}", [F, f"}} {CALL_G}"]),
        (f"{CALL_F[:-1]}; {CALL_G}", [F, G]),
        (f"{CALL_F[:-1]} or so", [F, " or so"]),
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


@pytest.mark.parametrize("tail", [f"; {CALL_G}", "\ntext", ";", "", "; {"])
def test_everything_after_the_last_wanted_call_is_swallowed(tail: str) -> None:
    assert read_whole(LLAMA, f"{CALL_F}{tail}", max_calls=1) == [F]


def test_pieces_come_as_early_as_they_can() -> None:
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
