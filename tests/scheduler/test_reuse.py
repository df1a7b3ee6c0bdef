"""Tests which slot a prompt gets and what of it is computed: literal plans, with contents checked at every launch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from chairlift.plan import Scrub, SlotCopy
from chairlift.prompt_work import ScoreTask
from chairlift.scheduler import Policy
from chairlift.scheduler.placement import Placement
from tests.scheduler.fake_engine import NO_REUSE, WORD, FakeEngine, Plan, beside, decode, prefill

SYSTEM = list(range(100, 140))  # forty tokens that prompts have in common
USER = list(range(200, 210))
OTHERS = list(range(300, 400))


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
        engine.serve(f"earlier {number}", each, 1)
    new = engine.add("new", prompt)
    assert engine.step() == Plan([("new", len(prompt) - num_cached)], copies=copies)
    assert (new.slot, new.num_cached_tokens) == (slot, num_cached)
    assert all(engine.slots.num_valid(copy.source) == len(earlier[-1]) for copy in copies)


def test_a_conversation_goes_on_in_its_own_slot() -> None:
    engine = FakeEngine()
    engine.serve("first", SYSTEM + USER, 3)
    answer = engine.requests["first"].token_ids[len(SYSTEM + USER) :]
    second = engine.add("second", [*SYSTEM, *USER, *answer, 7, 8])
    assert engine.step() == Plan([("second", 3)])  # the answer's last token has not been computed before
    assert (second.slot, second.num_cached_tokens) == (0, 52)
    assert engine.slots.num_free == 3


def test_a_prompt_is_found_in_a_running_slot_and_copied() -> None:
    engine = FakeEngine().given(("a", SYSTEM + USER))
    engine.steps(2)
    engine.play(("b", [*SYSTEM, 1, 2]), beside("a", ("b", 2), copies=[SlotCopy(0, 1, 40)]))
    assert engine.requests["b"].num_cached_tokens == 40


def test_what_a_running_request_generated_is_not_offered_until_it_ends() -> None:
    engine = FakeEngine()
    engine.add("a", USER, max_tokens=5)
    engine.steps(3)
    b = engine.add("b", [*USER, WORD, WORD, 7])
    engine.step()
    assert b.num_cached_tokens == 10


# Equal prompts in flight


PROMPT = list(range(100, 160))
# The settings of an engine, and what `FakeEngine.play` plays.
SCRIPTS: dict[str, list[Any]] = {
    "who shares a prompt that is computed in chunks waits for as much as it shares": [
        *({"budget": 16}, ("a", SYSTEM + USER), ("b", [*SYSTEM[:36], 1, 2]), prefill(a=16), prefill(a=16)),
        prefill(a=10, b=6, copies=[SlotCopy(0, 1, 32)]),  # for the last four it would not pay to wait
    ],
    "if the one who computes leaves another one takes over and the rest copy from that": [
        {"budget": 24, "max_seq_len": 128},
        *(("a", PROMPT), ("b", PROMPT), ("c", PROMPT), prefill(a=24), "a", prefill(b=24), prefill(b=24)),
        prefill(b=12, c=12, copies=[SlotCopy(0, 1, 48)]),  # the last few are sooner computed than waited for
    ],
    "a prefix of fifteen tokens is not waited for": [
        *({}, ("a", [*SYSTEM[:15], 1]), ("b", [*SYSTEM[:15], 2]), prefill(a=16, b=16)),
    ],
    "a prefix of sixteen tokens is waited for": [
        *({}, ("a", [*SYSTEM[:16], 1]), ("b", [*SYSTEM[:16], 2]), prefill(a=17)),
    ],
    "without reuse equal prompts are computed each": [
        *({"policy": NO_REUSE}, ("a", SYSTEM, 1), prefill(a=40), ("b", SYSTEM), ("c", SYSTEM), prefill(b=40, c=24)),
    ],
    "a prompt whose tokens are to be scored is computed whole but others may use it": [
        *({}, ("a", USER, 1), prefill(a=10), ("b", USER, 1, {"prompt_task": ScoreTask(1)}), prefill(b=10)),
        *(("c", USER), prefill(c=1)),
    ],
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_what_of_these_prompts_is_computed(script: list[Any]) -> None:
    FakeEngine(**script[0]).play(*script[1:])


def test_equal_prompts_are_computed_once_and_copied() -> None:
    engine = FakeEngine().given(*((name, SYSTEM + USER) for name in "abc"))
    copies = [SlotCopy(0, 1, 49), SlotCopy(0, 2, 49)]
    engine.play(prefill(a=50), replace(decode("a", "b", "c"), decode=1, copies=copies))
    assert [engine.requests[name].num_cached_tokens for name in "abc"] == [0, 49, 49]


def test_a_slot_that_was_filled_in_part_keeps_what_it_had_reused_and_no_more() -> None:
    engine = FakeEngine(budget=16, max_seq_len=256)
    engine.serve("first", SYSTEM, 1)
    engine.play(("second", SYSTEM + OTHERS[:40]), prefill(second=16), "second")
    assert engine.slots.warm == {0: 40}


def test_what_was_copied_from_a_prompt_in_work_is_not_kept_before_a_token_proves_it() -> None:
    engine, prompt = FakeEngine(budget=32, max_seq_len=128), list(range(100, 180))
    engine.play(("a", prompt), prefill(a=32), ("b", prompt[:30] + OTHERS[:40]))
    engine.play(prefill(a=24, b=8, copies=[SlotCopy(0, 1, 30)]), "b")
    assert (list(engine.slots.owed), engine.slots.warm) == ([Scrub(1, 0, 128)], {})


def test_a_copy_that_was_planned_is_made_even_if_its_request_leaves_before_the_launch() -> None:
    engine = FakeEngine().given(("a", SYSTEM + USER))
    engine.steps(2)
    b = engine.add("b", [*SYSTEM, 1, 2])
    engine.scheduler.schedule()
    assert (b.slot, b.num_reused, list(engine.slots.owed)) == (1, 40, [SlotCopy(0, 1, 40)])
    engine.scheduler.abort("b")
    assert engine.slots.warm == {1: 40}
    copies = [SlotCopy(0, 1, 40), SlotCopy(0, 2, 40)]
    engine.play(("c", [*SYSTEM, 1, 2]), beside("a", ("c", 2), copies=copies))


def test_who_waits_for_another_is_not_waited_for() -> None:
    engine = FakeEngine(budget=128, max_seq_len=128)
    engine.given(("a", SYSTEM[:20] + OTHERS[:40]), ("b", [*SYSTEM, 1]), ("c", [*SYSTEM, 2]))
    engine.step()
    assert [engine.requests[name].leader for name in "bc"] == [engine.requests["a"]] * 2


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
    engine = FakeEngine().given(("a", USER))
    engine.steps(2)
    engine.scheduler.schedule()
    engine.slots.reserve([engine.slot_of("a")], [1])
    engine.scheduler.abandon()
    assert (engine.slots.warm, engine.slots.num_free, engine.scheduler.has_work) == ({}, 4, False)
    assert list(engine.slots.owed) == [Scrub(0, 0, 64)]
    engine.scheduler.check()


@pytest.mark.parametrize("verb", ["place", "_find", "_copy"])
def test_an_interrupt_while_a_request_gets_its_slot_loses_none(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    engine = FakeEngine()
    engine.serve("before", USER, 1)
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


def test_a_row_that_fails_takes_the_warm_slots_with_it_that_hold_what_it_reused() -> None:
    engine = FakeEngine(num_slots=8, max_seq_len=256, budget=256)
    engine.serve("source", [*SYSTEM, *range(200, 300)], 1)
    engine.serve("same beginning", [*SYSTEM, *range(300, 401)], 1)
    engine.serve("shorter beginning", [*SYSTEM[:20], *range(400, 502)], 1)
    engine.serve("other salt", [*SYSTEM, *range(200, 303)], 1, salt="x")
    engine.serve("unlike", USER, 1)
    assert sorted(engine.slots.warm.values()) == [10, 122, 140, 141, 143]
    engine.failing.add("bad")
    bad = engine.add("bad", [*SYSTEM, *range(500, 510)])
    engine.step()
    assert (bad.num_cached_tokens, bad.error, bad.slot) == (len(SYSTEM), "no number", None)
    assert sorted(engine.slots.warm.values()) == [10, 122, 143]
    engine.scheduler.check()


class Filter:
    follows_text = False

    def forbidden_after(self, token_ids: Sequence[int], start: int) -> list[int]:  # noqa: ARG002
        return []


@pytest.mark.parametrize(
    ("prompt", "fields", "num_cached"),
    [(USER, {}, 0), ([*SYSTEM, 7], {"new_token_filter": Filter}, 40)],
    ids=["reused nothing", "may have been forbidden every token"],
)
def test_a_row_that_fails_casts_no_doubt_on_a_slot_if_it(
    prompt: list[int], fields: dict[str, Any], num_cached: int
) -> None:
    engine = FakeEngine(max_seq_len=256, budget=256)
    engine.serve("sound", [*SYSTEM, *range(300, 400)], 1)
    engine.failing.add("bad")
    bad = engine.add("bad", prompt, **fields)
    engine.step()
    assert (bad.error, bad.num_cached_tokens, engine.slots.warm) == ("no number", num_cached, {0: 140})


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
    engine = FakeEngine(num_ahead=2).play(("a", SYSTEM, 1), prefill(a=40))
    engine.scheduler.reset_prefix_cache()
    engine.run()
    assert (engine.ends["a"], engine.slots.warm, engine.slots.num_free) == (1, {}, 4)


def test_who_waits_for_a_prefix_at_a_reset_computes_it() -> None:
    engine = FakeEngine().play(("leader", SYSTEM, 2), ("follower", [*SYSTEM, 7], 2), prefill(leader=40))
    follower = engine.requests["follower"]
    assert follower.leader is engine.requests["leader"]
    engine.scheduler.reset_prefix_cache()
    engine.play(beside("leader", ("follower", 41))).run()
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
    engine.play(prefill(low=42)).run()
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
