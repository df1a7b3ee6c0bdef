"""Models with recurrent states: how much of a prompt is reused, which states that takes, and which are kept.

Slots and states hold token ids, and the fake engine asserts at every launch that a state has taken its slot's tokens.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.plan import MOST_ENDS, RowResult, SlotCopy, StateCopy, StateScrub
from chairlift.scheduler import Policy, Speculation
from tests.scheduler.fake_engine import EOS, NO_REUSE, ROW_BYTES, WORD, FakeEngine, Plan, Words, beside, prefill

SYSTEM = list(range(100, 300))  # two hundred tokens that prompts have in common
USER = list(range(300, 340))
TAIL = 8


def make(num_slots: int = 4, budget: int = 512, num_snapshots: int = 16, **settings: Any) -> FakeEngine:
    return FakeEngine(num_slots, budget, num_snapshots=num_snapshots, **{"max_seq_len": 4096, **settings})


def tokens_of_states(engine: FakeEngine) -> list[int]:
    """Returns how many tokens the kept states have taken."""
    assert engine.slots.states is not None
    return sorted(engine.slots.states.snapshots._lengths.values())


# What a prompt goes on from


@pytest.mark.parametrize("num_snapshots", [0, 16])
def test_the_next_turn_goes_on_in_its_slot_with_its_state(num_snapshots: int) -> None:
    engine = make(num_snapshots=num_snapshots)
    first = engine.serve("first", SYSTEM, 30)
    second = engine.serve("second", [*first.token_ids, *USER], 5)
    assert (second.num_cached_tokens, engine.slots.num_free) == (229, 3)  # all that was computed


@pytest.mark.parametrize("length", [64, 65, 100, 200])
def test_what_prompts_have_in_common_is_cached_from_the_third_on(length: int) -> None:
    engine = make()
    cached = [engine.serve(name, [*SYSTEM[:length], ord(name), *USER], 3).num_cached_tokens for name in "abcd"]
    assert cached == [0, 0, length, length]
    states = engine.scheduler.placement.states
    assert states is not None
    assert [states.take_distances(), states.take_distances()] == [[length, 0, 0], []]
    assert states.snapshot_bytes == len(tokens_of_states(engine)) * ROW_BYTES


@given(
    length=st.integers(64, 3000),
    rests=st.lists(st.integers(1, 1500), min_size=3, max_size=6),
    budget=st.integers(16, 2048),
    num_said=st.integers(1, 40),
)
def test_a_common_beginning_of_any_length_is_cached_for_every_third_request(
    length: int, rests: list[int], budget: int, num_said: int
) -> None:
    """Whatever follows it, how long answers are, and how prompts are divided."""
    engine, common = make(budget=budget, max_seq_len=8192), list(range(10_000, 10_000 + length))
    prompts = [
        [*common, *range(20_000 * (number + 2), 20_000 * (number + 2) + rest)] for number, rest in enumerate(rests)
    ]
    cached = [engine.serve(str(number), prompt, num_said).num_cached_tokens for number, prompt in enumerate(prompts)]
    assert all(length >= each >= 0.9 * length for each in cached[2:])


def test_a_prompt_leaves_a_state_where_the_next_turn_may_part_from_it() -> None:
    engine = make()
    engine.serve("first", [*SYSTEM, 1, 2, 3, 4], 3)  # the last four are not in the next turn
    assert tokens_of_states(engine) == [204 - TAIL]
    assert engine.serve("second", [*SYSTEM, *USER], 3).num_cached_tokens == 204 - TAIL


def test_a_short_way_is_computed_again_without_a_state_of_its_own() -> None:
    engine = make()
    for name in "abc":
        engine.serve(name, [*SYSTEM[:60], ord(name), *USER[:2]], 3)
    assert tokens_of_states(engine) == []
    engine.serve("d", SYSTEM[:108], 3)
    assert tokens_of_states(engine) == [102]
    assert engine.serve("e", [*SYSTEM[:107], 7, *USER], 3).num_cached_tokens == 102
    assert tokens_of_states(engine) == [102]  # five of 107 are no reason


def test_a_long_prompt_leaves_states_on_its_way() -> None:
    engine, prompt = make(budget=600), list(range(3000))
    engine.serve("a", prompt, 1)
    assert tokens_of_states(engine) == [1200, 2400, 2992]
    assert engine.serve("b", [*prompt[:2500], 7], 1).num_cached_tokens == 2400


def test_a_slot_is_copied_with_a_state_of_any_row() -> None:
    engine = make()
    engine.serve("a", [*SYSTEM, *range(400, 500)], 3)
    engine.play(("b", [*SYSTEM, *USER]), prefill(b=200), prefill(b=40))  # the junction is the end of a chunk
    c = engine.add("c", [*SYSTEM, 2])
    assert engine.step() == beside("b", ("c", 1), copies=[SlotCopy(0, 2, 200)])
    assert c.num_cached_tokens == 200


def test_a_slot_that_is_taken_for_a_prompt_is_its_state_too() -> None:
    """The least recently used slot stands where the prompt parts, but another has longer tokens."""
    engine = make(num_slots=2, num_snapshots=0)
    longer = engine.serve("longer", [*SYSTEM, *range(400, 500)], 3)
    engine.serve("shorter", SYSTEM, 1)
    engine.serve("longer still", [*longer.token_ids, 7], 1)
    assert engine.slots.states is not None
    assert (list(engine.slots.warm), engine.slots.states.position(1)) == ([1, 0], 192)
    new = engine.add("new", [*SYSTEM, *range(400, 420), 7], 1)
    assert engine.step() == Plan([("new", 29)], copies=[SlotCopy(0, 1, 192)])
    assert new.num_cached_tokens == 192


def test_a_state_that_a_conversation_moves_on_from_is_kept() -> None:
    engine = make()
    first = engine.serve("first", SYSTEM, 100)
    turns = [engine.serve(name, [*first.token_ids, ord(name)], 80) for name in "abc"]
    assert [each.num_cached_tokens for each in turns] == [299, 299, 299]


# Leaders and followers


@pytest.mark.parametrize("num_snapshots", [0, 16])
def test_forks_of_a_prompt_compute_its_tail_only(num_snapshots: int) -> None:
    engine = make(num_snapshots=num_snapshots).given(*((name, SYSTEM) for name in "abc"))
    copies = [SlotCopy(0, 1, 192), SlotCopy(0, 2, 192)]
    engine.play(prefill(a=200), Plan([("a", 1), ("b", 8), ("c", 8)], 1, copies=copies)).run()
    assert [engine.requests[name].num_cached_tokens for name in "abc"] == [0, 192, 192]


@pytest.mark.parametrize("num_snapshots", [0, 1, 16])
def test_a_leader_ends_its_chunk_where_a_follower_parts_from_it(num_snapshots: int) -> None:
    engine = make(num_snapshots=num_snapshots).given(("a", SYSTEM), ("b", [*SYSTEM[:150], *USER]))
    engine.play(prefill(a=150), prefill(a=50, b=40, copies=[SlotCopy(0, 1, 150)]))
    assert engine.requests["b"].num_cached_tokens == 150


def test_who_waits_in_vain_computes_all_that_is_not_known_to_be_sound() -> None:
    engine = make(budget=64).given(("a", SYSTEM), ("b", [*SYSTEM[:150], *USER]))
    engine.play(prefill(a=64), prefill(a=64), "a", prefill(b=64)).run()
    assert engine.requests["b"].num_cached_tokens == 0


# What may be taken back


def test_a_guess_that_was_wrong_leaves_the_state_that_its_right_part_leads_to() -> None:
    answer = [[50, 51, 52, 53, 60 + number % 3] for number in range(20)]
    engine = make(speculation=Speculation(4))
    request = engine.serve("a", SYSTEM, 100, answer=[token for part in answer for token in part])
    assert 0 < request.num_accepted < request.num_drafted
    again = engine.serve("b", [*request.token_ids, *USER], 5)
    assert again.num_cached_tokens == 299


@pytest.mark.parametrize("num_late", [1, 3])
def test_a_row_whose_mask_was_late_computes_its_token_again(num_late: int) -> None:
    engine = make()
    engine.add("a", SYSTEM, 5, grammar=Words(*[WORD] * 5))
    for _ in range(5):
        for _ in range(num_late):
            plan = engine.launch()
            engine._results.clear()
            engine.land([RowResult(is_late=True) for _ in plan.rows])
            del engine._said["a"][-1:]
        engine.step()
    assert engine.requests["a"].token_ids == [*SYSTEM, *[WORD] * 5]
    assert engine.requests["a"].finish_reason == "stop"


@pytest.mark.parametrize("num_said", [0, 1, 2, 3, 4, 9])
@pytest.mark.parametrize(("max_steps", "num_ahead"), [(1, 1), (4, 0), (4, 1), (3, 2)])
def test_a_state_stops_at_the_end_token_whatever_was_launched_beyond(
    num_said: int, max_steps: int, num_ahead: int
) -> None:
    engine = make(max_steps=max_steps, num_ahead=num_ahead)
    first = engine.serve("a", SYSTEM, 100, answer=[*[WORD] * num_said, EOS])
    engine.run()  # what was launched beyond
    assert engine.slots.warm == {0: 200 + num_said}
    second = engine.serve("b", [*first.token_ids, *USER], 1)
    assert second.num_cached_tokens == 200 + num_said


@pytest.mark.parametrize("num_said", [1, 5, 6, 7])
def test_a_state_stops_at_the_last_token_that_was_asked_for(num_said: int) -> None:
    engine = make(max_steps=4, num_ahead=1)
    first = engine.serve("a", SYSTEM, num_said)
    engine.run()
    assert engine.serve("b", [*first.token_ids, *USER], 1).num_cached_tokens == 199 + num_said


def test_a_state_that_went_beyond_the_end_is_not_used() -> None:
    """There are more end tokens than a launch notices."""
    engine = make(max_steps=4)
    first = engine.serve(
        "a", SYSTEM, 100, answer=[WORD, WORD, 1000], stop_token_ids=list(range(1000, 1000 + MOST_ENDS))
    )
    assert engine.slots.warm == {0: 202}
    second = engine.serve("b", [*first.token_ids, *USER], 1)
    assert second.num_cached_tokens == 192  # where the prompt left one


@pytest.mark.parametrize(("max_steps", "num_ahead"), [(1, 0), (4, 0), (4, 1), (1, 2)])
@pytest.mark.parametrize("num_behind", [0, 1, 5, 11])
def test_an_answer_that_ends_behind_its_newest_token_leaves_a_state_near_its_end(
    max_steps: int, num_ahead: int, num_behind: int
) -> None:
    engine = make(max_steps=max_steps, num_ahead=num_ahead)
    prompt, answer = list(range(5000, 7000)), list(range(8000, 8200))
    request = engine.add("a", prompt, 200, answer=answer, text_may_end_early=True)
    while len(request.token_ids) < 2100:
        engine.step()
    engine.abort("a")
    engine.run()
    kept = request.token_ids[: len(request.token_ids) - num_behind]
    second = engine.serve("b", [*kept, *USER], 1)
    assert 0.99 * len(kept) <= second.num_cached_tokens <= len(kept)


def test_states_behind_answers_that_may_end_early_are_few_and_evicted_first_if_they_did_not() -> None:
    engine = make(num_slots=8, num_snapshots=8)
    request = engine.add("a", SYSTEM, 90, answer=list(range(8000, 8090)), text_may_end_early=True)
    engine.steps(60)
    states = engine.scheduler.placement.states
    assert states is not None
    assert (tokens_of_states(engine), states.snapshot_bytes) == ([192], 4 * ROW_BYTES)
    engine.finish("a")
    assert tokens_of_states(engine) == [192, 272, 280, 288]
    for number in range(6):
        engine.serve(f"other {number}", list(range(1000 * number, 1000 * number + 108)), 1)
    assert tokens_of_states(engine) == [102] * 6 + [192, 288]
    assert engine.serve("b", [*request.token_ids, *USER], 1).num_cached_tokens == 289


def test_states_behind_answers_take_half_of_the_room_at_most() -> None:
    engine = make(num_snapshots=3)
    for name in "ab":
        engine.add(name, [ord(name), *SYSTEM], 90, text_may_end_early=True)
    engine.steps(60)
    states = engine.scheduler.placement.states
    assert states is not None
    assert (len(tokens_of_states(engine)), states.snapshot_bytes) == (2, 3 * ROW_BYTES)
    engine.abort("b")
    engine.abort("a")
    assert len(tokens_of_states(engine)) == 3


# Limits


def test_without_room_for_states_the_live_ones_are_still_used() -> None:
    engine = make(num_snapshots=0)
    cached = [engine.serve(name, [*SYSTEM, ord(name), *USER], 3).num_cached_tokens for name in "abc"]
    assert (cached, tokens_of_states(engine)) == ([0, 0, 0], [])


def test_without_reuse_nothing_is_kept_and_nothing_is_tentative() -> None:
    engine = make(policy=NO_REUSE).play(("a", SYSTEM), prefill(a=200))
    assert engine.slots.states is not None
    assert (engine.slots.states.position(0), tokens_of_states(engine)) == (200, [])
    engine.run()


def test_a_preempted_request_goes_on_where_it_was() -> None:
    engine = make(num_slots=2, max_num_running=1, policy=Policy(preempt_after=1))
    low = engine.add("low", SYSTEM, 20, priority=1)
    engine.steps(5)
    engine.serve("high", USER, 1)
    assert low.num_preemptions == 1
    assert engine.step() == prefill(low=1)  # nothing is computed again
    engine.finish("low")
    assert low.num_output_tokens == 20


def test_after_a_rest_the_states_of_tokens_that_are_still_held_are_left() -> None:
    engine = make(max_seq_len=4096, cache_tokens=4096)  # a tenth of which may stay
    engine.serve("older", list(range(1000, 1500)), 1)
    engine.serve("newer", SYSTEM, 1)
    assert tokens_of_states(engine) == [192, 492]
    engine.scheduler.placement.trim()
    assert (engine.slots.warm, tokens_of_states(engine)) == ({1: 200}, [192])
    assert [job for job in engine.slots.owed if isinstance(job, StateScrub)] == [StateScrub(0), StateScrub(4)]
    assert engine.serve("again", [*SYSTEM, 7], 1).num_cached_tokens == 200
    engine.scheduler.placement.trim()
    assert not any(isinstance(job, StateScrub) for job in engine.slots.owed)


# Who does not share


def test_under_another_salt_no_state_is_found() -> None:
    engine = make()
    for name in "ab":
        engine.serve(name, [*SYSTEM, ord(name)], 1, salt="x")
    assert engine.serve("c", [*SYSTEM, 7], 1, salt="y").num_cached_tokens == 0
    assert engine.serve("d", [*SYSTEM, 7], 1, salt="x").num_cached_tokens == 200


def test_a_row_that_fails_takes_the_states_with_it_that_it_went_on_from_and_left() -> None:
    engine = make()
    for name in "ab":
        engine.serve(name, [*SYSTEM, *range(ord(name), ord(name) + 90)], 1)
    engine.serve("unlike", list(range(500, 600)), 1)
    assert tokens_of_states(engine) == [94, 200, 282, 282]
    engine.failing.add("bad")
    bad = engine.serve("bad", [*SYSTEM, *range(500, 600)], 1)
    assert (bad.num_cached_tokens, bad.error) == (200, "no number")
    assert tokens_of_states(engine) == [94, 282, 282]


def test_who_leaves_before_a_token_proves_them_sound_leaves_no_states() -> None:
    engine = make(budget=1100).play(("a", list(range(2500))), prefill(a=1100))
    assert tokens_of_states(engine) == [1100]
    engine.abort("a")
    assert tokens_of_states(engine) == []


def test_who_leaves_before_a_step_failed_leaves_no_state_that_it_moved() -> None:
    engine = make()
    engine.serve("a", SYSTEM, 1)
    engine.add("b", SYSTEM)
    engine.launch()
    assert engine.slots.states is not None
    assert engine.slots.states.position(0) == 199
    engine.abort("b")
    engine._results.clear()
    engine.land([RowResult(error="no memory", has_bad_surplus=True)])
    assert (engine.slots.warm, engine.slots.states.position(0)) == ({0: 199}, 0)
    assert engine.serve("c", [*SYSTEM, 7], 1).num_cached_tokens == 192


def test_after_a_reset_no_state_is_found_and_those_who_run_leave_none() -> None:
    engine = make(budget=64)
    engine.serve("a", SYSTEM, 1)
    engine.add("b", [*SYSTEM[:20], *USER, *range(500, 600)], 3)
    engine.step()
    engine.scheduler.reset_prefix_cache()
    engine.run()
    assert tokens_of_states(engine) == []
    assert engine.serve("c", SYSTEM, 1).num_cached_tokens == 0


def test_after_a_failed_step_no_state_is_left_that_a_repeated_copy_may_spoil() -> None:
    engine = make().given(("a", SYSTEM))
    engine.step()
    engine.add("b", [*SYSTEM, 7])
    engine.scheduler.schedule()
    assert StateCopy(4, 1) in engine.slots.owed
    engine.scheduler.abort("b")
    engine.crash()
    assert tokens_of_states(engine) == []
    assert engine.serve("c", [*SYSTEM, 7], 1).num_cached_tokens == 0
