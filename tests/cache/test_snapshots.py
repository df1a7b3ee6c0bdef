"""Tests which state is found for a prompt, and which one is evicted."""

from hypothesis import given
from hypothesis import strategies as st

from chairlift.cache.prefixes import pack_tokens
from chairlift.cache.snapshots import Snapshots, StateSource

TOKENS = list(range(100, 200))


def packed(num_tokens: int, *more: int) -> bytes:
    return pack_tokens([*TOKENS[:num_tokens], *more])


def filled(*lengths: int, num_rows: int = 4) -> Snapshots:
    """States after so many of the tokens, in rows from 10 on."""
    snapshots = Snapshots(10, num_rows)
    assert [snapshots.add(packed(length), "") for length in lengths] == list(range(10, 10 + len(lengths)))
    return snapshots


def test_the_longest_state_that_has_taken_nothing_else_is_found() -> None:
    snapshots = filled(20, 40, 60)
    assert snapshots.find(packed(50, 7, 8), "", 52) == StateSource(11, 40)
    assert snapshots.find(packed(60), "", 60) == StateSource(12, 60)
    assert snapshots.find(packed(60), "", 59) == StateSource(11, 40)
    assert snapshots.find(packed(10, 7), "", 11) is None


def test_all_states_along_tokens_are_counted() -> None:
    snapshots = filled(20, 40, 60)
    counts = [snapshots.count(tokens, "") for tokens in (packed(10), packed(20), packed(50, 7), packed(99))]
    assert counts == [0, 1, 2, 3]
    assert snapshots.count(packed(99), "x") == 0


def test_under_another_salt_nothing_is_found() -> None:
    snapshots = filled(20)
    assert snapshots.add(packed(20), "x") == 11
    assert snapshots.find(packed(20), "x", 20) == StateSource(11, 20)
    assert snapshots.find(packed(20), "y", 20) is None


def test_a_state_is_kept_once_and_then_counts_as_used() -> None:
    snapshots = filled(20, 30, num_rows=2)
    assert snapshots.add(packed(20), "") is None
    assert snapshots.add(packed(40), "") == 11
    assert snapshots.find(packed(40), "", 39) == StateSource(10, 20)


def test_the_least_recently_used_state_is_evicted() -> None:
    snapshots = filled(20, 30, 40, num_rows=3)
    snapshots.use(10)
    assert snapshots.add(packed(50), "") == 11
    assert len(snapshots) == 3
    assert snapshots.find(packed(39), "", 39) == StateSource(10, 20)


def test_a_reserved_row_is_found_once_it_is_named() -> None:
    snapshots = filled(20, num_rows=4)
    assert [snapshots.reserve(), snapshots.reserve(), snapshots.reserve()] == [11, 12, None]
    assert snapshots.find(packed(99), "", 99) == StateSource(10, 20)
    assert (len(snapshots), snapshots.reclaim_unused()) == (3, [])
    snapshots.name(11, packed(30), "")
    snapshots.name(12, packed(30), "")  # which is known by now
    assert snapshots.find(packed(99), "", 99) == StateSource(11, 30)
    assert (len(snapshots), snapshots.reclaim_unused()) == (2, [12])
    snapshots.check()


def test_a_reserved_row_is_not_evicted_and_evicts_the_least_recently_used_state() -> None:
    snapshots = filled(20, 30, 40, num_rows=3)
    assert snapshots.reserve() == 10
    assert [snapshots.add(packed(length), "") for length in (50, 60, 70)] == [11, 12, 11]
    snapshots.drop(10)
    assert snapshots.add(packed(80), "") == 10
    snapshots.check()


def test_waypoints_go_first_and_evict_nothing_but_each_other() -> None:
    snapshots = filled(20, 30, num_rows=3)
    assert snapshots.add(packed(40), "", is_waypoint=True) == 12
    assert snapshots.add(packed(50), "", is_waypoint=True) == 12
    assert snapshots.add(packed(60), "") == 12
    assert snapshots.add(packed(70), "", is_waypoint=True) is None
    assert snapshots.find(packed(99), "", 99) == StateSource(12, 60)


def test_a_waypoint_that_was_of_use_is_like_the_others() -> None:
    snapshots = filled(20, num_rows=2)
    snapshots.add(packed(40), "", is_waypoint=True)
    snapshots.use(11)
    assert snapshots.add(packed(60), "") == 10


def test_states_on_the_way_to_what_failed_are_forgotten() -> None:
    snapshots = filled(20, 40, 60, 80)
    snapshots.forget(packed(70), "x")
    snapshots.forget(packed(70), "", above=20)
    assert snapshots.find(packed(70), "", 70) == StateSource(10, 20)
    assert snapshots.find(packed(80), "", 80) == StateSource(13, 80)
    snapshots.clear()
    assert len(snapshots) == 0
    snapshots.check()


def test_without_rows_nothing_is_kept() -> None:
    snapshots = Snapshots(10, 0)
    assert snapshots.add(packed(20), "") is None
    assert snapshots.add(packed(20), "", is_waypoint=True) is None
    assert snapshots.capacity == 0


tokens_of_states = st.lists(st.integers(0, 1), min_size=1, max_size=6)


@given(st.lists(tokens_of_states, max_size=12), tokens_of_states, st.integers(0, 6), st.integers(0, 5))
def test_what_is_found_is_the_longest_of_those_that_are_there(
    states: list[list[int]], prompt: list[int], most: int, num_rows: int
) -> None:
    snapshots, known = Snapshots(3, num_rows), dict[int, list[int]]()
    for tokens in states:
        row = snapshots.add(pack_tokens(tokens), "")
        if row is not None:
            known[row] = tokens
        snapshots.check()
    found = snapshots.find(pack_tokens(prompt), "", most)
    fitting = [each for each in known.values() if len(each) <= most and prompt[: len(each)] == each]
    assert (found.num_tokens if found else 0) == max(map(len, fitting), default=0)
    assert found is None or known[found.row] == prompt[: found.num_tokens]
