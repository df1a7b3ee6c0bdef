"""Traces of the rules that users may rely on under load: priorities, tenants, deadlines, preemption."""

import itertools
from typing import Any

import pytest

from chairlift.errors import QueueTimeout
from chairlift.params import RequestTimes
from chairlift.scheduler import Policy, TokenEvent
from tests.scheduler.fake_engine import FakeEngine, beside, decode, end_of, prefill

PROMPT = [2, 3, 4, 5]


def engine_with(*requests: tuple[Any, ...], num_slots: int = 1, **policy: Any) -> FakeEngine:
    return FakeEngine(num_slots, policy=Policy(enable_prefix_caching=False, **policy)).given(*requests)


def order(engine: FakeEngine) -> list[str]:
    """Returns who gets the slot after whom, to the end of all work."""
    names: list[str] = []
    while engine.has_work:
        names += [name for name, _ in engine.step().rows if name not in names]
    return names


# Priorities and tenants


@pytest.mark.parametrize(
    ("requests", "served"),
    [
        (  # the lowest priority, and within it who came first
            [("a", 4, 2), ("late", 4, 2, {"priority": 3}), ("b", 4, 2), ("urgent", 4, 2, {"priority": -2})],
            ["urgent", "a", "b", "late"],
        ),
        (  # tenants take turns
            [*((f"a{number}", 48, 1, {"tenant": "a"}) for number in range(5)), ("b0", 48, 1, {"tenant": "b"})],
            ["a0", "b0", "a1", "a2", "a3", "a4"],
        ),
    ],
)
def test_a_free_slot_goes_to_whom_priorities_and_tenants_say(
    requests: list[tuple[Any, ...]], served: list[str]
) -> None:
    assert order(engine_with(*requests)) == served


def test_waiting_makes_up_for_a_lower_priority() -> None:
    engine = engine_with(("running", 4, 3), ("patient", 4, 2, {"priority": 2})).play(prefill(running=4))
    engine.now = 61.0
    engine.add("newcomer", 4, 2)
    assert order(engine) == ["running", "patient", "newcomer"]


def test_who_had_a_long_answer_lets_the_others_go_first() -> None:
    engine = FakeEngine(1, max_seq_len=1024).play(("a0", 4, 600, {"tenant": "a"}), prefill(a0=4))
    engine.given(*((name, PROMPT, 1, {"tenant": name[0]}) for name in ("a1", "a2", "b0", "b1")))
    assert order(engine) == ["a0", "b0", "b1", "a1", "a2"]


def test_who_lost_its_slot_and_leaves_pays_for_what_it_had() -> None:
    engine = FakeEngine(1, max_seq_len=1024, policy=Policy(preempt_after=600))
    a0 = engine.add("a0", PROMPT, 900, priority=1, tenant="a")
    engine.step()
    engine.given(*((name, PROMPT, 1, {"tenant": name[0], "priority": 1}) for name in ("a1", "b0")))
    while a0.num_output_tokens < 600:
        engine.step()
    engine.serve("high", PROMPT, 1)
    engine.abort("a0")
    assert engine.scheduler.waiting.num_preemptions == 1
    assert order(engine) == ["b0", "a1"]


# Deadlines


def test_who_waits_too_long_is_told_so_and_when_to_come_again_and_a_slot_in_time_ends_the_wait_for_good() -> None:
    engine = engine_with(queue_timeout=2.0)
    engine.now = 50.0
    engine.play(("running", 4, 20), ("waiting", 4, 20), prefill(running=4))
    engine.now = 51.9
    engine.step()
    assert engine.requests["waiting"].finish_reason is None
    engine.now = 52.0
    assert engine.step() == decode("running")
    event = engine.events[0]
    assert end_of(event) == ("waiting", "abort", "timeout")
    assert isinstance(event.rejection, QueueTimeout)
    assert event.error == "no slot was free within 2.0 s; try again later"
    assert event.rejection.retry_after >= 1.0
    assert engine.scheduler.num_waiting == 0


def test_a_request_that_runs_longer_than_it_may_keeps_what_it_has() -> None:
    engine = engine_with(("a", 4, 20, {"timeout": 3.0}))
    engine.steps(2)
    engine.now = 3.0
    engine.step()
    assert [(end_of(each), each.rejection, each.error) for each in engine.events] == [
        (("a", "abort", "timeout"), None, None)
    ]
    assert (engine.requests["a"].num_output_tokens, engine.requests["a"].slot) == (2, None)


def test_a_timeout_of_its_own_also_ends_a_wait_and_who_misses_two_deadlines_at_once_is_told_once() -> None:
    engine = engine_with(("running", 4, 20), ("a", 4, {"timeout": 1.0}), queue_timeout=2.0)
    engine.step()
    engine.now = 1.0
    assert [(event.request_id, event.rejection is None) for event in engine.scheduler.expire()] == [("a", False)]
    engine.add("b", 4, timeout=1.0)
    engine.now = 4.0
    assert [event.request_id for event in engine.scheduler.expire()] == ["b"]


def test_deadlines_of_those_who_ended_mean_nothing_and_are_forgotten() -> None:
    engine = engine_with(queue_timeout=1.0)
    for number in range(300):
        engine.add(f"a{number}", 4, 1, timeout=1e9 if number else 2.0)
        engine.step()
        engine.abort(f"a{number}")
    assert len(engine.scheduler.waiting._deadlines) < 100
    engine.now = 10.0
    assert engine.scheduler.expire() == []


def test_all_that_expired_at_once_are_told_in_the_order_of_their_deadlines() -> None:
    engine = engine_with(("running", 4, 20, {"timeout": 2.5}))
    engine.given(*((name, 4, {"timeout": timeout}) for name, timeout in (("a", 2.0), ("b", 1.0), ("c", 3.0))))
    engine.step()
    engine.now = 2.7
    assert [event.request_id for event in engine.scheduler.expire()] == ["b", "a", "running"]


def test_when_very_many_are_due_at_once_a_step_ends_a_few_hundred_and_the_next_ones_the_others() -> None:
    engine = FakeEngine(1, max_queue_size=600, policy=Policy(queue_timeout=1.0)).given(("running", PROMPT, 20))
    engine.step()
    engine.scheduler.add(*(engine.ask(f"a{number}", PROMPT) for number in range(600)))
    engine.now = 2.0
    assert [len(engine.scheduler.expire()) for _ in range(4)] == [256, 256, 88, 0]
    assert engine.scheduler.num_waiting == 0


# Preemption


PREEMPTING = Policy(preempt_after=2)
LOW = ("low", 4, 5, {"priority": 1})
HIGH = ("high", [6, 7, 8], 2)
# The settings of an engine, and what `FakeEngine.play` plays.
SCRIPTS: dict[str, list[Any]] = {
    "nobody loses a slot unless the policy says so": [{}, LOW, prefill(low=4), HIGH, decode("low")],
    "a request of higher priority takes the slot and the other comes back to go on": [
        {"policy": PREEMPTING},
        *(LOW, prefill(low=4), HIGH, decode("low"), prefill(high=3), decode("high"), prefill(low=6), decode("low")),
    ],
    "a spare slot keeps what was computed for who comes back": [
        {"policy": PREEMPTING, "num_slots": 2, "max_num_running": 1},
        *(LOW, prefill(low=4), HIGH, decode("low"), prefill(high=3), decode("high"), prefill(low=1)),
    ],
    "no more run at the same time than may however many slots there are": [
        {"num_slots": 4, "max_num_running": 2},
        *(*((name, 4, 2) for name in "abc"), prefill(a=4, b=4), decode("a", "b"), prefill(c=1)),
    ],
    "equal priorities do not preempt and the least urgent is the first to go": [
        {"policy": Policy(preempt_after=1), "num_slots": 2},
        *(LOW, ("lowest", [8, 8], 9, {"priority": 2}), prefill(low=4, lowest=2)),
        *(("same", [9, 9], 9, {"priority": 2}), decode("low", "lowest")),
        *(("high", [3, 3], 9), beside("low", ("high", 2))),
    ],
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_who_loses_a_slot_to_whom(script: list[Any]) -> None:
    engine = FakeEngine(**{"num_slots": 1, **script[0]}).play(*script[1:])
    engine.run()
    for request in engine.requests.values():
        assert (request.finish_reason, request.num_output_tokens) == ("length", request.max_tokens)
        assert request.num_cached_tokens == 0 or not request.num_preemptions, "what it finds again was its own"


def test_only_so_many_tokens_later_a_slot_may_be_lost_again() -> None:
    engine = FakeEngine(1, policy=Policy(preempt_after=3))
    low = engine.add("low", PROMPT, 12, priority=1)
    preempted_at: dict[int, int] = {}
    for number in range(40):
        if number % 2:
            engine.add(f"high{number}", [6], 1)
        engine.step()
        preempted_at.setdefault(low.num_preemptions, low.num_output_tokens)
    assert low.finish_reason == "length"
    assert all(later - earlier >= 3 for earlier, later in itertools.pairwise(list(preempted_at.values())[1:]))
    assert len(preempted_at) > 2


@pytest.mark.parametrize("num_ahead", [1, 2])
def test_a_slot_is_not_given_away_while_a_launch_writes_to_it(num_ahead: int) -> None:
    engine = FakeEngine(1, num_ahead=num_ahead, policy=PREEMPTING)
    low = engine.add("low", PROMPT, 9, priority=1)
    engine.steps(4)
    engine.add("high", [6, 7], 1)
    engine.run()
    assert (low.num_preemptions, low.finish_reason, low.num_output_tokens) == (1, "length", 9)


def test_who_lost_its_slot_begins_to_wait_anew() -> None:
    engine = FakeEngine(1, policy=Policy(preempt_after=1))
    low = engine.add("low", PROMPT, 9, priority=1)
    engine.steps(2)
    engine.now = 100.0
    engine.play(("high", [6, 7, 8], 3), prefill(high=3))
    assert low.queue_time == 100.0
    engine.now = 101.0
    engine.serve("newcomer", [3, 3], 1)
    assert low.slot is None


def test_a_slot_is_taken_only_from_somebody_so_many_levels_below() -> None:
    engine = FakeEngine(2, policy=Policy(preempt_after=1, preempt_levels=3))
    engine.given(("near", [2, 2], 20, {"priority": 2}), ("far", [3, 3], 20, {"priority": 3}))
    engine.steps(2)
    counts = []
    for name, priority in (("newcomer", 1), ("urgent", 0)):
        engine.add(name, [4, 4], 1, priority=priority)
        engine.steps(2)
        counts.append((engine.scheduler.waiting.num_preemptions, engine.requests["far"].num_preemptions))
    assert counts == [(0, 0), (1, 1)]


# Times


def test_times_come_with_the_first_tokens_and_with_the_end() -> None:
    engine = engine_with()
    engine.now = 1.0
    engine.given(("running", 4, 1), ("a", 4, 3))
    assert engine.requests["a"].times == RequestTimes(1.0, None, None)
    heard: list[TokenEvent] = []
    for engine.now in (1.5, 2.0, 3.0, 4.0):
        engine.step()
        heard += engine.events
    assert [(event.request_id, event.times) for event in heard] == [
        ("running", RequestTimes(1.0, 1.5, 1.5)),
        *(("a", RequestTimes(1.0, 2.0, 2.0)), ("a", None), ("a", RequestTimes(1.0, 2.0, 2.0))),
    ]


def test_a_request_that_is_ended_says_how_far_it_had_come() -> None:
    engine = engine_with().play(("running", 4), prefill(running=4))
    engine.now = 2.0
    engine.add("waiting", 4)
    ends = [engine.abort(name) for name in ("running", "waiting")]
    times = [RequestTimes(0.0, 0.0, 0.0), RequestTimes(2.0, None, None)]
    assert [end.times for end in ends if end is not None] == times
