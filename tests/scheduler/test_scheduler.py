"""Traces of the policy: given these arrivals, these are the plans, step by step."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.params import FinishReason
from chairlift.scheduler import TokenEvent
from tests.scheduler.fake_engine import EOS, NO_REUSE, WORD, Driver, FakeEngine, Plan, beside, decode, prefill

FOUR = ("a", "b", "c", "d")


def trace_of(*requests: tuple[Any, ...], **settings: Any) -> FakeEngine:
    """Requests with their prompts, and how many tokens they want if that matters."""
    return FakeEngine(**{"budget": 16, "policy": NO_REUSE, **settings}).given(*requests)


# The settings of an engine, and what `FakeEngine.play` plays.
TRACES: dict[str, list[Any]] = {
    "a prompt is computed at once if the budget allows and then decodes": [
        *({}, ("a", 7), prefill(a=7), decode("a"), decode("a")),
    ],
    "prompts start in the order of their arrival as far as the budget goes": [
        *({}, ("a", 5), ("b", 6), ("c", 3), ("d", 4)),
        *(prefill(a=5, b=6, c=3, d=2), Plan([("a", 1), ("b", 1), ("c", 1), ("d", 2)], decode=3)),
    ],
    "a prompt that waits gets a quarter and what the one before leaves": [
        {"budget": 8},
        *(("a", 18), ("b", 10), prefill(a=8), prefill(a=6, b=2), prefill(a=4, b=4), beside("a", ("b", 4))),
    ],
    "an urgent prompt waits for one step and not for a long prompt that was begun": [
        *({"budget": 8192, "max_seq_len": 2**17}, ("long", 100_000, {"priority": 5}), prefill(long=8192)),
        *(("urgent", 10, {"priority": -5}), prefill(long=8182, urgent=10)),
    ],
    "the last token of a chunked prompt counts as a decode row": [
        *({"budget": 8}, ("a", 9), prefill(a=8), decode("a"), decode("a")),
    ],
    "prompts of one token": [{}, ("a", 1), ("b", 1, 1), prefill(a=1, b=1), decode("a")],
    "a prompt that alone is wanted may end with a chunk of one token": [
        *({"budget": 4, "max_steps": 4}, ("a", 9, 0), prefill(a=4), prefill(a=4), decode("a")),
    ],
    "a prompt of one token that alone is wanted is a launch of one step": [{"max_steps": 4}, ("a", 1, 0), prefill(a=1)],
    "decode rows come first and are never stalled by a long prompt": [
        *({"budget": 8}, ("a", 3), prefill(a=3), ("long", 30)),
        *(*[beside("a", ("long", 7))] * 4, beside("a", ("long", 2)), decode("a", "long")),
    ],
    "with all other slots decoding a prompt still gets on": [
        *({"budget": 4}, ("a", 1), ("b", 1), ("c", 1), prefill(a=1, b=1, c=1), ("d", 3)),
        *[Plan([(name, 1) for name in FOUR], decode=3)] * 2,
        *[decode(*FOUR)] * 2,
    ],
    "several steps go into a launch when every row decodes": [
        *({"max_steps": 4}, ("a", 3), ("b", 5), prefill(a=3, b=5), *[decode("a", "b", steps=4)] * 2),
    ],
    "while a prompt is computed launches have one step": [
        *({"budget": 4, "max_steps": 4}, ("a", 2), prefill(a=2), ("b", 7)),
        *(*[beside("a", ("b", 3))] * 2, *[decode("a", "b", steps=4)] * 2),
    ],
    "while somebody waits launches have one step": [
        *({"num_slots": 1, "max_steps": 4}, ("a", 3, 3), ("b", 2, 10), prefill(a=3), decode("a"), decode("a")),
        *(prefill(b=2), decode("b", steps=4), decode("b", steps=4), decode("b")),
    ],
    "a launch is no longer than the longest answer still wanted": [
        *({"max_steps": 8}, ("a", 3, 3), ("b", 3, 6), prefill(a=3, b=3), decode("a", "b", steps=5)),
    ],
    "a launch is no longer than the room in the fullest slot": [
        *({"max_steps": 8, "max_seq_len": 10}, ("full", 8, 2), ("roomy", 1, 9)),
        *(prefill(full=8, roomy=1), decode("full", "roomy", steps=2), decode("roomy", steps=6)),
    ],
    "requests beyond the slots wait and take them as they come free": [
        *({"num_slots": 2}, ("a", 4, 2), ("b", 4, 3), ("c", 4, 2), ("d", 4, 1)),
        *(prefill(a=4, b=4), decode("a", "b"), beside("b", ("c", 4)), beside("c", ("d", 4))),
    ],
    "a request that waits is aborted without ever running": [
        *({"num_slots": 1}, ("a", 2, 1), ("b", 2, 1), ("c", 2, 1), "b", prefill(a=2), prefill(c=2), "a", "unknown"),
    ],
    "a request that is aborted amid its prompt leaves its slot to the next": [
        *({"num_slots": 1, "budget": 4}, ("a", 6), ("b", 2), prefill(a=4), "a", prefill(b=2)),
    ],
    "a request that is aborted while it decodes leaves its slot to the next": [
        {"num_slots": 1, "budget": 4},
        *(("a", 6), ("b", 2), prefill(a=4), prefill(a=2), decode("a"), "a", prefill(b=2)),
    ],
    "an id may be used again once its request has ended": [{}, ("a", 4, 1), prefill(a=4), ("a", 6), prefill(a=6)],
}


@pytest.mark.parametrize("script", TRACES.values(), ids=TRACES.keys())
def test_these_requests_are_served_by_these_plans(script: list[Any]) -> None:
    trace = trace_of(**script[0]).play(*script[1:])
    for request in trace.requests.values():  # `check` has compared what is computed with what the slot holds
        has_newest = request.num_output_tokens > 0 and request.slot is not None
        assert not has_newest or request.num_computed == request.num_tokens - 1, "the last one sampled is in the slot"
        is_whole = request.num_output_tokens == request.max_tokens
        assert (request.finish_reason is FinishReason.LENGTH) == is_whole
    assert set(trace.ends.values()) <= {1}, "an end is told once"
    if not trace.has_work:
        assert trace.slots.num_free == trace.slots.num_slots


def test_an_unfinished_chunk_is_not_sampled_and_says_nothing() -> None:
    trace = trace_of(("a", 12), budget=8)
    trace.step()
    assert (trace.events, trace.requests["a"].num_output_tokens) == ([], 0)
    trace.step()
    assert trace.events == [TokenEvent("a", [WORD], None, None)]


def test_of_prompts_begun_the_urgent_and_then_the_short_come_first_but_the_oldest_has_a_quarter() -> None:
    trace = trace_of(max_seq_len=256)
    for name, num_tokens, priority in (("oldest", 100, 1), ("long", 40, 1), ("short", 20, 1), ("urgent", 60, 0)):
        trace.add(name, num_tokens, priority=priority)
        trace.step()
    begun = {name: trace.requests[name].num_computed for name in trace.requests}
    assert begun == {"oldest": 36, "long": 12, "short": 12, "urgent": 4}
    assert trace.step() == prefill(oldest=4, urgent=12)
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


def test_a_budget_that_cannot_feed_all_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="3 tokens cannot feed 4 slots"):
        Driver(num_slots=4, budget=3)


def test_a_row_that_ends_within_a_launch_drops_its_surplus_and_leaves_the_others_alone() -> None:
    trace = trace_of(("b", 3), ("c", 5, 3), ("a", 3, {"answer": [5, 6, EOS, 7, 8]}), max_steps=4)
    trace.steps(2)
    assert trace.events == [
        TokenEvent("b", [WORD] * 4, None, None),
        TokenEvent("c", [WORD] * 2, FinishReason.LENGTH, None),
        TokenEvent("a", [6, EOS], FinishReason.STOP, has_end_token=True),
    ]
    # a: the prompt, 5 and 6: an end token is no input of anything
    assert {name: trace.requests[name].num_computed for name in "abc"} == {"a": 5, "b": 7, "c": 7}
    assert trace.slots.num_free == 3
    assert trace.step() == decode("b", steps=4)


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
