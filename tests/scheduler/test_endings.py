"""How sequences end beside end tokens and lengths: grammars, errors, prompts that are only computed."""

from dataclasses import replace
from typing import Any

import pytest

from chairlift.cache.budget import Scrub
from chairlift.params import FinishReason, Logprob
from chairlift.scheduler import Request, RowResult, TokenEvent
from tests.scheduler.fake_engine import Driver, Words

EOS = 0


class World(Driver):
    """Results said by hand, row by row."""

    def step(self, *results: RowResult) -> list[TokenEvent]:
        self.launch()
        return self.land(results)

    def scrubbed(self) -> list[Scrub]:
        """What the ledger owes, which from now on it does not."""
        jobs = list(self.slots.owed)
        self.slots.owed.clear()
        return [job for job in jobs if isinstance(job, Scrub)]


def make(*args: Any, **kwargs: Any) -> Request:
    return replace(Driver().make(*args, **kwargs), eos_token_ids=frozenset({EOS}))


def world_of(*requests: Request, num_steps: int = 1, budget: int = 64) -> World:
    world = World(budget=budget, max_steps=num_steps)
    world.take(*requests)
    return world


@pytest.mark.parametrize(
    ("params", "sampled", "finish_reason"),
    [
        ({"grammar": Words(5, 6)}, [5, 6], FinishReason.STOP),
        ({"grammar": Words(5, 6, 6)}, [5, EOS], FinishReason.STOP),  # which it allows
        # Neither of these puts off the end of a grammar.
        ({"grammar": Words(5, 6), "min_tokens": 9, "ignore_eos": True}, [EOS], FinishReason.STOP),
        ({"grammar": Words(5), "max_tokens": 1}, [5], FinishReason.STOP),
        ({"grammar": Words(5, 6), "max_tokens": 1}, [5], FinishReason.LENGTH),
    ],
)
def test_a_text_ends_with_its_grammar(params: dict[str, Any], sampled: list[int], finish_reason: FinishReason) -> None:
    world = world_of(make("a", [7], **params))
    events = [event for token in sampled for event in world.step(RowResult([token]))]
    assert [event.new_token_ids for event in events] == [[token] for token in sampled]
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(sampled) - 1)
    is_end_token = sampled[-1] == EOS  # and no part of the text
    assert (events[-1].finish_reason, events[-1].has_end_token) == (finish_reason, is_end_token)
    assert world.slots.num_free == 4


def test_a_grammar_that_fails_ends_its_request_alone() -> None:
    world = world_of(make("a", [7], grammar=Words(5, 6)), make("b", [7]))
    broken, sound = world.step(RowResult([9]), RowResult([9]))
    assert broken == TokenEvent("a", [9], FinishReason.ABORT, error="the grammar failed: token 9 does not fit")
    assert sound == TokenEvent("b", [9], None)


def test_a_request_whose_grammar_cannot_be_made_ends_alone_and_is_told_in_the_next_step() -> None:
    def fail() -> Words:
        raise RuntimeError("no memory")

    world = world_of(replace(make("a", [7]), new_grammar=fail), make("b", [7]))
    assert world.step(RowResult([9])) == [TokenEvent("b", [9], None)]
    world.scheduler.abort("b")
    assert (world.scheduler.has_work, world.slots.num_free) == (True, 4)
    said = "the request could not be started: no memory"
    assert world.scheduler.expire() == [TokenEvent("a", [], FinishReason.ABORT, error=said)]
    assert (world.scheduler.expire(), world.scheduler.has_work) == ([], False)


def test_while_a_row_has_a_grammar_all_take_one_step_at_a_time() -> None:
    grammar = Words(5, 6, 7)
    world = world_of(make("a", [7], grammar=grammar), make("b", [7]), num_steps=4)
    world.step(RowResult([5]), RowResult([1]))
    assert world.launch().num_steps == 1
    assert world.land([RowResult([6]), RowResult([1])]) == [TokenEvent("a", [6], None), TokenEvent("b", [1], None)]
    grammar.is_ready = False  # it sits out, and the others' launches are as short for it
    assert world.launch().num_steps == 1
    world.land([RowResult([2])])
    grammar.is_ready = True
    assert world.step(RowResult([7]), RowResult([3]))[0].finish_reason is FinishReason.STOP
    assert world.launch().num_steps == 4


def test_an_error_ends_its_row_alone_after_the_tokens_before_it() -> None:
    world = world_of(make("a", [7]), make("b", [7]), num_steps=4)
    world.step(RowResult([1]), RowResult([1]))
    assert world.step(RowResult([2, 3], error="not a number"), RowResult([2, 3, 4, 5])) == [
        TokenEvent("a", [2, 3], FinishReason.ABORT, error="not a number"),
        TokenEvent("b", [2, 3, 4, 5], None),
    ]
    assert (world.slots.num_free, world.scrubbed()) == (3, [Scrub(0, 0, 64)])
    world.take(make("c", [7, 8, 9]))
    (_, event) = world.step(RowResult([1]), RowResult(error="not a number"))
    assert event == TokenEvent("c", [], FinishReason.ABORT, error="not a number")


def test_an_error_in_a_rows_surplus_does_not_count() -> None:
    world = world_of(make("a", [7]), make("b", [7]), num_steps=4)
    world.step(RowResult([1]), RowResult([1]))
    events = world.step(RowResult([EOS], error="late"), RowResult([1] * 4))
    assert [(event.finish_reason, event.error) for event in events] == [(FinishReason.STOP, None), (None, None)]


def test_a_one_token_prompt_with_max_tokens_0_is_a_launch_of_one_step() -> None:
    world = world_of(make("a", [7], max_tokens=0), num_steps=4)
    plan = world.launch()
    assert plan.num_steps == 1
    assert world.land([RowResult([5])]) == [TokenEvent("a", [], FinishReason.LENGTH)]


def test_scores_of_a_prompts_chunks_come_as_they_are_computed() -> None:
    scores = [{8: Logprob(-1.0, 1)}, {9: Logprob(-2.0, 3)}]
    world = world_of(replace(make("a", [7, 8, 9, 10, 11, 12]), prompt_logprobs=0), budget=4)
    assert world.step(RowResult(prompt_logprobs=scores)) == [TokenEvent("a", [], None, prompt_logprobs=scores)]


def test_log_probabilities_of_surplus_tokens_are_dropped_with_them() -> None:
    scores = [{token: Logprob(-1.0, 1)} for token in (3, EOS, 5, 6)]
    world = world_of(make("a", [7], logprobs=0), num_steps=4)
    world.step(RowResult([1], [{1: Logprob(-1.0, 1)}]))
    (event,) = world.step(RowResult([3, EOS, 5, 6], scores))
    assert event.new_token_ids == [3, EOS]
    assert event.logprobs == scores[:2]


@pytest.mark.parametrize(("num_steps", "scrubbed"), [(0, []), (1, [Scrub(0, 0, 64)]), (2, []), (3, [])])
def test_a_slot_given_back_before_a_token_was_sampled_from_it_may_hold_no_numbers(
    num_steps: int, scrubbed: list[Scrub]
) -> None:
    world = world_of(make("a", [7, 8, 9, 10, 11, 12]), budget=4)
    for results in ([RowResult()], [RowResult([1])], [RowResult([1])])[:num_steps]:
        world.step(*results)
    world.scheduler.abort("a")
    assert world.scrubbed() == scrubbed


def test_surplus_that_is_no_number_is_not_left_in_the_slot() -> None:
    world = world_of(make("a", [7]), num_steps=4)
    world.step(RowResult([1]))
    (event,) = world.step(RowResult([3, EOS], error="no number after that"))
    assert (event.finish_reason, event.error) == (FinishReason.STOP, None)
    assert world.scrubbed() == [Scrub(0, 3, 64)]


def test_a_late_row_has_its_newest_token_computed_once_more_and_then_goes_on() -> None:
    world = world_of(make("a", [7], grammar=Words(5, 6)))
    world.step(RowResult([5]))
    (row,) = world.scheduler.schedule().rows
    assert (row.num_new_tokens, row.request.num_computed) == (1, 1)
    assert world.step(RowResult([9], is_late=True)) == []
    assert (row.request.token_ids, row.request.num_computed, row.request.num_pending) == ([7, 5], 1, 0)
    assert world.step(RowResult([6])) == [TokenEvent("a", [6], FinishReason.STOP)]


def test_a_prompt_whose_first_mask_is_late_has_its_last_token_computed_once_more() -> None:
    world = world_of(make("a", [7, 7, 7], grammar=Words(5), max_tokens=1))
    scores = [{7: Logprob(-1.0, 1)}]
    (event,) = world.step(RowResult([9], is_late=True, prompt_logprobs=scores))
    assert (event.new_token_ids, event.prompt_logprobs, event.finish_reason) == ([], scores, None)
    plan = world.scheduler.schedule()
    assert [(row.num_new_tokens, row.request.num_computed) for row in plan.rows] == [(1, 2)]
    assert world.step(RowResult([5]))[0].finish_reason is FinishReason.STOP
    assert world.slots.num_free == 4


def test_a_row_whose_grammar_is_not_ready_sits_out_and_can_be_ended() -> None:
    grammar = Words(5, 6)
    world = world_of(make("a", [7], grammar=grammar), make("b", [7]))
    world.step(RowResult([5]), RowResult([1]))
    grammar.is_ready = False
    assert [row.request.request_id for row in world.scheduler.schedule().rows] == ["b"]
    assert world.scheduler.abort("a") == TokenEvent("a", [], FinishReason.ABORT)
    world.scheduler.check()
    assert world.slots.num_free == 3


def test_a_late_row_without_numbers_is_overwritten_from_the_token_that_is_computed_again() -> None:
    world = world_of(make("a", [7, 7], grammar=Words(5, 6)))
    world.step(RowResult(error="no number", is_late=True))
    assert world.scrubbed() == [Scrub(0, 1, 64)]
    assert world.step(RowResult([5])) == [TokenEvent("a", [5], None)]


def test_a_request_that_ended_while_it_was_late_leaves_its_slot() -> None:
    world = world_of(make("a", [7], grammar=Words(5, 6)))
    world.launch()
    world.scheduler.abort("a")
    assert world.land([RowResult([9], is_late=True)]) == []
    world.scheduler.check()
    assert world.slots.num_free == 4
