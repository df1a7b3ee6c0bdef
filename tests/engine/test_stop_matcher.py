"""Stop strings across pieces of text: cut at the earliest, nothing of one leaks, nothing else is lost."""

import random
import string
import time
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chairlift.engine.text.inputs import StopStrings
from chairlift.engine.text.outputs import StopMatch, StopMatcher

SHORT = st.text(alphabet="ab", min_size=1, max_size=4)
ALIKE = [chr(code) for code in range(ord("b"), ord("b") + 64)]
PIECES = st.lists(st.text(alphabet="abc", max_size=4), max_size=12)


def run(stops: Sequence[str], pieces: Sequence[str]) -> tuple[list[str], str | None]:
    """What goes out for each piece and at the end, and the stop string that ended it."""
    matcher = StopMatcher(StopStrings(stops))
    out = []
    for piece in pieces:
        match = matcher.push(piece)
        out.append(match.text)
        if match.stop is not None:
            return out, match.stop
    return [*out, matcher.finish()], None


@given(stops=st.lists(SHORT, min_size=1, max_size=3), pieces=PIECES)
def test_text_goes_out_as_soon_as_it_cannot_begin_a_stop(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    whole, out = "", ""
    for piece in pieces:
        match = matcher.push(piece)
        whole, out = whole + piece, out + match.text
        if match.stop is not None:
            return
        held = whole[len(out) :]
        assert not held or any(stop.startswith(held) for stop in stops)
        assert not any(stop.startswith(whole[start:]) for stop in stops for start in range(len(out)))


@pytest.mark.parametrize(
    ("stops", "pieces", "out", "stop"),
    [
        pytest.param([], ["some", "", " text"], ["some", "", " text", ""], None, id="none"),
        pytest.param(["<|eot|>"], ["so ", *"<|eot|>", "more"], ["so ", *[""] * 7], "<|eot|>", id="over many pieces"),
        pytest.param(["###"], ["a#", "#", "b#"], ["a", "", "##b", "#"], None, id="only looks like one"),
        pytest.param(["\n"], ["one line\nanother"], ["one line"], "\n", id="in the middle of a piece"),
        pytest.param(["later", "now"], ["x now or later"], ["x "], "now", id="the first to begin wins"),
        pytest.param(["abc", "bcd"], ["xab", "cd"], ["x", ""], "abc", id="overlapping"),
        pytest.param(["bcd", "abcde"], ["xabc", "d"], ["x", "a"], "bcd", id="overlapping, the later one complete"),
        pytest.param(["😀."], ["a😀", "😀", "."], ["a", "😀", ""], "😀.", id="several code units"),
        pytest.param(["ab", "abc"], ["xabcd"], ["x"], "ab", id="of the same place the first named"),
        pytest.param(["abc", "ab"], ["xabcd"], ["x"], "abc", id="of the same place the first named, the longer"),
        pytest.param(["abc", "ab"], ["xab", "cd"], ["x"], "ab", id="as soon as one is complete"),
    ],
)
def test_each_piece_goes_out_up_to_where_a_stop_may_begin(
    stops: list[str], pieces: list[str], out: list[str], stop: str | None
) -> None:
    assert run(stops, pieces) == (out, stop)


def test_what_is_held_at_the_end_goes_out_once() -> None:
    matcher = StopMatcher(StopStrings(["END"]))
    assert matcher.push("the EN") == StopMatch("the ", None)
    assert matcher.finish() == "EN"
    assert matcher.finish() == ""


def plain_search(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, str | None]:
    """Text and stop string, found by looking for every stop string in all of the text after each piece."""
    whole = ""
    for piece in pieces:
        whole += piece
        found = [(at, index) for index, stop in enumerate(stops) if (at := whole.find(stop)) >= 0]
        if found:
            at, index = min(found)
            return whole[:at], stops[index]
    return whole, None


@given(stops=st.lists(SHORT, max_size=6), pieces=PIECES)
@example(stops=["abba", "bb", "b", "bba"], pieces=["a", "abba"])
@example(stops=["abb", "bba"], pieces=["a", "ab", "b", "a"])
@example(stops=["aab"], pieces=["a", "a", "a", "a", "b"])
@example(stops=["abba", "bb"], pieces=["abb", "a"])
def test_any_stops_end_the_text_where_a_plain_search_does(stops: list[str], pieces: list[str]) -> None:
    out, stop = run(stops, pieces)
    assert ("".join(out), stop) == plain_search(stops, pieces)


@pytest.mark.parametrize(
    "stops", [["a" * 1023 + end for end in ALIKE], ["a" * size + "b" for size in range(960, 1024)]]
)
def test_64_long_stops_that_look_alike_cost_little_per_character(stops: list[str]) -> None:
    prepared = StopStrings(stops)
    matchers = [StopMatcher(prepared) for _ in range(8)]
    start = time.process_time()
    for _ in range(2000):
        for matcher in matchers:
            assert matcher.push("a").stop is None
    assert time.process_time() - start < 5.0  # for 16,000 characters, of which each once took some milliseconds


def test_stop_strings_are_small_and_choices_share_them() -> None:
    tracemalloc.start()
    try:
        prepared = StopStrings(["".join(random.Random(seed).choices(string.printable, k=1024)) for seed in range(64)])
        assert tracemalloc.get_traced_memory()[0] < 10_000_000
        size = tracemalloc.get_traced_memory()[0]
        matchers = [StopMatcher(prepared) for _ in range(128)]
        assert tracemalloc.get_traced_memory()[0] - size < 100_000
    finally:
        tracemalloc.stop()
    assert len(matchers) == 128
