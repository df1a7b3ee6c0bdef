"""A full queue: who is refused, who leaves for whom, how much of it a tenant may have, and what those are told."""

import re
from typing import Any

import pytest

from chairlift.errors import QueueFull
from chairlift.scheduler import Policy
from tests.scheduler.fake_engine import FakeEngine, end_of

PROMPT = [2, 3, 4, 5]
FULL = "the waiting queue is full (3 requests)"


def busy_engine(max_queue_size: int = 3, **policy: Any) -> FakeEngine:
    """One slot, which is taken."""
    engine = FakeEngine(num_slots=1, max_queue_size=max_queue_size, policy=Policy(**policy))
    engine.add("running", [9, 9], 50)
    engine.step()
    return engine


def waiting(engine: FakeEngine) -> list[str]:
    return [request.request_id for request in engine.scheduler.waiting]


# Who leaves


def test_who_would_be_served_later_has_to_leave_and_is_told() -> None:
    engine = busy_engine()
    for name in "abc":
        engine.add(name, PROMPT, priority=1)
    urgent = engine.ask("urgent", PROMPT)
    (event,) = engine.scheduler.add(urgent)
    assert end_of(event) == ("c", "abort", None)
    said = f"{FULL}, and a request that is served before this one took its place; try again later"
    assert isinstance(event.rejection, QueueFull)
    assert (event.error, str(event.rejection), event.rejection.retry_after) == (said, said, 1.0)
    assert engine.requests["c"].admission_time is None
    assert waiting(engine) == ["urgent", "a", "b"]
    engine.scheduler.check()


def test_who_would_be_served_last_is_refused() -> None:
    engine = busy_engine()
    for name in "abc":
        engine.add(name, PROMPT, priority=1)
    for priority in (1, 2):
        with pytest.raises(QueueFull) as caught:
            engine.add("late", PROMPT, priority=priority)
        assert str(caught.value) == f"{FULL}; try again later"
    assert waiting(engine) == ["a", "b", "c"]


def test_a_tenant_that_floods_the_queue_makes_room_for_others_until_all_have_the_same() -> None:
    engine = busy_engine(max_queue_size=6)
    for number in range(6):
        engine.add(f"flood{number}", PROMPT * 30, tenant="flood")
    others = [engine.displace(engine.ask(f"b{n}", PROMPT * 30, tenant="b")) for n in range(3)]
    assert others == [["flood5"], ["flood4"], ["flood3"]]
    with pytest.raises(QueueFull):
        engine.add("b3", PROMPT * 30, tenant="b")
    with pytest.raises(QueueFull):
        engine.add("flood6", PROMPT * 30, tenant="flood")
    assert engine.displace(engine.ask("c", PROMPT * 30, tenant="c")) == ["b2"]


def test_of_a_tenant_alone_nobody_leaves_for_another_request_of_it() -> None:
    engine = busy_engine()
    for name in "abc":
        engine.add(name, PROMPT * 50)
    with pytest.raises(QueueFull):
        engine.add("short", [7])


def test_who_has_waited_long_enough_to_be_served_before_the_newcomer_stays() -> None:
    engine = busy_engine(max_queue_size=1)
    engine.add("patient", PROMPT, priority=2)
    engine.now = 60.0
    with pytest.raises(QueueFull):
        engine.add("newcomer", PROMPT)
    engine.now = 59.0
    assert engine.displace(engine.ask("earlier", PROMPT)) == ["patient"]


def test_the_wait_of_the_next_one_does_not_make_up_for_those_behind_it() -> None:
    engine = busy_engine(max_queue_size=2)
    engine.add("next", PROMPT, priority=2)
    engine.add("behind", PROMPT, priority=2)
    engine.now = 70.0
    assert engine.displace(engine.ask("newcomer", PROMPT)) == ["behind"]
    with pytest.raises(QueueFull):
        engine.displace(engine.ask("another", PROMPT, priority=1))


def test_without_a_queue_nobody_leaves_for_anybody() -> None:
    engine = busy_engine(max_queue_size=0)
    with pytest.raises(QueueFull):
        engine.add("urgent", PROMPT, priority=-5)


def test_who_had_a_slot_before_keeps_its_place() -> None:
    engine = busy_engine(max_queue_size=1, preempt_after=1)
    engine.add("first", PROMPT, 20, priority=-1)
    engine.step()
    assert engine.requests["running"].num_preemptions == 1
    with pytest.raises(QueueFull):
        engine.add("second", PROMPT, priority=-1)
    assert waiting(engine) == ["running"]


# All or none


def test_those_who_came_together_leave_together() -> None:
    engine = busy_engine()
    engine.add("a", PROMPT, priority=1)
    engine.displace(*(engine.ask(name, PROMPT, priority=1) for name in ("b0", "b1")))
    assert engine.displace(engine.ask("urgent", PROMPT)) == ["b1", "b0"]
    assert waiting(engine) == ["urgent", "a"]


def test_who_came_together_with_somebody_who_has_a_slot_stays() -> None:
    engine = FakeEngine(num_slots=1, max_queue_size=2)
    engine.displace(*(engine.ask(name, PROMPT, priority=1) for name in "abc"))
    engine.step()
    with pytest.raises(QueueFull):
        engine.add("urgent", PROMPT)
    assert waiting(engine) == ["b", "c"]


def test_those_who_come_together_displace_as_many_as_they_are_or_nobody() -> None:
    engine = busy_engine()
    engine.add("urgent", PROMPT)
    for name in "ab":
        engine.add(name, PROMPT, priority=1)
    for names in ("xyz", "stuv"):  # the latter are more than there are places
        with pytest.raises(QueueFull):
            engine.displace(*(engine.ask(name, PROMPT) for name in names))
    assert waiting(engine) == ["urgent", "a", "b"]
    assert engine.displace(*(engine.ask(name, PROMPT) for name in "uv")) == ["b", "a"]


# Shares


def test_a_tenant_gets_no_more_than_its_share_of_the_places() -> None:
    engine = busy_engine(max_queue_size=10)
    for number in range(4):
        engine.add(f"a{number}", PROMPT, tenant="a", share=0.4)
    with pytest.raises(QueueFull) as caught:
        engine.add("a4", PROMPT, tenant="a", share=0.4)
    assert str(caught.value) == "your share of the waiting queue is full (4 of 10 requests); try again later"
    engine.add("b", PROMPT, tenant="b", share=0.4)
    engine.abort("a1")
    engine.add("a5", PROMPT, tenant="a", share=0.4)


def test_a_share_counts_all_priorities_and_all_that_come_together() -> None:
    engine = busy_engine(max_queue_size=10)
    engine.add("low", PROMPT, tenant="a", share=0.3, priority=3)
    with pytest.raises(QueueFull, match="share"):
        engine.displace(*(engine.ask(name, PROMPT, tenant="a", share=0.3) for name in "xyz"))
    engine.displace(*(engine.ask(name, PROMPT, tenant="a", share=0.3) for name in "xy"))


@pytest.mark.parametrize(
    ("num_slots", "max_queue_size", "share", "num_taken", "said"),
    [
        (1, 10, 0.01, 2, "your share of the waiting queue is full (1 of 10 requests)"),  # one place at least
        (2, 10, 0.2, 4, "your share of the waiting queue is full (2 of 10 requests)"),  # free slots count besides
        (1, 0, 0.1, 1, "the waiting queue is full (0 requests)"),
    ],
)
def test_a_share_is_of_the_queue_alone(
    num_slots: int, max_queue_size: int, share: float, num_taken: int, said: str
) -> None:
    engine = FakeEngine(num_slots, max_queue_size=max_queue_size)
    engine.displace(*(engine.ask(f"a{number}", PROMPT, tenant="a", share=share) for number in range(num_taken)))
    with pytest.raises(QueueFull, match=re.escape(said)):
        engine.add("b", PROMPT, tenant="a", share=share)


# Being refused


def test_who_is_refused_is_told_when_there_will_be_a_place_by_the_present_rate() -> None:
    engine = FakeEngine(num_slots=1, max_queue_size=2)
    for number in range(6):  # one slot in four seconds, and always somebody who waits for it
        engine.add(f"a{number}", PROMPT, 1)
        if number:
            engine.now += 4.0
            engine.step()
    engine.add("b", PROMPT)
    with pytest.raises(QueueFull) as caught:
        engine.scheduler.add(engine.ask("c", PROMPT), engine.ask("d", PROMPT))
    assert caught.value.retry_after == pytest.approx(4.0)
    with pytest.raises(QueueFull) as caught:
        engine.scheduler.add(*[engine.ask(name, PROMPT) for name in "efg"])
    assert caught.value.retry_after == pytest.approx(8.0)


def test_idle_times_do_not_count_as_waiting() -> None:
    engine = FakeEngine(num_slots=1, max_queue_size=1)
    for number in range(3):
        engine.add(f"a{number}", PROMPT, 1)
        engine.step()
        engine.now += 3600.0
    engine.add("running", PROMPT, 20)
    engine.step()
    engine.add("waiting", PROMPT)
    with pytest.raises(QueueFull) as caught:
        engine.scheduler.add(engine.ask("b", PROMPT))
    assert caught.value.retry_after == 1.0


def test_a_queue_that_stands_still_is_slower_the_longer_it_does() -> None:
    engine = FakeEngine(num_slots=1, max_queue_size=1)
    engine.add("running", PROMPT, 20)
    engine.step()
    engine.now = 50.0
    engine.add("waiting", PROMPT)
    for now, seconds in ((80.0, 30.0), (1e6, 600.0)):  # nobody is told to wait for more than ten minutes
        engine.now = now
        with pytest.raises(QueueFull) as caught:
            engine.add("b", PROMPT)
        assert caught.value.retry_after == seconds


def test_without_anything_to_go_by_it_is_a_second() -> None:
    engine = FakeEngine(num_slots=1, max_queue_size=0)
    with pytest.raises(QueueFull) as caught:
        engine.scheduler.add(engine.ask("a", PROMPT), engine.ask("b", PROMPT))
    assert caught.value.retry_after == 1.0
