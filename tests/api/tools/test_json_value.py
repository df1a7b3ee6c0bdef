import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.api.tools.json_value import ScanState, ValueScanner


def scan(text: str) -> tuple[int, ScanState]:
    scanner = ValueScanner()
    return scanner.scan(text, 0), scanner.state


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1} tail', '{"a": 1}'),
        ("[1, [2, {}]], 3", "[1, [2, {}]]"),
        ('"a \\" } b" }', '"a \\" } b"'),
        ('"\\\\"}', '"\\\\"'),
        ('{"}": "]{", "b": {"c": "\\""}}}', '{"}": "]{", "b": {"c": "\\""}}'),
        ("-1.5e+3}", "-1.5e+3"),
        ("true,", "true"),
        ("null }", "null"),
        ("{}{}", "{}"),
    ],
)
def test_the_end_of_a_value_is_found(text: str, value: str) -> None:
    assert scan(text) == (len(value), ScanState.COMPLETE)


@pytest.mark.parametrize("text", ["{", '{"a', '"a\\', '{"a": [1, 2', "12", "tru"])
def test_a_value_that_is_cut_off_is_still_being_read(text: str) -> None:
    assert scan(text) == (len(text), ScanState.READING)


@pytest.mark.parametrize(
    ("text", "num_read"),
    [
        ("<", 0),
        ("}", 0),
        (",", 0),
        (" 1", 0),
        ("{'a'", 1),
        ('{"a": 1 </tool_call>', 8),
        ("[1; 2]", 2),
        ("\N{CJK RADICAL REPEAT}", 0),
    ],
)
def test_reading_stops_at_what_cannot_be_part_of_a_value(text: str, num_read: int) -> None:
    assert scan(text) == (num_read, ScanState.MALFORMED)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, derandomize=True)
@given(value=JSON_VALUES, is_ascii=st.booleans(), indent=st.sampled_from([None, 2]))
def test_any_json_is_read_to_its_end_character_by_character(value: object, is_ascii: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    scanner = ValueScanner()
    num_read = sum(scanner.scan(char, 0) for char in text + "\n")
    assert (num_read, scanner.state) == (len(text), ScanState.COMPLETE)
