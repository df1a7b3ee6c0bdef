"""Calls as JSON: Hermes', Llama 3's and Mistral's, however models write them and wherever the text is cut."""

import json

import pytest

from chairlift.api.answers import AnswerReader, ToolFamily
from chairlift.api.answers.text import CallPiece, ContentPiece
from tests.api.answers.calls import Call, Table, assert_streams, every_split, read, read_whole

HERMES, LLAMA, MISTRAL = ToolFamily.HERMES, ToolFamily.LLAMA3_JSON, ToolFamily.MISTRAL
CALL_F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALL_G = '<tool_call>\n{"name": "g", "arguments": {"b": [2]}}\n</tool_call>'
LLAMA_F = '{"name": "f", "parameters": {"a": 1}}'
LLAMA_G = '{"name": "g", "parameters": {"b": [2]}}'
F, G, EMPTY = Call("f", '{"a": 1}'), Call("g", '{"b": [2]}'), Call("g", "{}")


def marked(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def arguments(written: str) -> str:
    return marked(f'{{"name": "f", "arguments": {written}}}')


def content(*texts: str) -> Table:
    return {text: [text] if text else [] for text in texts}


NO_CALLS = [
    *("", "not JSON", "{}", "[]", '{"arguments": {}}', "{'name': 'f', 'arguments': {}}"),
    *('{"name": 5, "arguments": {}}', '{"name": "", "arguments": {}}', '{"name": "\\ud800", "arguments": {}}'),
    *('{"name": "f, "arguments": {}}', '{"name": "f" "arguments": {}}', '{"name": f, "arguments": {}}'),
    *('{"arguments": {"a": tru}, "name": "f"}', '{"arguments": {"a" 1}, "name": "f"}'),
    *('{"name": "f",, "arguments": {}}', "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"),
]

HERMES_ANSWERS: dict[str, Table] = {
    "text and calls are told apart": {
        **content("", "just text", " \n text \n ", " \n "),
        f"Let me see.\n\n{CALL_F}": ["Let me see.", F],
        f"\n{CALL_F}": [F],
        f"{CALL_F}\n{CALL_G}": [F, G],
        f"{CALL_F}{CALL_G}{CALL_F}\n \n": [F, G, F],
        f"{CALL_F}\nDone. ": [F, "\nDone. "],
        f"{CALL_F}\nand \n{CALL_G}\n": [F, "\nand", G],
    },
    "models may write a call in other ways": {
        '<tool_call>{"name":"f","arguments":{"a": 1}}</tool_call>': [F],
        '<tool_call>\n\n {\n "name" : "f" ,\n\t"arguments" : {"a": 1}\r\n}\n </tool_call>': [F],
        '<tool_call>{"id": "x}", "name": "f", "arguments": {"a": 1}}</tool_call>': [F],
        '<tool_call>{"name": "f", "type": {"t": "}"}, "arguments": {"a": 1}}</tool_call>': [F],
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": [1, "]}"]}</tool_call>': [F],
        '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>': [F],
        '<tool_call>{"\\u006eame": "\\u0066", "arguments": {"a": 1}}</tool_call>': [F],
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>': [F],
        '<tool_call>{"arguments": "{\\"a\\": 1}", "name": "f"}</tool_call>': [F],
        '<tool_call>{"name": "f", "arguments": {"a": 1}}\n</tool_c': [F],
        '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>': [F],
        '<tool_call>{"name": "f", "arguments": {"a": 1}': [F],
    },
    "arguments are the raw text of the value": {
        marked('{"name": "f"}'): [Call("f", "{}")],
        arguments("null"): [Call("f", "{}")],
        arguments('{ "a" :1.0,\n"b":"\\u00e9"}'): [Call("f", '{ "a" :1.0,\n"b":"\\u00e9"}')],
        arguments('{"html": "<tool_call></tool_call>"}'): [Call("f", '{"html": "<tool_call></tool_call>"}')],
        arguments('{"q": "\\"}\\\\"}'): [Call("f", '{"q": "\\"}\\\\"}')],
        arguments("[1]"): [Call("f", "[1]")],
        arguments("5"): [Call("f", "5")],
        arguments('"not JSON"'): [Call("f", '"not JSON"')],
        arguments('"\\"\\ud800\\""'): [Call("f", '"\\"\\ufffd\\""')],
        marked('{"arguments": {"a": "\\ud800", "b": NaN}, "name": "f"}'): [Call("f", '{"a": "\ufffd", "b": "NaN"}')],
        marked('{"arguments": {"line\nbreak": 1}, "name": "f"}'): [Call("f", '{"line\\nbreak": 1}')],
    },
    "what is no call is content with its marks": content(*(f"See: \n{marked(body)}\n" for body in NO_CALLS)),
    "a call after a broken one is still found": {
        f"<tool_call>oops</tool_call>\n{CALL_F}": ["<tool_call>oops</tool_call>", F],
        f"<tool_call>\n{CALL_F}": [F],
        f'<tool_call>{{"name": {CALL_F}': ['<tool_call>{"name": ', F],
    },
    "a call that breaks while it streams keeps what remains of its value": {
        '<tool_call>{"name": "f", "arguments": {"a": \'x\'} </tool_call>\nbye': [Call("f", '{"a": "x"}'), "\nbye"],
        '<tool_call>{"name": "f", "arguments": ?oops}': [Call("f", '"?oops"')],
        f'<tool_call>{{"name": "f", "arguments": {{"a": 1 </tool_call>{CALL_G}': [Call("f", '{"a": 1 }'), G],
        f'<tool_call>{{"name": "f", "arguments": {{"a": "5" x"}}}}</tool_call>{CALL_G}': [
            Call("f", '{"a": "5\\" x"}'),
            G,
        ],
        '<tool_call>{"name": "f", "arguments": {"a": 1; </tool_c': [Call("f", '{"a": 1; </tool_c')],
    },
    "what follows complete arguments and is not of the object is content": {
        '<tool_call>{"name": "f", "arguments": {"a": 1} and so on': [F, " and so on"],
        '<tool_call>{"name": "f", "arguments": {"a": 1}} and </tool_call> so on': [F, " and so on"],
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": ?}</tool_call>': [F, ', "id": ?}'],
        '<tool_call>{"name": "f", "arguments": {"a": 1}}\n{"x": 1}</tool_call>': [F, '\n{"x": 1}'],
        '<tool_call>{"name": "f", "arguments": {"a": 1}}} so': [F, "} so"],
    },
    "superfluous brackets and marks are left out": {
        **{
            f'{lead}<tool_call>{{"name": "f", "arguments": {{"a": 1}}}}{tail}': [F]
            for lead in ("", "</tool_call>\n", "<tool_call> ")
            for tail in ("}", "}\n</tool_call>", "}]}", "</tool_call></tool_call>\n", "}\n")
        },
        f'<tool_call>{{"name": "f", "arguments": {{"a": 1}}}}}}{CALL_G}': [F, G],
    },
    "two marks may hold several calls": {
        marked(separator.join(['{"name": "f", "arguments": {"a": 1}}', '{"arguments": {"b": [2]}, "name": "g"}'])): [
            F,
            G,
        ]
        for separator in ("", ",", "\n", "},\n")
    }
    | {
        marked('[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": [2]}}]'): [F, G],
        marked('```json\n{"name": "f", "arguments": {"a": 1}}\n```'): [F],
        marked("[{}]"): [marked("[{}]")],
    },
    "an answer that is cut off keeps what it has": {
        **content("hello <tool_cal", "hello \n<tool_call>", '<tool_call>\n{"name": "f", "argu'),
        **content('<tool_call>\n{"arguments": {"a": 1}, "na'),
        '<tool_call>\n{"name": "f", "arguments":': [Call("f", "")],
        '<tool_call>\n{"name": "f", "arguments": {"a": "b': [Call("f", '{"a": "b')],
        '<tool_call>\n{"name": "f", "arguments": "{\\"a': [Call("f", '"{\\"a')],
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}, "id": "x': [F],
        f"{CALL_F}\n<tool": [F, "\n<tool"],
    },
}

LLAMA_ANSWERS: dict[str, Table] = {
    "an answer may be a call": {
        f" \n{LLAMA_F} \n": [F],
        f"\n<|python_tag|> {LLAMA_F};": [F],
        '{"name": "f", "arguments": {"a": 1}}': [F],
        '{"type": "function", "name": "f", "parameters": {"a": 1}}': [F],
        '{"name":"f","parameters":{"a": 1},"id":7}': [F],
        '{"name": "f", "parameters": {"a": 1}, "arguments": {"b": 2}, "name": "g"}': [F],
        '{"name": "f", "parameters": "{\\"a\\": 1}"}': [F],
        '{"name": "f", "parameters": {"a": 1}': [F],
    },
    "or several": {
        separator.join([LLAMA_F, LLAMA_G, LLAMA_F]): [F, G, F]
        for separator in (";", " ;\n", "\n", "", "; <|python_tag|>", "<|python_tag|>\n", "}; ", "}}\n")
    },
    "any other answer is content to the last character": content(
        *("", " ", "Hello.", f"Sure: {LLAMA_F}", f"[{LLAMA_F}]", f";{LLAMA_F}", '"text"'),
        *(" \n<|python_tag|>print(1)", "<|python_tag|>", "<|python", "Sure. <|python_tag|> \n"),
        *('Sure. <|python_tag|>{"answer": 42} <|pyth', "{", "{}", '{"answer": 42, "why": ["a", {"name": "f"}]}\n'),
        *('{"name": "Bob", "age": 5}', '{"name": "Bob"}', '{"name": 1, "parameters": {}}', "{not JSON} at all \n"),
        *('{"name": "", "parameters": {}}', '{"parameters": {}, "name": null}', '{"parameters": {"a": }, "name": "f"}'),
        *(f"{{ {LLAMA_F}", f'{{"answer": 1}}; {LLAMA_F}', '{"name": "f", "parame', ' {"a": "b'),
    ),
    "a call that is marked may come after text": {
        f"Let me see.\n<|python_tag|> {LLAMA_F}; {LLAMA_G}": ["Let me see.\n", F, G],
        f"a <|python_tag|>{LLAMA_F} b <|python_tag|>{LLAMA_G}": ["a ", F, " b ", G],
        f'{{"answer": 1}} <|python_tag|>{LLAMA_F}': ['{"answer": 1} ', F],
        f"<|python_tag|><|python_tag|>{LLAMA_F}": [F],
        f"<|python_tag|>print(1)\n<|python_tag|>{LLAMA_F}": ["<|python_tag|>print(1)\n", F],
        f'a <|python_tag|>{{"x": 1}} <|python_tag|>{LLAMA_F}': ['a <|python_tag|>{"x": 1} ', F],
    },
    "what comes after a call and is none is content": {
        f"{LLAMA_F}\nThat was it.\n": [F, "\nThat was it.\n"],
        f"{LLAMA_F}; then {LLAMA_G}": [F, f"; then {LLAMA_G}"],
        f"{LLAMA_F};; {LLAMA_G}": [F, f";; {LLAMA_G}"],
        f'{LLAMA_F}; {{"answer": 1}}; {LLAMA_G}': [F, f'; {{"answer": 1}}; {LLAMA_G}'],
        f"{LLAMA_F}; <|pyth": [F, "; <|pyth"],
        f'{LLAMA_F}; {{"name": "g", "para': [F, '; {"name": "g", "para'],
        f"{LLAMA_F}}} or so": [F, "} or so"],
        f"{LLAMA_F[:-1]}; {LLAMA_G}": [F, G],
        f"{LLAMA_F[:-1]} or so": [F, " or so"],
    },
    "a call that breaks or is cut off while it streams keeps what it has": {
        '{"name": "f", "parameters": ': [Call("f", "")],
        '{"name": "f", "parameters": {"a": "b': [Call("f", '{"a": "b')],
        '{"name": "f", "parameters": {"a": 1}, "x": "': [F],
        '{"name": "f", "parameters": {"a": <b>}}; x': [Call("f", '{"a": "<b>"}'), "; x"],
    },
}

MISTRAL_ANSWERS: dict[str, Table] = {
    "calls are a list": {
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]': [F],
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "x"}, {"name": "g", "arguments": {}}]': [F, EMPTY],
        '[TOOL_CALLS][{"arguments": {"a": 1}, "name": "f"}]': [F],
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, oops]': [F, ", oops]"],
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}}]': [F],
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}{"name": "g", "arguments": {}},]': [F, EMPTY],
        '[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}': [F],
    },
    "or names with arguments": {
        '[TOOL_CALLS]f[CALL_ID]x1y2[ARGS]{"a": 1}': [F],
        '[TOOL_CALLS]f{"a": 1}': [F],
        'Well.\n[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}': ["Well.", F, EMPTY],
        '[TOOL_CALLS]f[ARGS]{"a": 1} and more': [F, " and more"],
        '[TOOL_CALLS]f[ARGS]{"a": ?}[TOOL_CALLS]g[ARGS]{}': [Call("f", '{"a": "?"}'), EMPTY],
        '[TOOL_CALLS]f[ARGS]{"a": 1}}[TOOL_CALLS]g[ARGS]{}': [F, EMPTY],
        '[TOOL_CALLS]f[ARGS]{"a": "b': [Call("f", '{"a": "b')],
    },
    "anything else is content": content(
        *("[TOOL_CALLS]", "[TOOL_CALLS] I see", "[TOOL_CALLS][1, 2]", '[TOOL_CALLS][{"name": "f", "argum')
    ),
}

ANSWERS = {HERMES: HERMES_ANSWERS, LLAMA: LLAMA_ANSWERS, MISTRAL: MISTRAL_ANSWERS}


@pytest.mark.parametrize(("family", "rule"), [(family, rule) for family, rules in ANSWERS.items() for rule in rules])
def test_how_answers_are_read(family: ToolFamily, rule: str) -> None:
    table = ANSWERS[family][rule]
    assert {text: every_split(family, text) for text in table} == table


def test_what_is_nested_too_deeply_is_no_call() -> None:
    text = marked('{"arguments": ' + "[" * 100_000 + "]" * 100_000 + ', "name": "f"}')
    assert read_whole(HERMES, text) == [text]


LISTED = '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}] more'
BROKEN = '<tool_call>{"name": "f", "arguments": {?}</tool_call>'


@pytest.mark.parametrize(
    ("family", "text", "max_calls", "items"),
    [
        *((HERMES, f"Text {CALL_F}{tail}", 1, ["Text", F]) for tail in (f"\n{CALL_G}", "\ntext", '<tool_call>{"na')),
        *((LLAMA, f"{LLAMA_F}{tail}", 1, [F]) for tail in (f"; {LLAMA_G}", "\ntext", ";", "; {")),
        (MISTRAL, LISTED, 1, [F]),
        (HERMES, f"<tool_call>oops</tool_call>{CALL_F}{CALL_G}{CALL_F}", 2, ["<tool_call>oops</tool_call>", F, G]),
        (HERMES, f"{BROKEN}{CALL_G}", 1, [Call("f", '{"?": null}')]),  # also a broken call counts
    ],
)
def test_everything_after_the_last_wanted_call_is_dropped(
    family: ToolFamily, text: str, max_calls: int, items: list[str | Call]
) -> None:
    assert every_split(family, text, max_calls) == items


def test_pieces_come_as_early_as_they_can() -> None:
    assert_streams(
        AnswerReader(HERMES),
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
        ('"', []),  # unless a bracket or comma follows, it is part of the string
        ("}}\n</tool_", [CallPiece(0, None, '"}')]),
        ("call>\n<tool_call>", []),
        ('{"name": "g", "arguments": {}', [CallPiece(1, "g", ""), CallPiece(1, None, "{}")]),
        ("}</tool_call>", []),
    )
    assert_streams(
        AnswerReader(LLAMA),
        (" <|python_", []),
        ("tag|>", []),
        ('{"name": "f", "param', []),
        ('eters":', [CallPiece(0, "f", "")]),
        (' {"a": 1}', [CallPiece(0, None, '{"a": 1}')]),
        ("}; ", []),
        ('{"name": "g", "parameters": {"b"', [CallPiece(1, "g", ""), CallPiece(1, None, '{"b"')]),
    )


def test_arguments_before_the_name_come_in_one_piece() -> None:
    texts = ["<tool_call>", '{"arguments": {"a"', ": 1}, ", '"name": "f"', "}", "</tool_call>"]
    assert read(HERMES, texts) == [CallPiece(0, "f", '{"a": 1}')]


def test_text_streams_at_once_and_an_object_from_where_it_cannot_be_a_call_any_more() -> None:
    assert_streams(
        AnswerReader(LLAMA),
        ("\n", []),
        ("Hel", [ContentPiece("\nHel")]),
        ("lo \n", [ContentPiece("lo \n")]),
        ('{"name"', [ContentPiece('{"name"')]),
    )
    assert_streams(
        AnswerReader(LLAMA), ('{"a": ', []), ("1, ?", [ContentPiece('{"a": 1, ?')]), (" c", [ContentPiece(" c")])
    )


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
    num_characters = sum(len(piece.text) for piece in pieces if isinstance(piece, CallPiece))
    assert num_characters == 2 * len(arguments) + 2_000 * len(F.arguments)
