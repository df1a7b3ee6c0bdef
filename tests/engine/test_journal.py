"""The journal's counts, to the token and to the tick: no model, and a clock that only launches move on."""

from collections import deque
from typing import Any

import pytest

from chairlift.engine.journal import EngineStats, Histogram, Journal, Totals
from chairlift.plan import StepPlan
from chairlift.prompt_work import ScoreTask
from chairlift.scheduler import Policy
from tests.scheduler.fake_engine import FakeEngine, Words

LAUNCH_S = 2.0**-7  # about 8 ms, and sums of it are exact
HELLO = [5, 6, 7, 8]
AHEAD = pytest.mark.parametrize("num_ahead", [0, 1])


class Everything(Words):
    """A grammar that takes everything, and takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.keeps_pace = False

    def advance(self, _: int) -> bool:
        return False


class Journaled(FakeEngine):
    """An engine that keeps a journal, as `EngineCore` does."""

    def __init__(self, num_slots: int = 4, preempt_after: int | None = None, **settings: Any) -> None:
        super().__init__(num_slots, policy=Policy(preempt_after=preempt_after), **settings)
        self.journal = Journal(self.scheduler, lambda: self.now)
        self._begins: deque[float] = deque()

    @property
    def stats(self) -> EngineStats:
        return self.journal.read_stats()

    @property
    def totals(self) -> Totals:
        return self.stats.totals

    def give_up(self, name: str) -> None:
        event = self.abort(name)
        assert event is not None
        self.journal.note_events([event])

    def begin(self, plan: StepPlan) -> None:
        self._begins.append(self.now)
        super().begin(plan)

    def _land(self) -> None:
        plan, num_before = self.in_flight[0], len(self.events)
        self.now += LAUNCH_S
        super()._land()
        self.journal.note_launch(plan, self._begins.popleft())
        self.journal.note_events(self.events[num_before:])


def filled(histogram: Histogram) -> dict[float, int]:
    """The ranges in which there is something, by their ends."""
    ends = [*histogram.bounds, float("inf")]
    return {end: count for end, count in zip(ends, histogram.counts, strict=True) if count}


def test_a_value_that_is_a_bound_belongs_to_the_range_that_ends_there() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    for value in (0.5, 1.0, 1.5, 4.0, 5.0):
        histogram.add(value)
    histogram.add(3.0, times=2)
    assert histogram == Histogram((1.0, 2.0, 4.0), [2, 1, 3, 1], 18.0)
    assert histogram.cumulative == [2, 3, 6, 7]
    assert histogram.count == 7


def test_rows_tokens_and_time_of_every_step_are_counted_and_what_was_read_stays_as_it_was() -> None:
    engine = Journaled()
    engine.add("a", HELLO)
    before = engine.stats
    engine.step()
    engine.add("b", [9] * 20)
    engine.steps(3)
    stats = engine.stats
    assert filled(stats.step_rows) == {1: 1, 2: 3}
    assert stats.step_rows.sum == 7
    assert filled(stats.step_tokens) == {4: 3, 64: 1}  # 4, then 1 + 20, then 2 and 2
    assert stats.step_tokens.sum == 4 + 21 + 2 + 2
    assert stats.step_seconds.sum == 4 * LAUNCH_S
    assert (stats.totals.num_prompt_tokens, stats.totals.num_generated_tokens) == (24, 4 + 3)
    assert (before.totals.num_prompt_tokens, before.step_seconds.count) == (0, 0)


def test_tokens_of_one_launch_share_its_time() -> None:
    engine = Journaled(max_steps=4)
    engine.add("a", HELLO)
    engine.add("b", HELLO)
    engine.steps(3)
    stats = engine.stats
    assert stats.step_seconds.count == 1 + 4 + 4
    assert stats.totals.num_generated_tokens == 2 * 9
    assert filled(stats.inter_token_seconds) == {0.002: 2 * 8}
    assert stats.inter_token_seconds.sum == 16 * LAUNCH_S / 4


@AHEAD
def test_a_first_token_counts_from_the_requests_coming_and_is_no_token_after_another(num_ahead: int) -> None:
    engine = Journaled(num_slots=1, num_ahead=num_ahead)
    engine.add("a", HELLO, max_tokens=3)
    engine.add("b", [9] * 20, max_tokens=1)
    engine.run()
    stats = engine.stats
    assert stats.totals.num_first_tokens == 2
    assert filled(stats.inter_token_seconds) == {0.01: 2}
    assert stats.queue_seconds.sum == 3 * LAUNCH_S
    assert stats.first_token_seconds.sum == (1 + 4) * LAUNCH_S
    assert stats.totals.seconds_to_first_token == stats.first_token_seconds.sum
    assert stats.totals.num_finished == 2


@AHEAD
def test_a_row_that_sits_launches_out_has_waited_for_them(num_ahead: int) -> None:
    engine = Journaled(num_ahead=num_ahead)
    engine.add("free", HELLO)
    engine.add("masked", [9] * 4, new_grammar=Everything)
    engine.steps(num_ahead + 9)
    seconds = (num_ahead + 1) * LAUNCH_S
    num_masked = engine.requests["masked"].num_output_tokens - engine.requests["masked"].num_pending - 1
    assert num_masked == 8 // (num_ahead + 1)
    assert engine.stats.inter_token_seconds.count == 8 + num_masked
    assert engine.stats.inter_token_seconds.sum == 8 * LAUNCH_S + num_masked * seconds


def test_a_prompt_in_chunks_counts_when_its_last_token_is_computed_even_if_that_is_one_alone() -> None:
    engine = Journaled(budget=16)
    engine.add("a", list(range(100, 133)))
    engine.steps(2)
    assert (engine.totals.num_prompt_tokens, engine.stats.num_prefilling) == (0, 1)
    assert engine.step().decode == 1
    assert (engine.totals.num_prompt_tokens, engine.totals.num_first_tokens) == (33, 1)
    assert engine.stats.first_token_seconds.sum == 3 * LAUNCH_S
    assert engine.stats.inter_token_seconds.count == 0
    assert (engine.stats.num_prefilling, engine.stats.num_decoding) == (0, 1)


def test_a_prompt_without_an_answer_has_no_first_token_and_one_given_up_in_its_middle_leaves_nothing() -> None:
    engine = Journaled(budget=16)
    engine.add("silent", HELLO, max_tokens=0)
    engine.run()
    assert (engine.totals.num_prompt_tokens, engine.totals.num_first_tokens, engine.totals.num_finished) == (4, 0, 1)
    engine.add("long", list(range(100, 140)))
    engine.step()
    engine.give_up("long")
    engine.add("next", HELLO[::-1])
    engine.step()
    assert (engine.totals.num_prompt_tokens, engine.totals.num_finished) == (8, 2)


def test_a_request_that_lost_its_slot_has_a_long_pause_and_its_prompt_counts_once() -> None:
    engine = Journaled(num_slots=1, preempt_after=2)
    engine.add("low", HELLO, max_tokens=4, priority=1)
    engine.steps(2)
    engine.add("high", [9] * 4, max_tokens=3)
    engine.run()
    stats = engine.stats
    assert (engine.requests["low"].num_preemptions, stats.totals.num_preemptions) == (1, 1)
    assert (stats.totals.num_prompt_tokens, stats.totals.num_first_tokens) == (8, 2)
    assert filled(stats.inter_token_seconds) == {0.01: 4, 0.05: 1}  # three launches for the other, one to come back
    assert stats.inter_token_seconds.sum == 4 * LAUNCH_S + 4 * LAUNCH_S


@AHEAD
def test_a_prompt_that_was_put_off_for_another_counts_its_reused_tokens_once(num_ahead: int) -> None:
    engine = Journaled(num_ahead=num_ahead)
    engine.add("leader", [7] * 20, max_tokens=3)
    follower = engine.add("follower", [*[7] * 20, 8], max_tokens=3)
    engine.run()
    assert follower.num_cached_tokens == 20
    assert (engine.totals.num_cached_tokens, engine.totals.num_prompt_tokens) == (20, 41)


@AHEAD
def test_what_a_request_finds_again_after_it_lost_its_slot_counts_for_nothing(num_ahead: int) -> None:
    engine = Journaled(num_slots=1, num_ahead=num_ahead, preempt_after=1)
    engine.add("before", [7] * 20, max_tokens=1)
    engine.run()
    low = engine.add("low", [*[7] * 20, 8], max_tokens=12, priority=1)
    for number in range(2):
        engine.steps(5)
        engine.add(f"high{number}", HELLO, max_tokens=1)
    engine.run()
    assert (low.num_preemptions, low.num_cached_tokens, engine.totals.num_cached_tokens) == (2, 20, 20)
    assert (engine.totals.num_prompt_tokens, engine.totals.num_first_tokens) == (20 + 21 + 4 + 4, 4)


@pytest.mark.parametrize(
    ("is_reusing", "fields", "num_cached"), [(True, {}, 19), (False, {}, 0), (True, {"prompt_task": ScoreTask(1)}, 0)]
)
def test_reused_tokens_are_counted_once_the_prompt_is_there_and_none_with_reuse_off_or_a_scored_prompt(
    is_reusing: bool, fields: dict[str, Any], num_cached: int
) -> None:
    engine = Journaled()
    engine.scheduler.placement._is_reusing = is_reusing
    engine.serve("a", [7] * 20, max_tokens=1)
    engine.serve("b", [7] * 20, max_tokens=1, **fields)
    assert (engine.totals.num_prompt_tokens, engine.totals.num_cached_tokens) == (40, num_cached)


def test_where_requests_are_is_known_after_every_launch_arrival_and_end() -> None:
    engine = Journaled(num_slots=3, budget=16)
    for name, num_tokens in (("a", 4), ("b", 20), ("c", 4), ("d", 4)):
        engine.add(name, [ord(name)] * num_tokens)
    engine.journal.look_around()
    assert (engine.stats.num_waiting, engine.stats.num_running) == (4, 0)
    engine.step()
    assert (engine.stats.num_waiting, engine.stats.num_prefilling, engine.stats.num_decoding) == (2, 1, 1)
    engine.give_up("a")
    assert (engine.stats.num_waiting, engine.stats.num_running, engine.stats.num_warm) == (2, 1, 1)
