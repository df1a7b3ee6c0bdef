"""Which slot a prompt gets and what of it is computed: literal plans, with contents checked at every launch."""

import pytest

from chairlift.cache.budget import Scrub
from chairlift.cache.ledger import SlotCopy
from chairlift.scheduler import Policy
from chairlift.scheduler.placement import Placement
from tests.scheduler.fake_engine import NO_REUSE, WORD, FakeEngine, Plan

SYSTEM = list(range(100, 140))  # forty tokens that prompts have in common
USER = list(range(200, 210))
OTHERS = list(range(300, 400))


def served(engine: FakeEngine, name: str, prompt: list[int], max_tokens: int = 1) -> int:
    """The slot in which a request was served to its end."""
    engine.add(name, prompt, max_tokens)
    engine.step()
    slot = engine.slot_of(name) if max_tokens > 1 else None
    engine.finish(name)
    (warm,) = [slot] if slot is not None else list(engine.slots.warm)[-1:]
    return warm


# Warm slots


LONG = SYSTEM + OTHERS
FOUND: dict[str, tuple[int, list[list[int]], list[int], int, int, list[SlotCopy]]] = {
    "of an equal prompt one token is computed": (4, [USER], USER, 0, 9, []),
    "the longest prefix wins": (4, [SYSTEM[:20] + OTHERS, SYSTEM[:30] + OTHERS], SYSTEM, 2, 30, [SlotCopy(1, 2, 30)]),
    "of a warm slot 64 tokens may be lost": (4, [SYSTEM + OTHERS[:64]], SYSTEM + USER, 0, 40, []),
    "and no more if there is another": (4, [SYSTEM + OTHERS[:65]], SYSTEM + USER, 1, 40, [SlotCopy(0, 1, 40)]),
    "that may be the least recently used": (2, [[5] * 10, LONG], SYSTEM + USER, 0, 40, [SlotCopy(1, 0, 40)]),
    "the only one is taken whatever is lost": (1, [LONG], SYSTEM + USER, 0, 40, []),
}


@pytest.mark.parametrize(
    ("num_slots", "earlier", "prompt", "slot", "num_cached", "copies"), FOUND.values(), ids=FOUND.keys()
)
def test_a_prompt_gets_the_slot_that_has_most_of_it_or_a_copy(
    num_slots: int, earlier: list[list[int]], prompt: list[int], slot: int, num_cached: int, copies: list[SlotCopy]
) -> None:
    engine = FakeEngine(num_slots, budget=256, max_seq_len=256)
    for number, each in enumerate(earlier):
        served(engine, f"earlier {number}", each)
    new = engine.add("new", prompt)
    assert engine.step() == Plan([("new", len(prompt) - num_cached)], copies=copies)
    assert (new.slot, new.num_cached_tokens) == (slot, num_cached)
    assert all(engine.slots.num_valid(copy.source) == len(earlier[-1]) for copy in copies)


def test_a_conversation_goes_on_in_its_own_slot() -> None:
    engine = FakeEngine()
    served(engine, "first", SYSTEM + USER, max_tokens=3)
    answer = engine.requests["first"].token_ids[len(SYSTEM + USER) :]
    second = engine.add("second", [*SYSTEM, *USER, *answer, 7, 8])
    assert engine.step() == Plan([("second", 3)])  # the answer's last token has not been computed before
    assert (second.slot, second.num_cached_tokens) == (0, 52)
    assert engine.slots.num_free == 3


def test_a_prompt_is_found_in_a_running_slot_and_copied() -> None:
    engine = FakeEngine()
    engine.add("a", SYSTEM + USER, max_tokens=20)
    engine.steps(2)
    b = engine.add("b", [*SYSTEM, 1, 2])
    assert engine.step() == Plan([("a", 1), ("b", 2)], decode=1, copies=[SlotCopy(0, 1, 40)])
    assert b.num_cached_tokens == 40


def test_what_a_running_request_generated_is_not_offered_until_it_ends() -> None:
    engine = FakeEngine()
    engine.add("a", USER, max_tokens=5)
    engine.steps(3)
    b = engine.add("b", [*USER, WORD, WORD, 7])
    engine.step()
    assert b.num_cached_tokens == 10


# Equal prompts in flight


def test_equal_prompts_are_computed_once_and_copied() -> None:
    engine = FakeEngine()
    for name in "abc":
        engine.add(name, SYSTEM + USER)
    assert engine.steps(2) == [
        Plan([("a", 50)]),
        Plan([("a", 1), ("b", 1), ("c", 1)], decode=1, copies=[SlotCopy(0, 1, 49), SlotCopy(0, 2, 49)]),
    ]
    assert [engine.requests[name].num_cached_tokens for name in "abc"] == [0, 49, 49]


def test_who_shares_a_prompt_that_is_computed_in_chunks_waits_for_as_much_as_it_shares() -> None:
    engine = FakeEngine(budget=16)
    engine.add("a", SYSTEM + USER)
    engine.add("b", [*SYSTEM[:36], 1, 2])
    assert engine.steps(3) == [
        Plan([("a", 16)]),
        Plan([("a", 16)]),
        Plan([("a", 10), ("b", 6)], copies=[SlotCopy(0, 1, 32)]),  # for the last four it would not pay to wait
    ]


def test_if_the_one_who_computes_leaves_another_one_takes_over_and_the_rest_copy_from_that() -> None:
    engine = FakeEngine(budget=24, max_seq_len=128)
    for name in "abc":
        engine.add(name, list(range(100, 160)))
    assert engine.step() == Plan([("a", 24)])
    engine.abort("a")
    assert engine.steps(3) == [
        Plan([("b", 24)]),
        Plan([("b", 24)]),
        Plan([("b", 12), ("c", 12)], copies=[SlotCopy(0, 1, 48)]),  # the last few are sooner computed than waited for
    ]


def test_a_slot_that_was_filled_in_part_keeps_what_it_had_reused_and_no_more() -> None:
    engine = FakeEngine(budget=16, max_seq_len=256)
    served(engine, "first", SYSTEM)
    engine.add("second", SYSTEM + OTHERS[:40])
    assert engine.step() == Plan([("second", 16)])
    engine.abort("second")
    assert engine.slots.warm == {0: 40}


def test_what_was_copied_from_a_prompt_in_work_is_not_kept_before_a_token_proves_it() -> None:
    engine = FakeEngine(budget=32, max_seq_len=128)
    prompt = list(range(100, 180))
    engine.add("a", prompt)
    engine.step()
    engine.add("b", prompt[:30] + OTHERS[:40])
    assert engine.step() == Plan([("a", 24), ("b", 8)], copies=[SlotCopy(0, 1, 30)])
    engine.scheduler.abort("b")
    assert list(engine.slots.owed) == [Scrub(1, 0, 128)]
    assert engine.slots.warm == {}


def test_a_copy_that_was_planned_is_made_even_if_its_request_leaves_before_the_launch() -> None:
    engine = FakeEngine()
    engine.add("a", SYSTEM + USER)
    engine.steps(2)
    b = engine.add("b", [*SYSTEM, 1, 2])
    engine.scheduler.schedule()
    assert (b.slot, b.num_reused, list(engine.slots.owed)) == (1, 40, [SlotCopy(0, 1, 40)])
    engine.scheduler.abort("b")
    assert engine.slots.warm == {1: 40}
    engine.add("c", [*SYSTEM, 1, 2])
    assert engine.step() == Plan([("a", 1), ("c", 2)], decode=1, copies=[SlotCopy(0, 1, 40), SlotCopy(0, 2, 40)])


@pytest.mark.parametrize(("num_shared", "rows"), [(15, [("a", 16), ("b", 16)]), (16, [("a", 17)])])
def test_from_sixteen_tokens_on_a_prefix_is_waited_for(num_shared: int, rows: list[tuple[str, int]]) -> None:
    engine = FakeEngine()
    engine.add("a", [*SYSTEM[:num_shared], 1])
    engine.add("b", [*SYSTEM[:num_shared], 2])
    assert engine.step() == Plan(rows)


def test_who_waits_for_another_is_not_waited_for() -> None:
    engine = FakeEngine(budget=128, max_seq_len=128)
    a = engine.add("a", SYSTEM[:20] + OTHERS[:40])
    b = engine.add("b", [*SYSTEM, 1])
    c = engine.add("c", [*SYSTEM, 2])
    engine.step()
    assert (b.leader, c.leader) == (a, a)


def test_who_came_back_and_left_before_it_said_anything_leaves_nothing_that_is_not_known_to_be_sound() -> None:
    engine = FakeEngine(num_slots=1, budget=4, policy=Policy(preempt_after=1))
    low = engine.add("low", USER, priority=1)
    while low.num_output_tokens < 2:
        engine.step()
    engine.add("high", [5, 6, 7], 1)
    while low.slot is not None or low.num_preemptions == 0:
        engine.step()
    while low.num_computed == 0:
        engine.step()
    engine.abort("low")
    assert engine.slots.warm == {}


def test_a_slot_that_a_failed_launch_wrote_to_is_not_kept() -> None:
    engine = FakeEngine()
    engine.add("a", USER)
    engine.steps(2)
    engine.scheduler.schedule()
    engine.slots.reserve([engine.slot_of("a")], [1])
    engine.scheduler.abandon()
    assert engine.slots.warm == {}
    assert list(engine.slots.owed) == [Scrub(0, 0, 64)]
    engine.scheduler.check()


@pytest.mark.parametrize("verb", ["place", "_find", "_copy"])
def test_an_interrupt_while_a_request_gets_its_slot_loses_none(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    engine = FakeEngine()
    served(engine, "before", USER)
    engine.add("a", SYSTEM)
    with monkeypatch.context() as patch:
        patch.setattr(Placement, verb, interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.crash()
    assert (engine.scheduler.has_work, engine.slots.warm, engine.slots.num_free) == (False, {0: 10}, 3)
    engine.add("b", SYSTEM)
    engine.run()


# Who does not share


def test_under_another_salt_nothing_is_found_or_waited_for() -> None:
    engine = FakeEngine(budget=128)
    engine.serve("warm", SYSTEM, 1, salt="x")
    running = [engine.add(name, SYSTEM, salt=salt) for name, salt in (("a", "y"), ("b", ""), ("c", "x"))]
    assert engine.step() == Plan([("a", 40), ("b", 40), ("c", 1)])
    running.append(engine.add("d", SYSTEM, salt="z"))
    engine.step()
    assert [request.num_cached_tokens for request in running] == [0, 0, 39, 0]


def test_without_reuse_slots_are_free_when_they_are_released_and_equal_prompts_are_computed_each() -> None:
    engine = FakeEngine(policy=NO_REUSE)
    served_first = engine.add("a", SYSTEM, max_tokens=1)
    engine.step()
    assert (engine.slots.num_free, engine.slots.warm, served_first.slot) == (4, {}, None)
    engine.add("b", SYSTEM)
    engine.add("c", SYSTEM)
    assert engine.step() == Plan([("b", 40), ("c", 24)])


def test_a_prompt_whose_tokens_are_to_be_scored_is_computed_whole_but_others_may_use_it() -> None:
    engine = FakeEngine()
    served(engine, "a", USER)
    scored = engine.add("scored", USER, 1, prompt_logprobs=1)
    assert engine.step() == Plan([("scored", 10)])
    assert scored.num_cached_tokens == 0
    engine.add("c", USER)
    assert engine.step() == Plan([("c", 1)])


def test_a_row_that_fails_takes_the_warm_slots_with_it_that_hold_what_it_reused() -> None:
    engine = FakeEngine(num_slots=8, max_seq_len=256, budget=256)
    served(engine, "source", [*SYSTEM, *range(200, 300)])
    served(engine, "same beginning", [*SYSTEM, *range(300, 401)])
    served(engine, "shorter beginning", [*SYSTEM[:20], *range(400, 502)])
    engine.serve("other salt", [*SYSTEM, *range(200, 303)], 1, salt="x")
    served(engine, "unlike", USER)
    assert sorted(engine.slots.warm.values()) == [10, 122, 140, 141, 143]
    engine.failing.add("bad")
    bad = engine.add("bad", [*SYSTEM, *range(500, 510)])
    engine.step()
    assert (bad.num_cached_tokens, bad.error, bad.slot) == (len(SYSTEM), "no number", None)
    assert sorted(engine.slots.warm.values()) == [10, 122, 143]
    engine.scheduler.check()


def test_a_row_that_fails_and_reused_nothing_costs_nobody_a_warm_slot() -> None:
    engine = FakeEngine()
    served(engine, "sound", USER)
    engine.failing.add("bad")
    engine.add("bad", SYSTEM)
    engine.step()
    assert (engine.requests["bad"].error, list(engine.slots.warm.values())) == ("no number", [len(USER)])


class Filter:
    follows_text = False


def test_a_row_to_which_every_token_may_have_been_forbidden_casts_no_doubt_on_what_it_reused() -> None:
    engine = FakeEngine(max_seq_len=256, budget=256)
    served(engine, "sound", [*SYSTEM, *range(200, 300)])
    engine.failing.add("bad")
    bad = engine.add("bad", [*SYSTEM, 7], new_token_filter=Filter)
    engine.step()
    assert (bad.error, bad.num_cached_tokens, engine.slots.warm) == ("no number", 40, {0: 140})


# Forgetting


@pytest.mark.parametrize("policy", [Policy(), NO_REUSE])
def test_after_a_reset_nothing_warm_is_reused(policy: Policy) -> None:
    engine = FakeEngine(policy=policy)
    engine.serve("before", SYSTEM, 1)
    engine.add("running", USER, 3)
    engine.step()
    engine.scheduler.reset_prefix_cache()
    assert (engine.slots.warm, engine.slots.num_free) == ({}, 3)
    engine.finish("running")
    assert engine.serve("after", SYSTEM, 1).num_cached_tokens == 0


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
def test_after_a_reset_nothing_is_reused_of_those_who_run_and_later_leave(num_ahead: int) -> None:
    engine = FakeEngine(num_ahead=num_ahead)
    running = engine.add("running", SYSTEM, 6)
    engine.steps(3)
    engine.scheduler.reset_prefix_cache()
    engine.scheduler.check()
    beside = engine.serve("beside", SYSTEM, 1)
    assert (beside.num_cached_tokens, running.finish_reason) == (0, None)
    engine.run()
    assert (running.finish_reason, running.num_output_tokens) == ("length", 6)
    assert list(engine.slots.warm.values()) == [40]  # what came after the reset is reused again
    again = engine.add("again", [*SYSTEM, 7], 1)
    engine.run()
    assert again.num_cached_tokens == 40


def test_a_launch_in_flight_at_a_reset_leaves_nothing_warm_when_its_requests_end() -> None:
    engine = FakeEngine(num_ahead=2)
    engine.add("a", SYSTEM, 1)
    engine.step()  # in flight
    engine.scheduler.reset_prefix_cache()
    engine.run()
    assert (engine.ends["a"], engine.slots.warm, engine.slots.num_free) == (1, {}, 4)


def test_who_waits_for_a_prefix_at_a_reset_computes_it() -> None:
    engine = FakeEngine()
    engine.add("leader", SYSTEM, 2)
    follower = engine.add("follower", [*SYSTEM, 7], 2)
    engine.step()
    assert follower.leader is engine.requests["leader"]
    engine.scheduler.reset_prefix_cache()
    assert engine.step() == Plan([("leader", 1), ("follower", 41)], decode=1)
    engine.run()
    assert (engine.ends, follower.num_cached_tokens) == ({"leader": 1, "follower": 1}, 0)
    assert engine.slots.warm == {}


def test_who_had_lost_its_slot_at_a_reset_computes_all_anew_and_counts_no_prompt_twice() -> None:
    engine = FakeEngine(num_slots=2, max_num_running=1, policy=Policy(preempt_after=1))
    low = engine.add("low", SYSTEM, 4, priority=1)
    engine.steps(2)
    engine.add("high", USER, 1)
    engine.step()
    assert low.num_preemptions == 1
    engine.scheduler.reset_prefix_cache()
    assert engine.step() == Plan([("low", 42)])
    engine.run()
    assert (low.num_cached_tokens, low.num_output_tokens) == (0, 4)


# Ahead of the device


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
@pytest.mark.parametrize("max_steps", [1, 4])
def test_whatever_is_reused_is_right_with_launches_in_flight(num_ahead: int, max_steps: int) -> None:
    engine = FakeEngine(num_slots=3, budget=16, num_ahead=num_ahead, max_steps=max_steps)
    for number in range(12):
        engine.add(f"r{number}", [*SYSTEM[: 10 + 2 * (number % 7)], 300 + number % 3], max_tokens=1 + number % 5)
    engine.run()
    assert all(request.finish_reason == "length" for request in engine.requests.values())
    assert sum(request.num_cached_tokens for request in engine.requests.values()) > 100
