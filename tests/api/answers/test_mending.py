"""Arguments that a model writes as JSON, or nearly: what is sent of them is JSON, wherever the text is cut."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from chairlift.api.answers import AnswerReader, ToolFamily
from chairlift.api.answers.mending import json_of_container
from tests.api.answers.calls import JSON_VALUES, calls_of, joined

HEAD, TAIL = '<tool_call>{"name": "f", "arguments": ', "}</tool_call>"


def sent(written: str, is_cut: bool = False, tail: str = TAIL) -> str:
    """The arguments that are sent of what is written, whole and in single characters: always the same.

    `is_cut`: by a limit; otherwise the model ended its answer.
    """
    arguments = set()
    for texts in ([HEAD + written + tail], list(HEAD + written + tail)):
        reader = AnswerReader(ToolFamily.HERMES)
        pieces = [piece for text in texts for piece in reader.push(text)]
        pieces += reader.push("", is_last=True, is_whole=not is_cut)
        arguments |= {call.arguments for call in calls_of(joined(pieces))}
    (only,) = arguments
    return only


MENDED = {
    "control characters are escaped": {
        '{"a": "x\ny\tz\x00"}': '{"a": "x\\ny\\tz\\u0000"}',
        '{"a\nb": 1}': '{"a\\nb": 1}',
        '{"a":\n\t[1,\r\n2]}': '{"a":\n\t[1,\r\n2]}',
    },
    "so are backslashes that escape nothing": {
        r'{"a": "\d+\.\\"}': r'{"a": "\\d+\\.\\"}',
        r'{"a": "C:\Users\x\u12"}': r'{"a": "C:\\Users\\x\\u12"}',
        r'{"a": "\u00e9\/\n"}': r'{"a": "\u00e9\/\n"}',
        r'{"a": "it\'s"}': '{"a": "it\'s"}',
        '{"a": "b \\\n c"}': '{"a": "b \\\\\\n c"}',
    },
    "half a surrogate pair becomes a replacement character": {
        r'{"a": "\ud83d"}': r'{"a": "\ufffd"}',
        r'{"a": "\ude00x\ud83d\ud83d\ude00"}': r'{"a": "\ufffdx\ufffd\ud83d\ude00"}',
        r'{"a": "\uD83D\uDE00"}': r'{"a": "\uD83D\uDE00"}',
        r'"{\"a\": \"\\ud83d\"}"': r'{"a": "\ufffd"}',
    },
    "quotes within a string are part of it": {
        '{"a": "say "hi" now", "b": 1}': '{"a": "say \\"hi\\" now", "b": 1}',
        '{"a": "5" tall"}': '{"a": "5\\" tall"}',
        '{"a": "x"\n "b": "y"}': '{"a": "x",\n "b": "y"}',
    },
    "Python's literals become JSON's, other words text": {
        "{'a': 'it\\'s \"x\"', 'b': True, 'c': [None, False]}": '{"a": "it\'s \\"x\\"", "b": true, "c": [null, false]}',
        "{a: Rome, b: New York }": '{"a": "Rome", "b": "New York" }',
        '{"a": NaN, "b": -Infinity, "c": 01, "d": -1.5e3}': '{"a": "NaN", "b": "-Infinity", "c": "01", "d": -1.5e3}',
        "?": '"?"',
    },
    "missing parts are added": {
        '{"a": 1': '{"a": 1}',
        '{"a": [1, {"b": 2': '{"a": [1, {"b": 2}]}',
        '{"a": {"b": [1}}': '{"a": {"b": [1]}}',
        '{"a": , "b":}': '{"a": null, "b":null}',
        '{"a", "b" 1, : 2}': '{"a": null, "b": 1, "": 2}',
        '{"a": [] "b": {}}': '{"a": [], "b": {}}',
        "": "{}",
    },
    "superfluous ones are left out": {
        '{"a": [1, 2,], }': '{"a": [1, 2] }',
        '{"a": [1,, 2]]}': '{"a": [1, 2]}',
        '{,"a":: 1, {"b": 2}': '{"a": 1,"b": 2}',
    },
}


@pytest.mark.parametrize("rule", MENDED)
def test_arguments_that_are_not_json_become_json(rule: str) -> None:
    assert {written: sent(written) for written in MENDED[rule]} == MENDED[rule]
    for arguments in MENDED[rule].values():
        json.loads(arguments)


@pytest.mark.parametrize("tail", ["}</tool_call>", "</tool_call>", "<tool_call>", ""])
def test_arguments_end_with_the_call_or_the_answer(tail: str) -> None:
    assert sent('{"a": [1, 2', tail=tail) == '{"a": [1, 2]}'


@pytest.mark.parametrize(
    "cut", ["", "{", '{"a', '{"a"', '{"a": ', '{"a": tru', '{"a": [1, ', '{"a": "b\\', '{"a": "b\\u00']
)
def test_arguments_that_a_limit_cuts_stay_cut(cut: str) -> None:
    assert sent(cut, is_cut=True, tail="") == cut


def test_half_a_string_is_not_made_a_whole_one() -> None:
    assert sent('{"cmd": "rm -r /tmp/a', tail="") == '{"cmd": "rm -r /tmp/a'


WRITTEN = st.lists(
    st.sampled_from(
        [
            *"{}[],:\"'\\ \n\t0-",
            "\\u",
            "\\ud83d",
            "\\ude00",
            "ab",
            "\x01",
            "true",
            "None",
            "1e5",
            '"a": ',
            '"b"',
            "</tool_",
        ]
    ),
    max_size=14,
).map("".join)


@given(written=WRITTEN)
def test_whatever_is_written_what_is_sent_is_json_or_ends_in_a_string(written: str) -> None:
    value = from_json(sent("{" + written), allow_partial="trailing-strings")
    assert isinstance(value, dict)
    json.dumps(value, ensure_ascii=False).encode()


@given(
    value=st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=3),
    is_ascii=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
def test_valid_json_passes_unchanged(value: object, is_ascii: bool, indent: int | None) -> None:
    written = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    assert sent(written) == written
    for at in range(len(written)):
        assert sent(written[:at], is_cut=True, tail="") == written[:at] or "\\ud" in written  # a pair cut in two


@given(value=st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=3) | st.lists(JSON_VALUES, max_size=3))
def test_an_object_or_array_is_found_in_a_string_and_behind_escapes(value: object) -> None:
    written = json.dumps(value)
    in_string = json.dumps(written)
    for each in (written, in_string, in_string[1:-1]):
        assert json.loads(json_of_container(each) or "") == value


def test_what_is_no_object_or_array_or_too_deep_for_one_is_none() -> None:
    assert [json_of_container(each) for each in ("", "5", '"a"', "null", "a [b]", "[" * 5000)] == [None] * 6
