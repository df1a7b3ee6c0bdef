"""A full queue: who is refused, who leaves for whom, how much of it a tenant may have, and what those are told."""

from typing import Any

import pytest

from chairlift.errors import QueueFull
from chairlift.scheduler import Policy
from tests.scheduler.fake_engine import FakeEngine, end_of

PROMPT = [2, 3, 4, 5]
FULL = "the waiting queue is full (3 requests)"


def busy_engine(names: str = "", *, max_queue_size: int = 3, **fields: Any) -> FakeEngine:
    """One slot, which is taken, and those who wait for it."""
    engine = FakeEngine(num_slots=1, max_queue_size=max_queue_size).given(("running", [9, 9], 50))
    engine.step()
    return engine.given(*((name, 4, fields) for name in names))


def displaced(engine: FakeEngine, names: str, prompt: int = 4, **fields: Any) -> list[str]:
    """By those who come together."""
    return engine.displace(*(engine.ask(name, prompt, **fields) for name in names))


def refused(engine: FakeEngine, names: str, **fields: Any) -> QueueFull:
    """Returns what those who come together are told."""
    with pytest.raises(QueueFull) as caught:
        displaced(engine, names, **fields)
    return caught.value


def waiting(engine: FakeEngine) -> list[str]:
    return [request.request_id for request in engine.scheduler.waiting]


def num_acceptable(engine: FakeEngine) -> int:
    """Requests that find places, though nobody leaves for them."""
    newcomer = engine.make("next", 4)
    return next(count for count in range(100) if not engine.scheduler.has_room_for([newcomer] * (count + 1)))


# Places


def test_free_slots_count_as_places_and_running_requests_do_not() -> None:
    engine = FakeEngine(num_slots=2, max_queue_size=1)
    assert num_acceptable(engine) == 3
    engine.given(*((name, 4, 2) for name in "abc"))
    places = []
    for _ in range(3):  # a and b have slots in the second, and c the one place in the queue; in the third they ended
        places.append((engine.scheduler.num_waiting, engine.scheduler.num_running, num_acceptable(engine)))
        assert places[-1][-1] or refused(engine, "d")
        engine.step()
    assert places == [(3, 0, 0), (1, 2, 0), (1, 0, 2)]


def test_a_full_queue_takes_all_of_several_requests_or_none() -> None:
    engine = FakeEngine(num_slots=2, max_queue_size=3).given(("a", 4))
    assert num_acceptable(engine) == 4
    assert str(refused(engine, "bcdef")) == f"{FULL}; try again later"
    assert waiting(engine) == ["a"]
    assert displaced(engine, "bcde") == []
    assert waiting(engine) == [*"abcde"]


def test_without_a_queue_requests_are_taken_as_long_as_slots_are_free() -> None:
    engine = FakeEngine(num_slots=2, max_queue_size=0).given(("a", 4), ("b", 4))
    assert refused(engine, "c")
    engine.step()
    engine.abort("a")
    assert displaced(engine, "c") == []


# Who leaves


def test_who_would_be_served_later_has_to_leave_and_is_told() -> None:
    engine = busy_engine("abc", priority=1)
    (event,) = engine.submit(engine.ask("urgent", PROMPT))
    assert end_of(event) == ("c", "abort", None)
    said = f"{FULL}, and a request of higher precedence displaced this one; try again later"
    assert isinstance(event.rejection, QueueFull)
    assert (event.error, str(event.rejection), event.rejection.retry_after) == (said, said, 1.0)
    assert engine.requests["c"].admission_time is None
    assert waiting(engine) == ["urgent", "a", "b"]


def test_who_had_a_slot_before_keeps_its_place() -> None:
    engine = FakeEngine(num_slots=1, max_queue_size=1, policy=Policy(preempt_after=1)).given(("low", [9, 9], 50))
    engine.step()
    engine.add("first", PROMPT, 20, priority=-1)
    engine.step()
    assert engine.requests["low"].num_preemptions == 1
    assert refused(engine, "n", priority=-1)
    assert waiting(engine) == ["low"]


def test_who_came_together_with_somebody_who_has_a_slot_stays() -> None:
    engine = FakeEngine(num_slots=1, max_queue_size=2)
    displaced(engine, "abc", priority=1)
    engine.step()
    assert refused(engine, "n")
    assert waiting(engine) == ["b", "c"]


LOW, LOWER, URGENT, LONG = {"priority": 1}, {"priority": 2}, {"priority": -5}, {"prompt": 120}
FLOOD, OTHER, THIRD = ({"tenant": name, **LONG} for name in ("flood", "b", "c"))
FLOODED = [("123", FLOOD), ("xyz", OTHER)]
SHARE, TINY_SHARE = {"tenant": "a", "share": 0.3}, {"tenant": "a", "share": 0.01}
IS_FULL, SHARE_IS_FULL = "the waiting queue is full ({} requests)", "your share of the waiting queue is full ({})"
LOW_SHARE = [("l", {**SHARE, "priority": 3})]


@pytest.mark.parametrize(
    ("max_queue_size", "comers", "now", "names", "fields", "outcome"),
    [
        (3, [("abc", LOW)], 0.0, "d", LOW, IS_FULL),  # who would be served last is refused
        (3, [("abc", LOW)], 0.0, "d", LOWER, IS_FULL),
        (3, [("abc", LONG)], 0.0, "n", {}, IS_FULL),  # of a tenant alone nobody leaves for another request of it
        (6, [("123456", FLOOD)], 0.0, "x", OTHER, ["6"]),  # who floods makes room until all have the same
        (6, [("12345", FLOOD), ("x", OTHER)], 0.0, "y", OTHER, ["5"]),
        (6, [("1234", FLOOD), ("xy", OTHER)], 0.0, "z", OTHER, ["4"]),
        (6, FLOODED, 0.0, "w", OTHER, IS_FULL),
        (6, FLOODED, 0.0, "4", FLOOD, IS_FULL),
        (6, FLOODED, 0.0, "c", THIRD, ["z"]),
        (1, [("p", LOWER)], 59.0, "n", {}, ["p"]),
        (1, [("p", LOWER)], 60.0, "n", {}, IS_FULL),  # it has waited long enough to be served before the newcomer
        (2, [("pq", LOWER)], 70.0, "n", {}, ["q"]),  # which does not make up for those behind it
        (0, [], 0.0, "n", URGENT, IS_FULL),  # without a queue nobody leaves for anybody
        (3, [("n", {}), ("ab", LOW)], 0.0, "xyz", {}, IS_FULL),  # they displace as many as they are or nobody
        (3, [("n", {}), ("ab", LOW)], 0.0, "wxyz", {}, IS_FULL),  # these are more than there are places
        (3, [("n", {}), ("ab", LOW)], 0.0, "xy", {}, ["b", "a"]),
        (10, LOW_SHARE, 0.0, "xy", SHARE, []),  # a share counts all priorities and all that come together
        (10, LOW_SHARE, 0.0, "xyz", SHARE, SHARE_IS_FULL.format("3 of 10 requests")),
        (10, [("wxy", SHARE)], 0.0, "n", SHARE, SHARE_IS_FULL.format("3 of 10 requests")),
        (10, [("wxy", SHARE)], 0.0, "n", OTHER, []),
        (10, [("a", TINY_SHARE)], 0.0, "b", TINY_SHARE, SHARE_IS_FULL.format("1 of 10 requests")),  # at least one
    ],
)
def test_who_leaves_for_whom(
    max_queue_size: int,
    comers: list[tuple[str, dict[str, Any]]],
    now: float,
    names: str,
    fields: dict[str, Any],
    outcome: list[str] | str,
) -> None:
    """`comers` have one letter each, and `names` come together and displace whom `outcome` names, or are told it."""
    engine = busy_engine(max_queue_size=max_queue_size)
    for each, its_fields in comers:
        for name in each:
            displaced(engine, name, **its_fields)
    before, engine.now = set(waiting(engine)), now
    if isinstance(outcome, list):
        assert displaced(engine, names, **fields) == outcome
        assert set(waiting(engine)) == before.difference(outcome).union(names)
    else:
        assert str(refused(engine, names, **fields)) == f"{outcome.format(max_queue_size)}; try again later"
        assert set(waiting(engine)) == before


def test_the_next_one_that_has_waited_long_stays_when_one_behind_it_has_left() -> None:
    engine = busy_engine("pq", max_queue_size=2, priority=2)
    engine.now = 70.0
    assert displaced(engine, "n") == ["q"]
    assert refused(engine, "m", priority=1)


def test_those_who_came_together_leave_together() -> None:
    engine = busy_engine("a", priority=1)
    displaced(engine, "xy", priority=1)
    assert displaced(engine, "n") == ["y", "x"]
    assert waiting(engine) == ["n", "a"]


def test_free_slots_count_besides_a_share_which_is_of_the_queue_alone() -> None:
    engine = FakeEngine(num_slots=2, max_queue_size=10)
    share: dict[str, Any] = {"tenant": "a", "share": 0.2}
    displaced(engine, "abcd", **share)
    assert str(refused(engine, "n", **share)).startswith(SHARE_IS_FULL.format("2 of 10 requests"))
    engine.abort("b")
    assert displaced(engine, "n", **share) == []
    engine = FakeEngine(num_slots=1, max_queue_size=0)
    displaced(engine, "a", **share)
    assert str(refused(engine, "n", **share)).startswith("the waiting queue is full (0 requests)")


# When to come again


def test_who_is_refused_is_told_when_there_will_be_a_place_by_the_present_rate() -> None:
    engine = FakeEngine(num_slots=1, max_queue_size=2)
    for number in range(6):  # one slot in four seconds, and always somebody who waits for it
        engine.add(f"a{number}", PROMPT, 1)
        if number:
            engine.now += 4.0
            engine.step()
    engine.add("b", PROMPT)
    assert [refused(engine, names).retry_after for names in ("cd", "efg")] == pytest.approx([4.0, 8.0])


def test_idle_times_do_not_count_as_waiting() -> None:
    engine = FakeEngine(num_slots=1, max_queue_size=1)
    for number in range(3):
        engine.add(f"a{number}", PROMPT, 1)
        engine.step()
        engine.now += 3600.0
    engine.add("running", PROMPT, 20)
    engine.step()
    engine.add("waiting", PROMPT)
    assert refused(engine, "b").retry_after == 1.0


def test_a_queue_that_stands_still_is_slower_the_longer_it_does_and_nobody_waits_for_more_than_ten_minutes() -> None:
    engine = busy_engine(max_queue_size=1)
    engine.now = 50.0
    engine.add("waiting", PROMPT)
    for engine.now, seconds in ((80.0, 30.0), (1e6, 600.0)):
        assert refused(engine, "b").retry_after == seconds


def test_without_anything_to_go_by_it_is_a_second() -> None:
    assert refused(FakeEngine(num_slots=1, max_queue_size=0), "ab").retry_after == 1.0
