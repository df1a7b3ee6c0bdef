"""Traces of the rules that users may rely on under load: priorities, tenants, deadlines, preemption."""

import itertools
from typing import Any

import pytest

from chairlift.errors import QueueTimeout
from chairlift.params import RequestTimes
from chairlift.scheduler import Policy, TokenEvent
from tests.scheduler.fake_engine import FakeEngine, Plan, end_of

PROMPT = [2, 3, 4, 5]


def engine_with(num_slots: int = 1, **policy: Any) -> FakeEngine:
    return FakeEngine(num_slots=num_slots, policy=Policy(enable_prefix_caching=False, **policy))


def order(engine: FakeEngine) -> list[str]:
    """Who gets the slot after whom, to the end of all work."""
    names: list[str] = []
    while engine.has_work:
        names += [name for name, _ in engine.step().rows if name not in names]
    return names


# Priorities and tenants


def test_a_free_slot_goes_to_the_lowest_priority_and_within_it_to_who_came_first() -> None:
    engine = engine_with()
    for name, priority in (("a", 0), ("late", 3), ("b", 0), ("urgent", -2)):
        engine.add(name, PROMPT, 2, priority=priority)
    assert order(engine) == ["urgent", "a", "b", "late"]


def test_waiting_makes_up_for_a_lower_priority() -> None:
    engine = engine_with()
    engine.add("running", PROMPT, 3)
    engine.step()
    engine.add("patient", PROMPT, 2, priority=2)
    engine.now = 61.0
    engine.add("newcomer", PROMPT, 2)
    assert order(engine) == ["running", "patient", "newcomer"]


def test_tenants_take_turns_whoever_came_first() -> None:
    engine = engine_with()
    for number in range(5):
        engine.add(f"a{number}", PROMPT * 12, 1, tenant="a")
    engine.add("b0", PROMPT * 12, 1, tenant="b")
    assert order(engine) == ["a0", "b0", "a1", "a2", "a3", "a4"]


def test_who_had_a_long_answer_lets_the_others_go_first() -> None:
    engine = FakeEngine(num_slots=1, max_seq_len=1024)
    engine.add("a0", PROMPT, 600, tenant="a")
    engine.step()
    for name in ("a1", "a2", "b0", "b1"):
        engine.add(name, PROMPT, 1, tenant=name[0])
    assert order(engine) == ["a0", "b0", "b1", "a1", "a2"]


def test_who_lost_its_slot_and_leaves_pays_for_what_it_had() -> None:
    engine = FakeEngine(num_slots=1, max_seq_len=1024, policy=Policy(preempt_after=600))
    engine.add("a0", PROMPT, 900, priority=1, tenant="a")
    engine.step()
    for name in ("a1", "b0"):
        engine.add(name, PROMPT, 1, priority=1, tenant=name[0])
    while engine.requests["a0"].num_output_tokens < 600:
        engine.step()
    engine.serve("high", PROMPT, 1)
    engine.abort("a0")
    assert engine.scheduler.waiting.num_preemptions == 1
    assert order(engine) == ["b0", "a1"]


# Deadlines


def test_who_waits_too_long_is_told_so_and_when_to_come_again() -> None:
    engine = engine_with(queue_timeout=2.0)
    engine.now = 50.0
    engine.add("running", PROMPT, 20)
    engine.add("waiting", PROMPT, 20)
    engine.step()
    engine.now = 51.9
    engine.step()
    assert engine.requests["waiting"].finish_reason is None
    engine.now = 52.0
    assert engine.step() == Plan([("running", 1)], decode=1)
    event = engine.events[0]
    assert end_of(event) == ("waiting", "abort", "timeout")
    assert isinstance(event.rejection, QueueTimeout)
    assert event.error == "no slot was free within 2.0 s; try again later"
    assert event.rejection.retry_after >= 1.0
    assert engine.scheduler.num_waiting == 0


def test_a_slot_in_time_ends_the_wait_for_good() -> None:
    engine = engine_with(queue_timeout=2.0)
    engine.add("a", PROMPT, 20)
    engine.step()
    engine.now = 100.0
    assert engine.step() == Plan([("a", 1)], decode=1)


def test_a_request_that_runs_longer_than_it_may_keeps_what_it_has() -> None:
    engine = engine_with()
    a = engine.add("a", PROMPT, 20, timeout=3.0)
    engine.steps(2)
    engine.now = 3.0
    engine.step()
    assert [end_of(event) for event in engine.events] == [("a", "abort", "timeout")]
    assert (engine.events[0].rejection, engine.events[0].error) == (None, None)
    assert (a.num_output_tokens, a.slot) == (2, None)


def test_who_misses_two_deadlines_at_once_is_told_once() -> None:
    engine = engine_with(queue_timeout=2.0)
    engine.add("a", PROMPT, timeout=1.0)
    engine.now = 3.0
    assert [event.request_id for event in engine.scheduler.expire()] == ["a"]


def test_a_timeout_of_its_own_also_ends_a_wait() -> None:
    engine = engine_with()
    engine.add("running", PROMPT, 20)
    engine.add("waiting", PROMPT, 20, timeout=1.0)
    engine.step()
    engine.now = 1.0
    engine.step()
    assert engine.events[0].rejection is not None


def test_deadlines_of_those_who_ended_mean_nothing() -> None:
    engine = engine_with(queue_timeout=1.0)
    engine.add("a", PROMPT, 1, timeout=2.0)
    engine.step()
    engine.abort("a")
    engine.now = 10.0
    assert engine.scheduler.expire() == []


def test_deadlines_of_many_who_ended_are_forgotten() -> None:
    engine = engine_with()
    for number in range(5000):
        engine.add(f"a{number}", PROMPT, 1, timeout=1e9)
        engine.step()
    assert len(engine.scheduler.waiting._deadlines) < 1100


def test_all_that_expired_at_once_are_told_in_the_order_of_their_deadlines() -> None:
    engine = engine_with()
    engine.add("running", PROMPT, 20, timeout=2.5)
    for name, timeout in (("a", 2.0), ("b", 1.0), ("c", 3.0)):
        engine.add(name, PROMPT, timeout=timeout)
    engine.step()
    engine.now = 2.7
    assert [event.request_id for event in engine.scheduler.expire()] == ["b", "a", "running"]


def test_when_thousands_are_due_at_once_a_step_ends_a_few_hundred_and_the_next_ones_the_others() -> None:
    engine = FakeEngine(num_slots=1, max_queue_size=1000, policy=Policy(queue_timeout=1.0))
    engine.add("running", PROMPT, 20)
    engine.step()
    for number in range(1000):
        engine.add(f"a{number}", PROMPT)
    engine.now = 2.0
    assert [len(engine.scheduler.expire()) for _ in range(5)] == [256, 256, 256, 232, 0]
    assert engine.scheduler.num_waiting == 0


# Preemption


def test_nobody_loses_a_slot_unless_the_policy_says_so() -> None:
    engine = engine_with()
    engine.add("low", PROMPT, 5, priority=9)
    engine.step()
    engine.add("high", PROMPT, 5)
    assert engine.step() == Plan([("low", 1)], decode=1)


def test_a_request_of_higher_priority_takes_the_slot_and_the_other_comes_back_to_go_on() -> None:
    engine = FakeEngine(num_slots=1, policy=Policy(preempt_after=2))
    low = engine.add("low", PROMPT, 5, priority=1)
    engine.step()
    engine.add("high", [6, 7, 8], 2)
    assert engine.steps(2) == [Plan([("low", 1)], decode=1), Plan([("high", 3)])]
    assert (low.slot, low.num_computed, low.num_output_tokens, low.num_preemptions) == (None, 0, 2, 1)
    assert engine.steps(2) == [Plan([("high", 1)], decode=1), Plan([("low", 6)])]
    engine.run()
    assert (low.finish_reason, low.num_output_tokens, low.num_cached_tokens) == ("length", 5, 0)


def test_a_spare_slot_keeps_what_was_computed_for_who_comes_back() -> None:
    engine = FakeEngine(num_slots=2, max_num_running=1, policy=Policy(preempt_after=2))
    low = engine.add("low", PROMPT, 5, priority=1)
    engine.step()
    engine.add("high", [6, 7, 8], 2)
    assert engine.steps(4) == [
        Plan([("low", 1)], decode=1),
        Plan([("high", 3)]),
        Plan([("high", 1)], decode=1),
        Plan([("low", 1)]),
    ]
    assert (low.num_reused, low.num_cached_tokens) == (5, 0)


def test_no_more_run_at_the_same_time_than_may_however_many_slots_there_are() -> None:
    engine = FakeEngine(num_slots=4, max_num_running=2)
    for name in "abc":
        engine.add(name, PROMPT, 2)
    assert engine.steps(3) == [
        Plan([("a", 4), ("b", 4)]),
        Plan([("a", 1), ("b", 1)], decode=2),
        Plan([("c", 1)]),
    ]


def test_only_so_many_tokens_later_a_slot_may_be_lost_again() -> None:
    engine = FakeEngine(num_slots=1, policy=Policy(preempt_after=3))
    low = engine.add("low", PROMPT, 12, priority=1)
    preempted_at = []
    for number in range(40):
        if number % 2:
            engine.add(f"high{number}", [6], 1)
        before = low.num_preemptions
        engine.step()
        if low.num_preemptions > before:
            preempted_at.append(low.num_output_tokens)
        if low.finish_reason is not None:
            break
    assert all(later - earlier >= 3 for earlier, later in itertools.pairwise(preempted_at))
    assert preempted_at


def test_equal_priorities_do_not_preempt_and_the_least_urgent_is_the_first_to_go() -> None:
    engine = FakeEngine(num_slots=2, policy=Policy(preempt_after=1))
    middle = engine.add("middle", PROMPT, 9, priority=1)
    lowest = engine.add("lowest", [8, 8], 9, priority=2)
    engine.step()
    engine.add("same", [9, 9], 9, priority=2)
    assert engine.step() == Plan([("middle", 1), ("lowest", 1)], decode=2)
    engine.add("high", [3, 3], 9)
    engine.step()
    assert (middle.slot is None, lowest.slot is None) == (False, True)


@pytest.mark.parametrize("num_ahead", [1, 2])
def test_a_slot_is_not_given_away_while_a_launch_writes_to_it(num_ahead: int) -> None:
    engine = FakeEngine(num_slots=1, num_ahead=num_ahead, policy=Policy(preempt_after=2))
    low = engine.add("low", PROMPT, 9, priority=1)
    for _ in range(4):
        engine.step()
    engine.add("high", [6, 7], 1)
    engine.run()
    assert low.num_preemptions == 1
    assert (low.finish_reason, low.num_output_tokens) == ("length", 9)


def test_who_lost_its_slot_begins_to_wait_anew() -> None:
    engine = FakeEngine(num_slots=1, policy=Policy(preempt_after=1))
    low = engine.add("low", PROMPT, 9, priority=1)
    engine.steps(2)
    engine.now = 100.0
    engine.add("high", [6, 7, 8], 3)
    engine.step()
    assert low.queue_time == 100.0
    engine.now = 101.0
    engine.serve("newcomer", [3, 3], 1)
    assert low.slot is None


def test_a_slot_is_taken_only_from_somebody_so_many_levels_below() -> None:
    engine = FakeEngine(num_slots=2, policy=Policy(preempt_after=1, preempt_levels=3))
    engine.add("near", [2, 2], 20, priority=2)
    far = engine.add("far", [3, 3], 20, priority=3)
    engine.steps(2)
    engine.add("newcomer", [4, 4], 1, priority=1)
    engine.steps(2)
    assert engine.scheduler.waiting.num_preemptions == 0
    engine.add("urgent", [5, 5], 1)
    engine.steps(2)
    assert (engine.scheduler.waiting.num_preemptions, far.num_preemptions) == (1, 1)


# Times


def test_times_come_with_the_first_tokens_and_with_the_end() -> None:
    engine = engine_with()
    engine.now = 1.0
    engine.add("running", PROMPT, 1)
    a = engine.add("a", PROMPT, 3)
    assert a.times == RequestTimes(1.0, None, None)
    heard: list[TokenEvent] = []
    for now in (1.5, 2.0, 3.0, 4.0):
        engine.now = now
        engine.step()
        heard += engine.events
    assert [(event.request_id, event.times) for event in heard] == [
        ("running", RequestTimes(1.0, 1.5, 1.5)),
        ("a", RequestTimes(1.0, 2.0, 2.0)),
        ("a", None),
        ("a", RequestTimes(1.0, 2.0, 2.0)),
    ]


def test_a_request_that_is_ended_says_how_far_it_had_come() -> None:
    engine = engine_with()
    engine.add("running", PROMPT)
    engine.step()
    engine.now = 2.0
    engine.add("waiting", PROMPT)
    ends = [engine.abort(name) for name in ("running", "waiting")]
    assert [end.times for end in ends if end is not None] == [
        RequestTimes(0.0, 0.0, 0.0),
        RequestTimes(2.0, None, None),
    ]
