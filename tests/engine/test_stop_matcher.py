"""Stop strings across pieces of text: cut at the earliest, nothing of one leaks, nothing else is lost."""

import random
import string
import time
import tracemalloc
from collections.abc import Sequence
from itertools import accumulate

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


def earliest(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop string of a text begins."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)


def without_containers(stops: Sequence[str]) -> list[str]:
    """Those stop strings that contain no other: of them, the first to begin is the first to be complete."""
    return [stop for stop in stops if not any(other != stop and other in stop for other in stops)]


@given(stops=st.lists(SHORT, max_size=4), pieces=PIECES)
@example(stops=["abb", "bba"], pieces=["a", "ab", "b", "a"])
@example(stops=["aab"], pieces=["a", "a", "a", "a", "b"])
def test_the_text_is_cut_at_the_earliest_stop_of_the_whole(stops: list[str], pieces: list[str]) -> None:
    stops = without_containers(stops)
    out, stop = run(stops, pieces)
    whole = "".join(pieces)
    at = earliest(whole, stops)
    assert "".join(out) == (whole if at is None else whole[:at])
    assert (stop is None) == (at is None)
    if at is not None and stop is not None:
        assert whole.startswith(stop, at)


@given(stops=st.lists(SHORT, max_size=4), pieces=PIECES)
@example(stops=["abba", "bb"], pieces=["abb", "a"])
def test_stops_within_stops_are_judged_as_soon_as_one_is_complete(stops: list[str], pieces: list[str]) -> None:
    out, stop = run(stops, pieces)
    for text_so_far in accumulate(pieces):
        at = earliest(text_so_far, stops)
        if at is not None:
            assert "".join(out) == text_so_far[:at]
            assert stop is not None
            return
    assert "".join(out) == "".join(pieces)
    assert stop is None


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


def test_without_stop_strings_everything_goes_out_at_once() -> None:
    assert run([], ["some", "", " text"]) == (["some", "", " text", ""], None)


def test_a_stop_may_span_many_pieces() -> None:
    assert run(["<|end of text|>"], ["so ", *"<|end of text|>", "more"]) == (["so ", *[""] * 15], "<|end of text|>")


def test_what_only_looked_like_a_stop_goes_out_when_it_turns_into_something_else() -> None:
    assert run(["###"], ["a#", "#", "b#"]) == (["a", "", "##b", "#"], None)


def test_what_is_held_at_the_end_goes_out_once() -> None:
    matcher = StopMatcher(StopStrings(["END"]))
    assert matcher.push("the EN") == StopMatch("the ", None)
    assert matcher.finish() == "EN"
    assert matcher.finish() == ""


def test_a_stop_in_the_middle_of_a_piece_cuts_it_and_drops_the_rest() -> None:
    assert run(["\n"], ["one line\nanother"]) == (["one line"], "\n")


def test_the_stop_that_begins_first_wins_over_the_one_that_is_named_first() -> None:
    assert run(["later", "now"], ["x now or later"]) == (["x "], "now")


def test_overlapping_stops_are_cut_where_the_first_begins() -> None:
    assert run(["abc", "bcd"], ["xab", "cd"]) == (["x", ""], "abc")
    assert run(["bcd", "abcde"], ["xabc", "d"]) == (["x", "a"], "bcd")


def test_characters_of_several_code_units_are_matched_whole() -> None:
    assert run(["😀."], ["a😀", "😀", "."]) == (["a", "😀", ""], "😀.")


def test_of_stops_that_begin_at_the_same_place_the_one_that_is_named_first_counts() -> None:
    assert run(["ab", "abc"], ["xabcd"]) == (["x"], "ab")
    assert run(["abc", "ab"], ["xabcd"]) == (["x"], "abc")
    assert run(["abc", "ab"], ["xab", "cd"]) == (["x"], "ab")  # as soon as one is complete


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
