"""Whatever the text and wherever it is cut: the same pieces when joined, and nothing lost."""

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.api.tools import ToolFamily
from tests.api.tools.calls import FAMILIES, calls_of, joined, read, read_whole

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
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
CUTS = st.lists(st.integers(min_value=0, max_value=200), max_size=8)


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[begin:end] for begin, end in pairwise(edges)]


@FAMILIES
@given(text=TEXTS, places=CUTS, max_calls=st.integers(min_value=1, max_value=3))
def test_the_split_does_not_matter_nothing_is_lost_and_a_limit_of_calls_only_cuts_the_end_off(
    family: ToolFamily, text: str, places: list[int], max_calls: int
) -> None:
    items, limited = read_whole(family, text), read_whole(family, text, max_calls)
    for texts in (cut(text, places), text):  # also character by character
        assert joined(read(family, texts)) == items
        assert joined(read(family, texts, max_calls)) == limited
    assert limited == items[: len(limited)]
    assert len(calls_of(limited)) == min(len(calls_of(items)), max_calls)
    assert limited == items or len(calls_of(items)) >= max_calls
    contents = [item for item in items if isinstance(item, str)]
    assert calls_of(items) or "".join(contents) == text
    rest = text
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
