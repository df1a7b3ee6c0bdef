"""Traces of the policy: given these arrivals, these are the plans, step by step."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.errors import QueueFull
from chairlift.params import FinishReason
from chairlift.scheduler import TokenEvent
from tests.scheduler.fake_engine import EOS, NO_REUSE, WORD, Driver, FakeEngine, Plan

STOP = 3


def trace_of(*requests: tuple[Any, ...], **settings: Any) -> FakeEngine:
    """Requests with their prompts, and how many tokens they want if that matters."""
    defaults: dict[str, Any] = {"budget": 16, "policy": NO_REUSE}
    engine = FakeEngine(**{**defaults, **settings})
    for request in requests:
        engine.add(*request)
    return engine


def committed(engine: FakeEngine, name: str) -> int:
    """Tokens that the slot of a running request holds."""
    return engine.slots.cache_length_of(engine.slot_of(name))


def decode(*names: str, steps: int = 1) -> Plan:
    return Plan([(name, 1) for name in names], len(names), steps)


def beside(name: str, *chunks: tuple[str, int]) -> Plan:
    """A decode row and chunks of prompts."""
    return Plan([(name, 1), *chunks], decode=1)


TRACES: dict[str, tuple[dict[str, Any], list[tuple[Any, ...]], list[Plan]]] = {
    "prompts start in the order of their arrival as far as the budget goes": (
        {},
        [("a", 5), ("b", 6), ("c", 3), ("d", 4)],
        [Plan([("a", 5), ("b", 6), ("c", 3), ("d", 2)]), Plan([("a", 1), ("b", 1), ("c", 1), ("d", 2)], decode=3)],
    ),
    "a prompt that waits gets a quarter and what the one before leaves": (
        {"budget": 8},
        [("a", 18), ("b", 10)],
        [Plan([("a", 8)]), Plan([("a", 6), ("b", 2)]), Plan([("a", 4), ("b", 4)]), beside("a", ("b", 4))],
    ),
    "the last token of a chunked prompt counts as a decode row": (
        {"budget": 8},
        [("a", 9)],
        [Plan([("a", 8)]), decode("a"), decode("a")],
    ),
    "prompts of one token": ({}, [("a", 1), ("b", 1, 1)], [Plan([("a", 1), ("b", 1)]), decode("a")]),
    "several steps go into a launch when every row decodes": (
        {"max_steps": 4},
        [("a", 3), ("b", 5)],
        [Plan([("a", 3), ("b", 5)]), decode("a", "b", steps=4), decode("a", "b", steps=4)],
    ),
    "while somebody waits launches have one step": (
        {"num_slots": 1, "max_steps": 4},
        [("a", 3, 3), ("b", 2, 10)],
        [
            *(Plan([("a", 3)]), decode("a"), decode("a")),
            *(Plan([("b", 2)]), decode("b", steps=4), decode("b", steps=4), decode("b")),
        ],
    ),
    "a launch is no longer than the longest answer still wanted": (
        {"max_steps": 8},
        [("a", 3, 3), ("b", 3, 6)],
        [Plan([("a", 3), ("b", 3)]), decode("a", "b", steps=5)],
    ),
    "a launch is no longer than the room in the fullest slot": (
        {"max_steps": 8, "max_seq_len": 10},
        [("full", 8, 2), ("roomy", 1, 9)],
        [Plan([("full", 8), ("roomy", 1)]), decode("full", "roomy", steps=2), decode("roomy", steps=6)],
    ),
    "a prompt that alone is wanted may end with a chunk of one token": (
        {"budget": 4, "max_steps": 4},
        [("a", 9, 0)],
        [Plan([("a", 4)]), Plan([("a", 4)]), decode("a")],
    ),
}


@pytest.mark.parametrize(("settings", "requests", "plans"), TRACES.values(), ids=TRACES.keys())
def test_these_requests_are_served_by_these_plans(
    settings: dict[str, Any], requests: list[tuple[Any, ...]], plans: list[Plan]
) -> None:
    trace = trace_of(*requests, **settings)
    assert trace.steps(len(plans)) == plans
    if not trace.has_work:
        requests_served = trace.requests.values()
        assert {request.finish_reason for request in requests_served} == {FinishReason.LENGTH}
        assert all(request.num_output_tokens == request.max_tokens for request in requests_served)


# Prompts


def test_a_prompt_is_computed_at_once_if_the_budget_allows_and_then_decodes() -> None:
    trace = trace_of(("a", 7))
    assert trace.steps(3) == [Plan([("a", 7)]), decode("a"), decode("a")]
    assert committed(trace, "a") == 9
    assert trace.requests["a"].num_tokens == 10  # the last one sampled is not in the slot yet


def test_an_unfinished_chunk_is_not_sampled_and_says_nothing() -> None:
    trace = trace_of(("a", 12), budget=8)
    trace.step()
    assert trace.events == []
    assert (committed(trace, "a"), trace.requests["a"].num_output_tokens) == (8, 0)
    trace.step()
    assert trace.events == [TokenEvent("a", [WORD], None, None)]


def test_an_urgent_prompt_waits_for_one_step_and_not_for_a_long_prompt_that_was_begun() -> None:
    trace = trace_of(budget=8192, max_seq_len=2**17)
    trace.add("long", 100_000, priority=5)
    trace.step()
    trace.add("urgent", 10, priority=-5)
    assert trace.step() == Plan([("long", 8182), ("urgent", 10)])


def test_of_prompts_begun_the_urgent_and_then_the_short_come_first_but_the_oldest_has_a_quarter() -> None:
    trace = trace_of(max_seq_len=256)
    for name, num_tokens, priority in (("oldest", 100, 1), ("long", 40, 1), ("short", 20, 1), ("urgent", 60, 0)):
        trace.add(name, num_tokens, priority=priority)
        trace.step()
    begun = {name: trace.requests[name].num_computed for name in trace.requests}
    assert begun == {"oldest": 36, "long": 12, "short": 12, "urgent": 4}
    assert trace.step() == Plan([("oldest", 4), ("urgent", 12)])
    trace.steps(4)
    assert trace.step() == beside("urgent", ("oldest", 4), ("short", 4), ("long", 7))


@given(longs=st.lists(st.integers(1, 400), min_size=1, max_size=7), short=st.integers(1, 6), ahead=st.integers(0, 7))
def test_a_short_prompt_waits_for_the_number_of_prompts_before_it_but_not_for_their_length(
    longs: list[int], short: int, ahead: int
) -> None:
    trace = trace_of(num_slots=8, budget=32, max_seq_len=512)
    for number, num_tokens in enumerate(longs):
        trace.add(f"long {number}", num_tokens)
        if number < ahead:
            trace.step()
    request, num_steps = trace.add("short", short), 0
    while request.num_uncomputed > 1 or not request.num_computed:
        trace.step()
        num_steps += 1
    assert num_steps <= len(longs) + 2


# Decoding beside prompts, slots


def test_decode_rows_come_first_and_are_never_stalled_by_a_long_prompt() -> None:
    trace = trace_of(("a", 3), budget=8)
    trace.step()
    trace.add("long", 30)
    assert trace.steps(6) == [*[beside("a", ("long", 7))] * 4, beside("a", ("long", 2)), decode("a", "long")]
    assert trace.requests["a"].num_output_tokens == 7


def test_while_a_prompt_is_computed_launches_have_one_step() -> None:
    trace = trace_of(("a", 2), budget=4, max_steps=4)
    trace.step()
    trace.add("b", 7)
    assert trace.steps(4) == [*[beside("a", ("b", 3))] * 2, *[decode("a", "b", steps=4)] * 2]


def test_with_all_other_slots_decoding_a_prompt_still_gets_on() -> None:
    trace = trace_of(("a", 1), ("b", 1), ("c", 1), budget=4)
    trace.step()
    trace.add("d", 3)
    rows = [("a", 1), ("b", 1), ("c", 1), ("d", 1)]
    assert trace.steps(4) == [Plan(rows, decode=num_decoding) for num_decoding in (3, 3, 4, 4)]
    assert trace.requests["d"].num_output_tokens == 2


def test_a_budget_that_cannot_feed_all_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="3 tokens cannot feed 4 slots"):
        Driver(num_slots=4, budget=3)


def test_requests_beyond_the_slots_wait_and_take_them_as_they_come_free() -> None:
    trace = trace_of(("a", 4, 2), ("b", 4, 3), ("c", 4, 2), ("d", 4, 1), num_slots=2)
    assert trace.steps(3) == [Plan([("a", 4), ("b", 4)]), decode("a", "b"), beside("b", ("c", 4))]
    assert (trace.requests["a"].slot, trace.requests["c"].slot) == (None, 0)
    assert committed(trace, "c") == 4  # nothing of a's five
    assert trace.step() == beside("c", ("d", 4))
    assert not trace.scheduler.has_work
    assert trace.slots.num_free == 2


# Ends


def test_a_row_that_ends_within_a_launch_drops_its_surplus_and_leaves_the_others_alone() -> None:
    trace = trace_of(("b", 3), ("c", 5, 3), max_steps=4)
    trace.add("a", 3, answer=[5, 6, EOS, 7, 8])
    trace.steps(2)
    assert trace.events == [
        TokenEvent("b", [WORD] * 4, None, None),
        TokenEvent("c", [WORD] * 2, FinishReason.LENGTH, None),
        TokenEvent("a", [6, EOS], FinishReason.STOP, has_end_token=True),
    ]
    assert trace.requests["a"].num_computed == 5  # the prompt, 5 and 6: an end token is no input of anything
    assert trace.requests["c"].num_computed == 7
    assert committed(trace, "b") == trace.requests["b"].num_computed == 7
    assert trace.slots.num_free == 3
    assert trace.step() == decode("b", steps=4)


def test_rows_end_by_their_own_rules_and_say_why() -> None:
    trace = trace_of(max_steps=8)
    trace.add("a", 3, answer=[EOS] * 9)
    trace.add("b", 3, max_tokens=9, answer=[EOS] * 9, min_tokens=2)
    trace.add("c", 3, max_tokens=9, answer=[EOS] * 9, ignore_eos=True)
    trace.add("d", 3, answer=[WORD, STOP, WORD], stop_token_ids=[STOP])
    trace.step()
    assert trace.events[0] == TokenEvent("a", [EOS], FinishReason.STOP, has_end_token=True)
    trace.step()
    assert trace.events == [
        TokenEvent("b", [EOS, EOS], FinishReason.STOP, has_end_token=True),
        TokenEvent("c", [EOS] * 8, FinishReason.LENGTH, None),
        TokenEvent("d", [STOP], FinishReason.STOP, STOP, has_end_token=True),
    ]


def test_a_request_that_waits_is_aborted_without_ever_running() -> None:
    trace = trace_of(("a", 2, 1), ("b", 2, 1), ("c", 2, 1), num_slots=1)
    assert trace.abort("b") == TokenEvent("b", [], FinishReason.ABORT, None)
    assert trace.requests["b"].finish_reason is FinishReason.ABORT
    assert trace.steps(2) == [Plan([("a", 2)]), Plan([("c", 2)])]
    assert [trace.abort(name) for name in ("a", "b", "unknown")] == [None, None, None]
    assert trace.requests["a"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("num_steps", [1, 2, 3], ids=["amid its prompt", "after its prompt", "decoding"])
def test_a_running_request_is_aborted_and_its_slot_goes_to_the_next(num_steps: int) -> None:
    trace = trace_of(("a", 6), ("b", 2), num_slots=1, budget=4)
    trace.steps(num_steps)
    assert trace.abort("a") == TokenEvent("a", [], FinishReason.ABORT, None)
    assert trace.slots.num_free == 1
    assert trace.step() == Plan([("b", 2)])
    assert committed(trace, "b") == 2


# The queue


def num_acceptable(trace: FakeEngine) -> int:
    """Requests that find places, though nobody leaves for them."""
    return next(count for count in range(100) if not trace.scheduler.can_take([trace.make("next", 4)] * (count + 1)))


def test_a_full_queue_takes_all_of_several_requests_or_none() -> None:
    trace = trace_of(("a", 4), num_slots=2, max_queue_size=3)
    assert num_acceptable(trace) == 4
    with pytest.raises(QueueFull, match=r"\(3 requests\)"):
        trace.scheduler.add(*(trace.make(name, 4) for name in "bcdef"))
    assert trace.scheduler.num_waiting == 1
    trace.scheduler.add(*(trace.make(name, 4) for name in "bcde"))
    assert trace.scheduler.num_waiting == 5


def test_free_slots_count_as_places_and_running_requests_do_not() -> None:
    trace = trace_of(num_slots=2, max_queue_size=1)
    assert num_acceptable(trace) == 3
    for name in "abc":
        trace.add(name, 4, max_tokens=2)
    assert (trace.scheduler.num_waiting, trace.scheduler.num_running, num_acceptable(trace)) == (3, 0, 0)
    trace.step()  # a and b have slots now, c has the one place in the queue
    assert (trace.scheduler.num_waiting, trace.scheduler.num_running, num_acceptable(trace)) == (1, 2, 0)
    with pytest.raises(QueueFull):
        trace.add("d", 4)
    trace.step()  # a and b ended
    assert (trace.scheduler.num_waiting, trace.scheduler.num_running, num_acceptable(trace)) == (1, 0, 2)


def test_without_a_queue_requests_are_taken_as_long_as_slots_are_free() -> None:
    trace = trace_of(("a", 4), ("b", 4), num_slots=2, max_queue_size=0)
    with pytest.raises(QueueFull):
        trace.add("c", 4)
    trace.step()
    trace.abort("a")
    trace.add("c", 4)
    assert trace.step() == beside("b", ("c", 4))


@pytest.mark.parametrize("num_steps", [0, 1], ids=["waiting", "running"])
@pytest.mark.parametrize("names", ["ba", "bcb"], ids=["here already", "twice in one call"])
def test_an_id_that_is_not_new_is_refused_and_nothing_is_added(num_steps: int, names: str) -> None:
    trace = trace_of(("a", 4))
    trace.steps(num_steps)
    with pytest.raises(ValueError, match=f"'{names[-1]}' is already here"):
        trace.scheduler.add(*(trace.make(name, 6) for name in names))
    assert trace.scheduler.num_waiting + trace.scheduler.num_running == 1
    trace.step()
    assert trace.requests["a"].num_output_tokens == num_steps + 1


def test_an_id_may_be_used_again_once_its_request_has_ended() -> None:
    trace = trace_of(("a", 4, 1))
    trace.step()
    trace.add("a", 6)
    assert trace.step() == Plan([("a", 6)])
