"""Traces of the policy: given these arrivals, these are the plans, step by step.

An executor that knows no model answers each plan: it reserves in the real ledger and says what the test lets it say.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.errors import QueueFull
from chairlift.params import FinishReason, RequestOptions
from chairlift.scheduler import Request, RowResult, TokenEvent
from tests.scheduler.fake_engine import EOS, WORD, Driver, Plan, written

STOP = 3


class Trace(Driver):
    """`answers` holds what is sampled for whom, or WORD for ever."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.answers: dict[str, list[int]] = {}
        self.events: list[TokenEvent] = []  # of the latest step

    def make(self, name: str, *args: Any, answer: list[int] | None = None, **kwargs: Any) -> Request:
        self.answers[name] = list(answer or [])
        return super().make(name, *args, **kwargs)

    def step(self) -> Plan:
        plan = self.launch()
        self.events = self.land(
            [
                RowResult(self._say(row.request.request_id, plan.num_steps) if row.is_sampled else [])
                for row in plan.rows
            ]
        )
        return written(plan)

    def steps(self, count: int) -> list[Plan]:
        return [self.step() for _ in range(count)]

    def committed(self, name: str) -> int:
        """Tokens that the slot of a running request holds."""
        slot = self.requests[name].slot
        assert slot is not None
        return self.slots.cache_length_of(slot)

    def _say(self, name: str, num_tokens: int) -> list[int]:
        answer = self.answers[name]
        return [answer.pop(0) if answer else WORD for _ in range(num_tokens)]


# Prompts


def test_a_prompt_is_computed_at_once_if_the_budget_allows_and_then_decodes() -> None:
    trace = Trace()
    trace.add("a", 7)
    assert trace.steps(3) == [Plan([("a", 7)]), Plan([("a", 1)], decode=1), Plan([("a", 1)], decode=1)]
    assert trace.committed("a") == 9
    assert trace.requests["a"].num_tokens == 10  # the last one sampled is not in the slot yet


def test_prompts_start_in_arrival_order_as_far_as_the_budget_goes() -> None:
    trace = Trace(budget=16)
    for name, num_tokens in (("a", 5), ("b", 6), ("c", 3), ("d", 4)):
        trace.add(name, num_tokens)
    assert trace.step() == Plan([("a", 5), ("b", 6), ("c", 3), ("d", 2)])
    assert trace.step() == Plan([("a", 1), ("b", 1), ("c", 1), ("d", 2)], decode=3)


def test_an_unfinished_chunk_is_not_sampled_and_says_nothing() -> None:
    trace = Trace(budget=8)
    trace.add("a", 12)
    trace.step()
    assert trace.events == []
    assert (trace.committed("a"), trace.requests["a"].num_output_tokens) == (8, 0)
    trace.step()
    assert trace.events == [TokenEvent("a", [WORD], None, None)]


def test_a_prompt_that_waits_gets_a_quarter_and_what_the_one_before_leaves() -> None:
    trace = Trace(budget=8)
    trace.add("a", 18)
    trace.add("b", 10)
    assert trace.steps(4) == [
        Plan([("a", 8)]),
        Plan([("a", 6), ("b", 2)]),
        Plan([("a", 4), ("b", 4)]),
        Plan([("a", 1), ("b", 4)], decode=1),
    ]


def test_an_urgent_prompt_waits_for_one_step_and_not_for_a_long_prompt_that_was_begun() -> None:
    trace = Trace(budget=8192, max_seq_len=2**17)
    trace.add("long", 100_000, options=RequestOptions(priority=5))
    trace.step()
    trace.add("urgent", 10, options=RequestOptions(priority=-5))
    assert trace.step() == Plan([("long", 8182), ("urgent", 10)])


def test_of_prompts_begun_the_urgent_and_then_the_short_come_first_but_the_oldest_has_a_quarter() -> None:
    trace = Trace(budget=16, max_seq_len=256)
    for name, num_tokens, priority in (("oldest", 100, 1), ("long", 40, 1), ("short", 20, 1), ("urgent", 60, 0)):
        trace.add(name, num_tokens, options=RequestOptions(priority=priority))
        trace.step()
    begun = {name: trace.requests[name].num_computed for name in trace.requests}
    assert begun == {"oldest": 36, "long": 12, "short": 12, "urgent": 4}
    assert trace.step() == Plan([("oldest", 4), ("urgent", 12)])
    for _ in range(4):
        trace.step()
    assert trace.step() == Plan([("urgent", 1), ("oldest", 4), ("short", 4), ("long", 7)], decode=1)


@given(longs=st.lists(st.integers(1, 400), min_size=1, max_size=7), short=st.integers(1, 6), ahead=st.integers(0, 7))
def test_a_short_prompt_waits_for_the_number_of_prompts_before_it_but_not_for_their_length(
    longs: list[int], short: int, ahead: int
) -> None:
    trace = Trace(num_slots=8, budget=32, max_seq_len=512)
    for number, num_tokens in enumerate(longs):
        trace.add(f"long {number}", num_tokens)
        if number < ahead:
            trace.step()
    request, num_steps = trace.add("short", short), 0
    while request.num_uncomputed > 1 or not request.num_computed:
        trace.step()
        num_steps += 1
    assert num_steps <= len(longs) + 2


def test_the_last_token_of_a_chunked_prompt_counts_as_a_decode_row() -> None:
    trace = Trace(budget=8)
    trace.add("a", 9)
    assert trace.steps(2) == [Plan([("a", 8)]), Plan([("a", 1)], decode=1)]
    assert trace.events == [TokenEvent("a", [WORD], None, None)]
    assert trace.committed("a") == 9


def test_prompts_of_one_token() -> None:
    trace = Trace()
    trace.add("a", 1)
    trace.add("b", 1, max_tokens=1)
    assert trace.steps(2) == [Plan([("a", 1), ("b", 1)]), Plan([("a", 1)], decode=1)]
    assert trace.requests["b"].finish_reason is FinishReason.LENGTH


# Decoding beside prompts


def test_decode_rows_come_first_and_are_never_stalled_by_a_long_prompt() -> None:
    trace = Trace(budget=8)
    trace.add("a", 3)
    trace.step()
    trace.add("long", 30)
    assert trace.steps(6) == [
        Plan([("a", 1), ("long", 7)], decode=1),
        Plan([("a", 1), ("long", 7)], decode=1),
        Plan([("a", 1), ("long", 7)], decode=1),
        Plan([("a", 1), ("long", 7)], decode=1),
        Plan([("a", 1), ("long", 2)], decode=1),
        Plan([("a", 1), ("long", 1)], decode=2),
    ]
    assert trace.requests["a"].num_output_tokens == 7


def test_with_all_other_slots_decoding_a_prompt_still_gets_on() -> None:
    trace = Trace(num_slots=4, budget=4)
    for name in "abc":
        trace.add(name, 1)
    trace.step()
    trace.add("d", 3)
    assert trace.steps(4) == [
        Plan([("a", 1), ("b", 1), ("c", 1), ("d", 1)], decode=3),
        Plan([("a", 1), ("b", 1), ("c", 1), ("d", 1)], decode=3),
        Plan([("a", 1), ("b", 1), ("c", 1), ("d", 1)], decode=4),
        Plan([("a", 1), ("b", 1), ("c", 1), ("d", 1)], decode=4),
    ]
    assert trace.requests["d"].num_output_tokens == 2


def test_a_budget_that_cannot_feed_all_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="3 tokens cannot feed 4 slots"):
        Trace(num_slots=4, budget=3)


# Slots


def test_requests_beyond_the_slots_wait_and_take_them_as_they_come_free() -> None:
    trace = Trace(num_slots=2)
    for name, max_tokens in (("a", 2), ("b", 3), ("c", 2), ("d", 1)):
        trace.add(name, 4, max_tokens)
    assert trace.steps(3) == [
        Plan([("a", 4), ("b", 4)]),
        Plan([("a", 1), ("b", 1)], decode=2),
        Plan([("b", 1), ("c", 4)], decode=1),
    ]
    assert (trace.requests["a"].slot, trace.requests["c"].slot) == (None, 0)
    assert trace.committed("c") == 4  # nothing of a's five
    assert trace.step() == Plan([("c", 1), ("d", 4)], decode=1)
    assert not trace.scheduler.has_work
    assert trace.slots.num_free == 2


# Several steps in one launch


def test_several_steps_go_into_a_launch_when_every_row_decodes() -> None:
    trace = Trace(max_steps=4)
    trace.add("a", 3)
    trace.add("b", 5)
    assert trace.steps(3) == [
        Plan([("a", 3), ("b", 5)]),
        Plan([("a", 1), ("b", 1)], decode=2, steps=4),
        Plan([("a", 1), ("b", 1)], decode=2, steps=4),
    ]
    assert (trace.committed("a"), trace.committed("b")) == (11, 13)


def test_while_somebody_waits_launches_have_one_step() -> None:
    trace = Trace(num_slots=1, max_steps=4)
    trace.add("a", 3, max_tokens=3)
    trace.add("b", 2, max_tokens=10)
    assert trace.steps(7) == [
        Plan([("a", 3)]),
        Plan([("a", 1)], decode=1),
        Plan([("a", 1)], decode=1),
        Plan([("b", 2)]),
        Plan([("b", 1)], decode=1, steps=4),
        Plan([("b", 1)], decode=1, steps=4),
        Plan([("b", 1)], decode=1, steps=1),
    ]
    assert trace.requests["b"].num_output_tokens == 10


def test_while_a_prompt_is_computed_launches_have_one_step() -> None:
    trace = Trace(budget=4, max_steps=4)
    trace.add("a", 2)
    trace.step()
    trace.add("b", 7)
    assert trace.steps(4) == [
        Plan([("a", 1), ("b", 3)], decode=1),
        Plan([("a", 1), ("b", 3)], decode=1),
        Plan([("a", 1), ("b", 1)], decode=2, steps=4),
        Plan([("a", 1), ("b", 1)], decode=2, steps=4),
    ]


def test_a_launch_is_no_longer_than_the_longest_answer_still_wanted() -> None:
    trace = Trace(max_steps=8)
    trace.add("a", 3, max_tokens=3)
    trace.add("b", 3, max_tokens=6)
    assert trace.steps(2) == [Plan([("a", 3), ("b", 3)]), Plan([("a", 1), ("b", 1)], decode=2, steps=5)]
    assert not trace.scheduler.has_work
    assert [event.new_token_ids for event in trace.events] == [[WORD] * 2, [WORD] * 5]


def test_a_launch_is_no_longer_than_the_room_in_the_fullest_slot() -> None:
    trace = Trace(max_steps=8, max_seq_len=10)
    trace.add("full", 8, max_tokens=2)
    trace.add("roomy", 1, max_tokens=9)
    assert trace.steps(3) == [
        Plan([("full", 8), ("roomy", 1)]),
        Plan([("full", 1), ("roomy", 1)], decode=2, steps=2),
        Plan([("roomy", 1)], decode=1, steps=6),
    ]
    assert (trace.requests["full"].num_output_tokens, trace.requests["roomy"].num_output_tokens) == (2, 9)


def test_a_row_that_ends_within_a_launch_drops_its_surplus_and_leaves_the_others_alone() -> None:
    trace = Trace(max_steps=4)
    trace.add("a", 3, answer=[5, 6, EOS, 7, 8])
    trace.add("b", 3)
    trace.add("c", 5, max_tokens=3)
    trace.steps(2)
    assert trace.events == [
        TokenEvent("a", [6, EOS], FinishReason.STOP, has_end_token=True),
        TokenEvent("b", [WORD] * 4, None, None),
        TokenEvent("c", [WORD] * 2, FinishReason.LENGTH, None),
    ]
    assert trace.requests["a"].num_computed == 5  # the prompt, 5 and 6: an end token is no input of anything
    assert trace.requests["c"].num_computed == 7
    assert trace.committed("b") == trace.requests["b"].num_computed == 7
    assert trace.slots.num_free == 3
    assert trace.step() == Plan([("b", 1)], decode=1, steps=4)


# Ends


def test_rows_end_by_their_own_rules_and_say_why() -> None:
    trace = Trace(max_steps=8)
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
    trace = Trace(num_slots=1)
    for name in "abc":
        trace.add(name, 2, max_tokens=1)
    assert trace.scheduler.abort("b") == TokenEvent("b", [], FinishReason.ABORT, None)
    assert trace.requests["b"].finish_reason is FinishReason.ABORT
    assert trace.steps(2) == [Plan([("a", 2)]), Plan([("c", 2)])]
    assert not trace.scheduler.has_work


@pytest.mark.parametrize("num_steps", [1, 2, 3], ids=["amid its prompt", "after its prompt", "decoding"])
def test_a_running_request_is_aborted_and_its_slot_goes_to_the_next(num_steps: int) -> None:
    trace = Trace(num_slots=1, budget=4)
    trace.add("a", 6)
    trace.add("b", 2)
    trace.steps(num_steps)
    assert trace.scheduler.abort("a") == TokenEvent("a", [], FinishReason.ABORT, None)
    assert trace.slots.num_free == 1
    trace.scheduler.check()
    assert trace.step() == Plan([("b", 2)])
    assert trace.committed("b") == 2


def test_what_is_not_here_cannot_be_aborted() -> None:
    trace = Trace()
    trace.add("a", 2, max_tokens=1)
    trace.add("b", 2)
    trace.step()
    trace.scheduler.abort("b")
    assert [trace.scheduler.abort(name) for name in ("a", "b", "unknown")] == [None, None, None]
    assert trace.requests["a"].finish_reason is FinishReason.LENGTH


# The queue


def num_acceptable(trace: Trace) -> int:
    """Requests that find places, though nobody leaves for them."""
    return next(count for count in range(100) if not trace.scheduler.can_take([trace.make("next", 4)] * (count + 1)))


def test_a_full_queue_takes_all_of_several_requests_or_none() -> None:
    trace = Trace(num_slots=2, max_queue_size=3)
    trace.add("a", 4)
    assert num_acceptable(trace) == 4
    with pytest.raises(QueueFull, match=r"\(3 requests\)"):
        trace.scheduler.add(*(trace.make(name, 4) for name in "bcdef"))
    assert trace.scheduler.num_waiting == 1
    trace.scheduler.add(*(trace.make(name, 4) for name in "bcde"))
    assert trace.scheduler.num_waiting == 5


def test_free_slots_count_as_places_and_running_requests_do_not() -> None:
    trace = Trace(num_slots=2, max_queue_size=1)
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
    trace = Trace(num_slots=2, max_queue_size=0)
    trace.add("a", 4)
    trace.add("b", 4)
    with pytest.raises(QueueFull):
        trace.add("c", 4)
    trace.step()
    trace.scheduler.abort("a")
    trace.add("c", 4)
    assert trace.step() == Plan([("b", 1), ("c", 4)], decode=1)


@pytest.mark.parametrize("num_steps", [0, 1], ids=["waiting", "running"])
def test_an_id_that_is_here_already_is_refused_and_nothing_is_added(num_steps: int) -> None:
    trace = Trace()
    trace.add("a", 4)
    trace.steps(num_steps)
    before = trace.requests["a"]
    with pytest.raises(ValueError, match="'a' is already here"):
        trace.scheduler.add(trace.make("b", 4), trace.make("a", 6))
    assert trace.scheduler.num_waiting + trace.scheduler.num_running == 1
    trace.step()
    assert before.num_output_tokens == num_steps + 1


def test_an_id_given_twice_in_one_call_is_refused_and_nothing_is_added() -> None:
    trace = Trace()
    with pytest.raises(ValueError, match="'a' is"):
        trace.scheduler.add(trace.make("a", 4), trace.make("b", 4), trace.make("a", 6))
    assert not trace.scheduler.has_work


def test_an_id_may_be_used_again_once_its_request_has_ended() -> None:
    trace = Trace()
    trace.add("a", 4, max_tokens=1)
    trace.step()
    trace.add("a", 6)
    assert trace.step() == Plan([("a", 6)])


def test_a_prompt_that_alone_is_wanted_may_end_with_a_chunk_of_one_token() -> None:
    trace = Trace(budget=4, max_steps=4)
    trace.add("a", 9, max_tokens=0)
    assert trace.steps(3) == [Plan([("a", 4)]), Plan([("a", 4)]), Plan([("a", 1)], decode=1)]
    assert trace.requests["a"].finish_reason is FinishReason.LENGTH
