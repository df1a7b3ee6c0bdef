"""Steps that are planned while the tokens of earlier ones are still being computed: traces with literal plans."""

import pytest

from chairlift.cache.ledger import SlotLedger
from chairlift.params import FinishReason, SamplingParams
from chairlift.scheduler import Request, RowResult, Scheduler, TokenEvent
from tests.scheduler.fake_engine import EOS, NO_REUSE, WORD, Driver, Words


class Tower(Driver):
    """Plans as names and numbers of tokens, and results by name."""

    def begun(self) -> dict[str, int]:
        return {row.request.request_id: row.num_new_tokens for row in self.launch().rows}

    def landed(self, **answers: list[int] | RowResult) -> list[TokenEvent]:
        """What was sampled for whom in the oldest launch, or WORD in every step."""
        plan = self.in_flight[0]
        results: list[RowResult] = []
        for row in plan.rows:
            said = answers.get(row.request.request_id, [WORD] * plan.num_steps) if row.is_sampled else []
            results.append(said if isinstance(said, RowResult) else RowResult(said))
        return self.land(results)


def test_a_row_goes_on_with_a_token_that_is_not_known_yet() -> None:
    tower = Tower()
    a = tower.add("a", 7)
    assert [tower.begun() for _ in range(3)] == [{"a": 7}, {"a": 1}, {"a": 1}]
    assert (a.num_computed, a.num_pending, a.num_tokens, a.token_ids[7:]) == (9, 3, 10, [])
    assert [tower.landed(a=[token]) for token in (4, 5, 6)] == [[TokenEvent("a", [token], None)] for token in (4, 5, 6)]
    assert (a.num_computed, a.num_pending, a.num_tokens, a.token_ids[7:]) == (9, 0, 10, [4, 5, 6])


def test_the_chunks_of_a_prompt_follow_each_other_without_waiting() -> None:
    tower = Tower(budget=8)
    tower.add("a", 20)
    assert [tower.begun() for _ in range(4)] == [{"a": 8}, {"a": 8}, {"a": 4}, {"a": 1}]
    assert [tower.landed() for _ in range(4)] == [[], [], *([[TokenEvent("a", [WORD], None)]] * 2)]


def test_newcomers_join_while_others_are_in_flight() -> None:
    tower = Tower()
    tower.add("a", 3)
    tower.launch()
    tower.add("b", 5)
    assert tower.begun() == {"a": 1, "b": 5}
    tower.landed()
    assert tower.begun() == {"a": 1, "b": 1}


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3])
def test_the_end_of_a_length_is_known_ahead_and_nothing_is_planned_past_it(max_tokens: int) -> None:
    tower, num_launches = Tower(), max(max_tokens, 1)  # a prompt may be all that is wanted
    tower.add("a", 3, max_tokens=max_tokens)
    for _ in range(num_launches):
        assert tower.begun()
    assert tower.scheduler.schedule().rows == ()
    events = [event for _ in range(num_launches) for event in tower.landed()]
    assert [event.finish_reason for event in events] == [None] * (num_launches - 1) + [FinishReason.LENGTH]
    assert sum(len(event.new_token_ids) for event in events) == max_tokens
    assert tower.slots.num_free == 4


def test_the_surplus_of_a_row_that_had_ended_is_dropped_and_its_slot_comes_back_when_nothing_writes_to_it() -> None:
    tower = Tower(num_slots=1, budget=8)
    a = tower.add("a", 3)
    tower.add("b", 3)
    for _ in range(3):
        tower.launch()
    assert tower.landed(a=[EOS]) == [TokenEvent("a", [EOS], FinishReason.STOP, has_end_token=True)]
    for _ in range(2):
        assert (tower.slots.num_free, a.slot, a.num_computed) == (0, 0, 3)
        assert tower.scheduler.schedule().rows == (), "the slot is still written to"
        assert tower.landed(a=[5]) == []
    assert (tower.slots.num_free, a.slot, a.token_ids[3:]) == (1, None, [EOS])
    assert tower.begun() == {"b": 3}


def test_a_row_that_shows_its_tokens_to_a_grammar_sits_out_and_others_go_on() -> None:
    tower = Tower()
    tower.add("a", 2, grammar=Words(WORD, WORD, WORD))
    tower.add("b", 2)
    assert [tower.begun() for _ in range(3)] == [{"a": 2, "b": 2}, {"b": 1}, {"b": 1}]
    tower.landed()
    assert tower.begun() == {"a": 1, "b": 1}


def test_a_chunk_of_a_prompt_with_a_grammar_has_nothing_to_wait_for() -> None:
    tower = Tower(budget=4)
    tower.add("a", 7, grammar=Words(WORD, WORD, WORD))
    assert [tower.begun() for _ in range(3)] == [{"a": 4}, {"a": 3}, {}]


@pytest.mark.parametrize(("max_seq_len", "max_tokens", "num_steps"), [(64, 8, [1, 4, 3]), (9, 6, [1, 4, 1])])
def test_steps_of_a_launch_ahead_are_bounded_by_what_is_wanted_and_by_the_room_in_the_slot(
    max_seq_len: int, max_tokens: int, num_steps: list[int]
) -> None:
    tower = Tower(max_steps=4, max_seq_len=max_seq_len)
    tower.add("a", 3, max_tokens)
    tower.add("b", 4, 1)
    assert [tower.launch().num_steps for _ in range(3)] == num_steps
    assert tower.scheduler.schedule().rows == ()
    assert [len(tower.landed()[0].new_token_ids) for _ in range(3)] == num_steps
    assert tower.slots.num_free == 4


def test_min_tokens_count_from_the_token_that_is_looked_at() -> None:
    tower = Tower()
    a = tower.add("a", 3, min_tokens=2)
    for _ in range(3):
        tower.launch()
    assert tower.landed(a=[EOS]) == [TokenEvent("a", [EOS], None)]
    tower.landed(a=[5])
    assert tower.landed(a=[EOS])[0].finish_reason is FinishReason.STOP
    assert a.token_ids[3:] == [EOS, 5, EOS]


def test_an_error_that_is_found_late_ends_its_row_and_drops_its_surplus() -> None:
    tower = Tower()
    tower.add("a", 3)
    tower.add("b", 3)
    tower.launch()
    tower.launch()
    first, second = tower.landed(a=RowResult(error="no number"), b=[5])
    assert (first, second) == (TokenEvent("a", [], FinishReason.ABORT, error="no number"), TokenEvent("b", [5], None))
    assert tower.landed(a=RowResult(error="no number"), b=[6]) == [TokenEvent("b", [6], None)]
    assert tower.slots.num_free == 3


def test_an_abort_is_told_at_once_and_its_slot_comes_back_when_its_launches_have_landed() -> None:
    tower = Tower(num_slots=1)
    tower.add("a", 3)
    tower.launch()
    tower.launch()
    assert tower.scheduler.abort("a") == TokenEvent("a", [], FinishReason.ABORT)
    assert tower.scheduler.abort("a") is None
    tower.scheduler.check()
    assert (tower.scheduler.has_work, tower.slots.num_free) == (False, 0)
    assert [tower.landed(), tower.slots.num_free] == [[], 0]
    assert [tower.landed(), tower.slots.num_free] == [[], 1]


def test_a_name_may_come_back_while_the_one_who_had_it_is_leaving() -> None:
    tower = Tower()
    tower.add("a", 3)
    tower.launch()
    tower.scheduler.abort("a")
    tower.add("a", 5)
    assert tower.begun() == {"a": 5}
    assert tower.landed() == []
    assert tower.landed(a=[4]) == [TokenEvent("a", [4], None)]


def test_launches_that_are_abandoned_leave_nothing_behind() -> None:
    tower = Tower(budget=8)
    waiting = [tower.add(name, 6) for name in "abcde"]
    tower.launch()
    tower.launch()
    tower.scheduler.abort("a")
    tower.scheduler.abandon()
    tower.scheduler.check()
    gone = [request.request_id for request in waiting if request.finish_reason is FinishReason.ABORT]
    assert gone == ["a", "b", "c"]
    assert (tower.slots.num_free, tower.scheduler.num_running, tower.scheduler.num_waiting) == (4, 0, 2)
    assert tower.begun() == {"d": 6, "e": 2}


def test_a_plan_that_fails_before_it_begins_is_abandoned_alike() -> None:
    tower = Tower()
    tower.add("a", 3)
    tower.scheduler.schedule()
    tower.slots.reserve([0], [3])
    tower.scheduler.abandon()
    tower.scheduler.check()
    assert (tower.slots.num_free, tower.scheduler.has_work) == (4, False)


def test_slots_that_were_claimed_before_are_none_of_its_business() -> None:
    slots = SlotLedger(3, 16)
    slots.claim_slot(2)
    scheduler = Scheduler(slots, max_num_batched_tokens=2, max_steps_per_launch=1, max_queue_size=8, policy=NO_REUSE)
    for name in "abc":
        scheduler.add(Request(name, [1], SamplingParams(), 5, 0))
    scheduler.check()
    assert [row.request.slot for row in scheduler.schedule().rows] == [0, 1]
