"""Tests what becomes of results, said by hand or sampled: ends, errors, late masks; and of steps planned before they
came.
"""

from dataclasses import replace
from typing import Any, Self

import pytest

from chairlift.cache.ledger import SlotLedger
from chairlift.params import FinishReason, Logprob, SamplingParams
from chairlift.plan import RowResult, Scrub
from chairlift.prompt_work import PromptScores, ScoreTask
from chairlift.scheduler import Request, Scheduler, TokenEvent
from tests.scheduler.fake_engine import EOS, NO_REUSE, WORD, Driver, FakeEngine, Words

OTHER_EOS, STOP = 2, 3
LENGTH, STOPPED, ABORT = FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT


class Tower(Driver):
    """Plans as names and numbers of tokens, and results by name."""

    def begun(self) -> dict[str, int]:
        return {row.key.tag: row.num_new_tokens for row in self.launch().rows}

    def landed(self, **answers: list[int] | RowResult) -> list[TokenEvent]:
        """Returns what was sampled for whom in the oldest launch, or WORD in every step."""
        plan = self.in_flight[0]
        said = [answers.get(row.key.tag, [WORD] * plan.num_steps * row.is_sampled) for row in plan.rows]
        return self.land([each if isinstance(each, RowResult) else RowResult(each) for each in said])

    def step(self, **answers: list[int] | RowResult) -> list[TokenEvent]:
        self.launch()
        return self.landed(**answers)

    def begin_steps(self, count: int) -> Self:
        for _ in range(count):
            self.launch()
        return self

    def scrubbed(self) -> list[Scrub]:
        """Returns what the ledger owes, which from now on it does not."""
        jobs = list(self.slots.owed)
        self.slots.owed.clear()
        return [job for job in jobs if isinstance(job, Scrub)]


# Ends


@pytest.mark.parametrize("max_steps", [1, 8])
@pytest.mark.parametrize(
    ("params", "max_tokens", "sampled", "kept", "finish_reason", "stop_reason"),
    [
        ({}, 6, [WORD, EOS, WORD, WORD], [WORD, EOS], STOPPED, None),
        ({}, 6, [WORD, OTHER_EOS, WORD, WORD], [WORD, OTHER_EOS], STOPPED, None),
        ({"stop_token_ids": [STOP, 7]}, 6, [WORD, STOP, WORD], [WORD, STOP], STOPPED, STOP),
        ({}, 3, [WORD] * 5, [WORD] * 3, LENGTH, None),
        ({}, 3, [WORD, WORD, EOS], [WORD, WORD, EOS], STOPPED, None),
        # Ignoring the end tokens leaves stop tokens in force, even if they are the same.
        ({"ignore_eos": True, "stop_token_ids": [STOP]}, 6, [EOS, STOP, WORD], [EOS, STOP], STOPPED, STOP),
        ({"ignore_eos": True, "stop_token_ids": [EOS]}, 6, [WORD, EOS, WORD], [WORD, EOS], STOPPED, EOS),
        # An end token counts only after `min_tokens` others.
        ({"min_tokens": 0}, 6, [EOS] * 8, [EOS], STOPPED, None),
        ({"min_tokens": 1}, 6, [EOS] * 8, [EOS] * 2, STOPPED, None),
        ({"min_tokens": 3}, 6, [EOS] * 8, [EOS] * 4, STOPPED, None),
        ({"min_tokens": 6}, 6, [EOS] * 8, [EOS] * 6, LENGTH, None),
        ({"min_tokens": 2, "stop_token_ids": [STOP]}, 6, [STOP] * 4, [STOP] * 3, STOPPED, STOP),
    ],
)
def test_tokens_are_kept_up_to_the_one_that_ends_the_sequence(
    params: dict[str, Any],
    max_tokens: int,
    sampled: list[int],
    kept: list[int],
    finish_reason: FinishReason,
    stop_reason: int | None,
    max_steps: int,
) -> None:
    engine, eos, prompt = FakeEngine(max_steps=max_steps), frozenset({EOS, OTHER_EOS}), [100, 101, 102, 103]
    request = engine.serve("a", prompt, max_tokens, answer=sampled, eos_token_ids=eos, **params)
    assert (request.token_ids[4:], request.finish_reason, request.stop_reason) == (kept, finish_reason, stop_reason)
    assert engine.events[-1].has_end_token == (finish_reason is STOPPED)
    assert prompt == [100, 101, 102, 103]


def test_the_tokens_that_may_end_a_sequence_are_known_to_the_sampler() -> None:
    stops = {"stop_token_ids": [STOP]}
    tower = Tower().given(("a", 4, stops), ("b", 4, {**stops, "ignore_eos": True}))
    assert [tower.requests[name].end_token_ids for name in "ab"] == [{EOS, STOP}, {STOP}]


@pytest.mark.parametrize(
    ("params", "sampled", "finish_reason"),
    [
        ({"grammar": Words(5, 6)}, [5, 6], STOPPED),
        ({"grammar": Words(5, 6, 6)}, [5, EOS], STOPPED),  # which it allows
        ({"grammar": Words(5, 6), "min_tokens": 9, "ignore_eos": True}, [EOS], STOPPED),  # neither puts off its end
        ({"grammar": Words(5), "max_tokens": 1}, [5], STOPPED),
        ({"grammar": Words(5, 6), "max_tokens": 1}, [5], LENGTH),
    ],
)
def test_a_text_ends_with_its_grammar(params: dict[str, Any], sampled: list[int], finish_reason: FinishReason) -> None:
    tower = Tower().given(("a", [7], params))
    events = [event for token in sampled for event in tower.step(a=[token])]
    assert [event.new_token_ids for event in events] == [[token] for token in sampled]
    assert [event.finish_reason for event in events] == [None] * (len(sampled) - 1) + [finish_reason]
    assert events[-1].has_end_token == (sampled[-1] == EOS)  # and no part of the text
    assert tower.slots.num_free == 4


def test_while_a_row_has_a_grammar_all_take_one_step_at_a_time() -> None:
    grammar = Words(5, 6, 7)
    tower = Tower(max_steps=4).given(("a", [7], {"grammar": grammar}), ("b", [7]))
    tower.step(a=[5])
    assert tower.launch().num_steps == 1
    assert tower.landed(a=[6]) == [TokenEvent("a", [6], None), TokenEvent("b", [WORD], None)]
    grammar.is_ready = False  # it sits out, and the others' launches are as short for it
    assert tower.launch().num_steps == 1
    tower.landed()
    grammar.is_ready = True
    assert tower.step(a=[7])[0].finish_reason is STOPPED
    assert tower.launch().num_steps == 4


# Scores


def test_scores_of_a_prompts_chunks_come_as_they_are_computed() -> None:
    scores, tower = PromptScores([{8: Logprob(-1.0, 1)}, {9: Logprob(-2.0, 3)}]), Tower(budget=4)
    tower.submit(replace(tower.make("a", [7, 8, 9, 10, 11, 12]), prompt_task=ScoreTask(0)))
    assert tower.step(a=RowResult(prompt_result=scores)) == [TokenEvent("a", [], None, prompt_result=scores)]


def test_log_probabilities_of_surplus_tokens_are_dropped_with_them() -> None:
    scores = [{token: Logprob(-1.0, 1)} for token in (3, EOS, 5, 6)]
    tower = Tower(max_steps=4).given(("a", [7], {"logprobs": 0}))
    tower.step(a=RowResult([WORD], [{WORD: Logprob(-1.0, 1)}]))
    (event,) = tower.step(a=RowResult([3, EOS, 5, 6], scores))
    assert (event.new_token_ids, event.logprobs) == ([3, EOS], scores[:2])


# Errors


def test_a_grammar_that_fails_ends_its_request_alone() -> None:
    tower = Tower().given(("a", [7], {"grammar": Words(5, 6)}), ("b", [7]))
    said = "the grammar failed: token 9 does not fit"
    assert tower.step() == [TokenEvent("a", [9], ABORT, error=said), TokenEvent("b", [9], None)]


def test_a_request_whose_grammar_cannot_be_made_ends_alone_and_is_told_in_the_next_step() -> None:
    def fail() -> Words:
        raise RuntimeError("no memory")

    tower = Tower()
    tower.submit(replace(tower.make("a", [7]), new_grammar=fail), tower.make("b", [7]))
    assert tower.step() == [TokenEvent("b", [WORD], None)]
    tower.scheduler.abort("b")
    assert (tower.scheduler.has_work, tower.slots.num_free) == (True, 4)
    said = "the request could not be started: no memory"
    assert tower.scheduler.expire() == [TokenEvent("a", [], ABORT, error=said)]
    assert (tower.scheduler.expire(), tower.scheduler.has_work) == ([], False)


def test_an_error_ends_its_row_alone_after_the_tokens_before_it() -> None:
    tower = Tower(max_steps=4).given(("a", [7]), ("b", [7]))
    tower.step()
    assert tower.step(a=RowResult([2, 3], error="not a number"), b=[2, 3, 4, 5]) == [
        TokenEvent("a", [2, 3], ABORT, error="not a number"),
        TokenEvent("b", [2, 3, 4, 5], None),
    ]
    assert (tower.slots.num_free, tower.scrubbed()) == (3, [Scrub(0, 0, 64)])
    tower.add("c", [7, 8, 9])
    (_, event) = tower.step(c=RowResult(error="not a number"))
    assert event == TokenEvent("c", [], ABORT, error="not a number")


def test_an_error_in_a_rows_surplus_does_not_count_but_is_not_left_in_the_slot() -> None:
    tower = Tower(max_steps=4).given(("a", [7]), ("b", [7]))
    tower.step()
    events = tower.step(a=RowResult([3, EOS], error="no number after that"))
    assert [(event.finish_reason, event.error) for event in events] == [(STOPPED, None), (None, None)]
    assert tower.scrubbed() == [Scrub(0, 3, 64)]


@pytest.mark.parametrize(("num_steps", "scrubbed"), [(0, []), (1, [Scrub(0, 0, 64)]), (2, []), (3, [])])
def test_a_slot_given_back_before_a_token_was_sampled_from_it_may_hold_no_numbers(
    num_steps: int, scrubbed: list[Scrub]
) -> None:
    tower = Tower(budget=4).given(("a", 6))
    for _ in range(num_steps):
        tower.step()
    tower.scheduler.abort("a")
    assert tower.scrubbed() == scrubbed


# Late masks


def test_a_late_row_has_its_newest_token_computed_once_more_and_then_goes_on() -> None:
    tower = Tower().given(("a", [7], {"grammar": Words(5, 6)}))
    tower.step(a=[5])
    (row,) = tower.scheduler.schedule().rows
    assert (row.num_new_tokens, row.start) == (1, 1)
    assert tower.step(a=RowResult([9], is_late=True)) == []
    request = tower.requests["a"]
    assert (request.token_ids, request.num_computed, request.num_pending) == ([7, 5], 1, 0)
    assert tower.step(a=[6]) == [TokenEvent("a", [6], STOPPED)]


def test_a_prompt_whose_first_mask_is_late_has_its_last_token_computed_once_more() -> None:
    tower, scores = Tower().given(("a", [7, 7, 7], 1, {"grammar": Words(5)})), PromptScores([{7: Logprob(-1.0, 1)}])
    (event,) = tower.step(a=RowResult([9], is_late=True, prompt_result=scores))
    assert (event.new_token_ids, event.prompt_result, event.finish_reason) == ([], scores, None)
    rows = tower.scheduler.schedule().rows
    assert [(row.num_new_tokens, row.start) for row in rows] == [(1, 2)]
    assert tower.step(a=[5])[0].finish_reason is STOPPED
    assert tower.slots.num_free == 4


def test_a_late_row_without_numbers_is_overwritten_from_the_token_that_is_computed_again() -> None:
    tower = Tower().given(("a", [7, 7], {"grammar": Words(5, 6)}))
    tower.step(a=RowResult(error="no number", is_late=True))
    assert tower.scrubbed() == [Scrub(0, 1, 64)]
    assert tower.step(a=[5]) == [TokenEvent("a", [5], None)]


def test_a_row_whose_grammar_is_not_ready_sits_out_and_can_be_ended() -> None:
    grammar = Words(5, 6)
    tower = Tower().given(("a", [7], {"grammar": grammar}), ("b", [7]))
    tower.step(a=[5])
    grammar.is_ready = False
    assert tower.begun() == {"b": 1}
    assert tower.scheduler.abort("a") == TokenEvent("a", [], ABORT)
    tower.scheduler.check()
    assert tower.slots.num_free == 3


def test_a_request_that_ended_while_it_was_late_leaves_its_slot() -> None:
    tower = Tower().given(("a", [7], {"grammar": Words(5, 6)})).begin_steps(1)
    tower.scheduler.abort("a")
    assert tower.landed(a=RowResult([9], is_late=True)) == []
    assert tower.slots.num_free == 4


# Steps that are planned while the tokens of earlier ones are still being computed


def test_a_row_goes_on_with_a_token_that_is_not_known_yet() -> None:
    tower = Tower().given(("a", 7))
    a = tower.requests["a"]
    assert [tower.begun() for _ in range(3)] == [{"a": 7}, {"a": 1}, {"a": 1}]
    assert (a.num_computed, a.num_pending, a.num_tokens, a.token_ids[7:]) == (9, 3, 10, [])
    assert [tower.landed(a=[token]) for token in (4, 5, 6)] == [[TokenEvent("a", [token], None)] for token in (4, 5, 6)]
    assert (a.num_computed, a.num_pending, a.num_tokens, a.token_ids[7:]) == (9, 0, 10, [4, 5, 6])


def test_the_chunks_of_a_prompt_follow_each_other_without_waiting_and_newcomers_join() -> None:
    tower = Tower(budget=8).given(("a", 20))
    assert [tower.begun() for _ in range(4)] == [{"a": 8}, {"a": 8}, {"a": 4}, {"a": 1}]
    tower.add("b", 5)
    assert tower.begun() == {"a": 1, "b": 5}
    assert [tower.landed() for _ in range(4)] == [[], [], *([[TokenEvent("a", [WORD], None)]] * 2)]
    assert tower.begun() == {"a": 1, "b": 1}


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3])
def test_the_end_of_a_length_is_known_ahead_and_nothing_is_planned_past_it(max_tokens: int) -> None:
    num_launches = max(max_tokens, 1)  # a prompt may be all that is wanted
    tower = Tower().given(("a", 3, max_tokens))
    assert all(tower.begun() for _ in range(num_launches))
    assert tower.scheduler.schedule().rows == ()
    events = [event for _ in range(num_launches) for event in tower.landed()]
    assert [event.finish_reason for event in events] == [None] * (num_launches - 1) + [LENGTH]
    assert sum(len(event.new_token_ids) for event in events) == max_tokens
    assert tower.slots.num_free == 4


def test_the_surplus_of_a_row_that_had_ended_is_dropped_and_its_slot_comes_back_when_nothing_writes_to_it() -> None:
    tower = Tower(num_slots=1, budget=8).given(("a", 3), ("b", 3)).begin_steps(3)
    a = tower.requests["a"]
    assert tower.landed(a=[EOS]) == [TokenEvent("a", [EOS], STOPPED, has_end_token=True)]
    for _ in range(2):
        assert (tower.slots.num_free, a.slot, a.num_computed) == (0, 0, 3)
        assert tower.scheduler.schedule().rows == (), "the slot is still written to"
        assert tower.landed(a=[5]) == []
    assert (tower.slots.num_free, a.slot, a.token_ids[3:]) == (1, None, [EOS])
    assert tower.begun() == {"b": 3}


def test_a_row_under_a_grammar_goes_on_with_a_token_that_is_not_known_yet() -> None:
    tower = Tower(budget=8, max_steps=4).given(("b", 2), ("a", 8, {"grammar": Words(5, 6, 7)}))
    assert [tower.begun() for _ in range(4)] == [{"b": 2, "a": 6}, {"b": 1, "a": 2}, *[{"b": 1, "a": 1}] * 2]
    assert {plan.num_steps for plan in tower.in_flight} == {1}
    assert [event.new_token_ids for word in ([], [5], [6]) for event in tower.landed(a=word)] == [
        *([WORD], [WORD], [5], [WORD], [6])
    ]
    assert tower.landed(a=[7])[1] == TokenEvent("a", [7], STOPPED)


def test_a_row_under_a_slow_grammar_sits_out_once_its_prompt_is_computed_and_others_go_on() -> None:
    grammar = Words(WORD, WORD, WORD)
    grammar.keeps_pace = False
    tower = Tower(budget=8).given(("b", 2), ("a", 8, {"grammar": grammar}))
    assert [tower.begun() for _ in range(3)] == [{"b": 2, "a": 6}, {"b": 1, "a": 2}, {"b": 1}]
    tower.landed()
    assert tower.begun() == {"b": 1}
    tower.landed()
    assert tower.begun() == {"b": 1, "a": 1}


def test_rows_in_flight_that_go_on_from_one_that_was_late_are_void_and_it_is_computed_again_after_them() -> None:
    tower = Tower().given(("a", [7], {"grammar": Words(5, 6)}), ("b", [7])).begin_steps(3)
    late = RowResult([9], is_late=True)
    for begun in ({"b": 1}, {"b": 1}, {"b": 1, "a": 1}):
        tower.landed(a=late)
        assert tower.begun() == begun
    request = tower.requests["a"]
    assert (request.token_ids, request.num_computed, request.num_pending) == ([7], 1, 1)
    assert [tower.landed() for _ in range(2)] == [[TokenEvent("b", [WORD], None)]] * 2
    assert tower.landed(a=[5])[0] == TokenEvent("a", [5], None)


@pytest.mark.parametrize(("max_seq_len", "max_tokens", "num_steps"), [(64, 8, [1, 4, 3]), (9, 6, [1, 4, 1])])
def test_steps_of_a_launch_ahead_are_bounded_by_what_is_wanted_and_by_the_room_in_the_slot(
    max_seq_len: int, max_tokens: int, num_steps: list[int]
) -> None:
    tower = Tower(max_steps=4, max_seq_len=max_seq_len).given(("a", 3, max_tokens), ("b", 4, 1))
    assert [tower.launch().num_steps for _ in range(3)] == num_steps
    assert tower.scheduler.schedule().rows == ()
    assert [len(tower.landed()[0].new_token_ids) for _ in range(3)] == num_steps
    assert tower.slots.num_free == 4


def test_min_tokens_count_from_the_token_that_is_looked_at() -> None:
    tower = Tower().given(("a", 3, {"min_tokens": 2})).begin_steps(3)
    assert tower.landed(a=[EOS]) == [TokenEvent("a", [EOS], None)]
    tower.landed(a=[5])
    assert tower.landed(a=[EOS])[0].finish_reason is STOPPED
    assert tower.requests["a"].token_ids[3:] == [EOS, 5, EOS]


def test_an_error_that_is_found_late_ends_its_row_and_drops_its_surplus() -> None:
    tower = Tower().given(("a", 3), ("b", 3)).begin_steps(2)
    bad = RowResult(error="no number")
    assert tower.landed(a=bad) == [TokenEvent("a", [], ABORT, error="no number"), TokenEvent("b", [WORD], None)]
    assert tower.landed(a=bad) == [TokenEvent("b", [WORD], None)]
    assert tower.slots.num_free == 3


def test_an_abort_is_told_at_once_and_its_slot_comes_back_when_its_launches_have_landed() -> None:
    tower = Tower(num_slots=1).given(("a", 3), ("waiting", 3)).begin_steps(2)
    told = [tower.scheduler.abort(name) for name in ("a", "waiting", "a", "waiting", "unknown")]
    assert told == [TokenEvent("a", [], ABORT), TokenEvent("waiting", [], ABORT), None, None, None]
    tower.scheduler.check()
    assert (tower.scheduler.has_work, tower.slots.num_free) == (False, 0)
    assert [(tower.landed(), tower.slots.num_free) for _ in range(2)] == [([], 0), ([], 1)]


def test_a_name_may_come_back_while_the_one_who_had_it_is_leaving() -> None:
    tower = Tower().given(("a", 3)).begin_steps(1)
    tower.scheduler.abort("a")
    tower.add("a", 5)
    assert tower.begun() == {"a": 5}
    assert [tower.landed(), tower.landed(a=[4])] == [[], [TokenEvent("a", [4], None)]]


def test_launches_that_are_abandoned_leave_nothing_behind() -> None:
    tower = Tower(budget=8).given(*((name, 6) for name in "abcde")).begin_steps(2)
    tower.scheduler.abort("a")
    tower.scheduler.abandon()
    tower.scheduler.check()
    assert [name for name, each in tower.requests.items() if each.finish_reason is ABORT] == ["a", "b", "c"]
    assert (tower.slots.num_free, tower.scheduler.num_running, tower.scheduler.num_waiting) == (4, 0, 2)
    assert tower.begun() == {"d": 6, "e": 2}


def test_slots_that_were_claimed_before_are_none_of_its_business() -> None:
    slots = SlotLedger(3, 16)
    slots.claim_slot(2)
    scheduler = Scheduler(slots, max_num_batched_tokens=2, max_steps_per_launch=1, max_queue_size=8, policy=NO_REUSE)
    for name in "abc":
        scheduler.add(Request(name, [1], SamplingParams(), 5, 0))
    scheduler.check()
    assert [row.slot for row in scheduler.schedule().rows] == [0, 1]
