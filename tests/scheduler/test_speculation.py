"""Tests which guesses are verified, and what becomes of them in the books."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import pytest

from chairlift.config import Auto
from chairlift.params import FinishReason, RequestOptions
from chairlift.plan import RowResult, StepPlan
from chairlift.scheduler import Drafter, Guess, Policy, Speculation
from chairlift.scheduler.drafting import Rates
from chairlift.scheduler.speculation import StepTimes
from tests.scheduler.fake_engine import EOS, Driver

SONG = [11, 12, 13, 14, 15, 16, 17, 18]


def engine(max_tokens: int | Auto = 4, **settings: Any) -> Driver:
    return Driver(speculation=Speculation(max_tokens), **settings)


def sing(driver: Driver, name: str, prompt: list[int], max_tokens: int = 20, **options: Any) -> None:
    request = driver.make(name, prompt, max_tokens, options=RequestOptions(**options))
    driver.submit(replace(request, new_drafter=partial(Drafter, len(prompt))))


def rows(plan: StepPlan) -> list[tuple[str, int, list[int]]]:
    return [(row.key.tag, row.num_new_tokens, list(row.guess)) for row in plan.rows]


def began(driver: Driver, prompt: list[int], first: int, max_tokens: int = 20) -> None:
    """A request "a" that has its first token."""
    sing(driver, "a", prompt, max_tokens)
    driver.launch()
    driver.land([RowResult([first])])


def test_a_row_computes_its_guess_beside_its_newest_token_behind_rows_without_one() -> None:
    driver = engine()
    began(driver, [*SONG, 11, 12], 13)
    driver.submit(driver.make("b", [50, 51]))
    driver.launch()
    driver.land([RowResult([14, 15, 16, 17, 18]), RowResult([60])])
    plan = driver.launch()
    assert rows(plan) == [("b", 1, []), ("a", 5, [11, 12, 13, 14])]
    assert (plan.num_decode_rows, plan.num_steps, plan.num_expected) == (1, 1, (1, 5))


def test_what_was_guessed_wrongly_is_taken_back_by_length_alone() -> None:
    driver = engine()
    began(driver, [*SONG, 11, 12], 13)
    request = driver.requests["a"]
    assert rows(driver.launch()) == [("a", 5, [14, 15, 16, 17])]
    assert (request.num_computed, driver.slots.cache_length_of(0)) == (15, 15)
    (event,) = driver.land([RowResult([14, 15, 30])])
    assert event.new_token_ids == [14, 15, 30]
    assert (event.num_drafted, event.num_accepted) == (4, 2)
    assert request.token_ids[10:] == [13, 14, 15, 30]
    assert (request.num_computed, driver.slots.cache_length_of(0)) == (13, 13)
    assert driver.slots.owed == type(driver.slots.owed)()
    speculation = driver.scheduler.speculation
    assert speculation is not None
    assert (speculation.num_drafted, speculation.num_accepted, speculation.accepted_at) == (4, 2, [1, 1])


def test_an_answer_is_remembered_for_its_client_alone() -> None:
    driver = engine()
    options = [RequestOptions(tenant="x"), RequestOptions(tenant="y"), RequestOptions(tenant="x", cache_salt="s")]
    guessed = []
    for name, given in zip("abcd", [options[0], *options], strict=True):
        request = driver.make(name, SONG, 6, options=given)
        driver.submit(replace(request, new_drafter=partial(Drafter, len(SONG))))
        driver.launch()
        driver.land([RowResult([50])])
        guessed.append(list(driver.launch().rows[0].guess))
        driver.land([RowResult([51, 52, 53, 54, 55][: 1 + len(guessed[-1])])])
        while driver.has_work:
            driver.launch()
            driver.land([RowResult([driver.requests[name].token_ids[-1] + 1])])
    assert guessed == [[], [51, 52, 53, 54], [], []]


def answer(driver: Driver, name: str, max_tokens: int, first: int = 50, **options: Any) -> None:
    """Answers the song, without guesses, with numbers from there on."""
    driver.submit(driver.make(name, SONG, max_tokens, options=RequestOptions(**options)))
    while (request := driver.requests[name]).finish_reason is None:
        driver.launch()
        driver.land([RowResult([first + request.num_output_tokens - 1])])


def guess_behind(driver: Driver, *results: int) -> list[int]:
    """Returns what the newest request guesses after a launch in which rows get these tokens."""
    driver.launch()
    driver.land([RowResult([result]) for result in results])
    return {name: guess for name, _, guess in rows(driver.launch())}[next(reversed(driver.requests))]


@pytest.mark.parametrize(
    ("prompt", "policy", "salt", "first", "guessed"),
    [
        (SONG, Policy(), "", 50, [51, 52, 53, 54]),
        ([*SONG, 50, 51], Policy(), "", 52, [53, 54, 55, 56]),
        (SONG, Policy(), "s", 50, []),
        ([*SONG, 60], Policy(), "", 50, []),
        (SONG, Policy(enable_prefix_caching=False), "", 50, []),
    ],
    ids=["the same prompt", "it goes on", "another salt", "it goes on otherwise", "without reuse"],
)
@pytest.mark.parametrize(("num_said", "is_its_own"), [(8, True), (80, False)], ids=["in its slot", "in another slot"])
def test_what_a_warm_slot_holds_behind_a_prompt_is_guessed(
    prompt: list[int], policy: Policy, salt: str, first: int, guessed: list[int], num_said: int, is_its_own: bool
) -> None:
    """Also for a client that may reuse others' prompts, and has no answers to remember."""
    driver = engine(num_slots=2, max_seq_len=128, policy=policy)
    answer(driver, "a", num_said)
    sing(driver, "b", prompt, tenant="y", cache_salt=salt)
    assert guess_behind(driver, first) == guessed
    assert not guessed or (driver.requests["b"].slot == 0) == is_its_own


@pytest.mark.parametrize(("first", "guessed"), [(200, []), (400, [401, 402, 403, 404]), (600, [601, 602])])
def test_guesses_come_from_the_newest_two_slots_and_of_one_that_runs_from_its_prompt(
    first: int, guessed: list[int]
) -> None:
    driver = engine(num_slots=4, max_seq_len=128, policy=Policy())
    answer(driver, "a", 80, 200)
    answer(driver, "b", 80, 400)
    sing(driver, "c", [*SONG, 600, 601, 602])
    driver.launch()
    driver.land([RowResult([603])])
    sing(driver, "d", SONG)
    assert guess_behind(driver, 604, first) == guessed


def test_slots_are_not_looked_at_again_after_a_preemption() -> None:
    driver = engine(num_slots=2, max_num_running=1, policy=Policy(preempt_after=1))
    sing(driver, "low", SONG, priority=1)
    driver.launch()
    driver.land([RowResult([50])])
    answer(driver, "high", 8, tenant="y")
    assert (driver.requests["low"].num_preemptions, driver.slots.warm) == (1, {0: 15})
    driver.launch()
    driver.land([RowResult([51])])
    assert rows(driver.launch()) == [("low", 1, [])]


class Forcing:
    """A grammar that takes everything, and says what comes next."""

    is_ready = keeps_pace = True

    def __init__(self, *foreseen: Sequence[int] | None) -> None:
        self.foreseen = list(foreseen)

    def foresee(self) -> Sequence[int] | None:
        return self.foreseen.pop(0)

    def advance(self, _: int) -> bool:
        return False


def test_what_a_grammar_forces_is_the_guess_and_where_none_can_be_verified_there_is_none() -> None:
    driver = engine()
    request = driver.make("a", [*SONG, 11, 12], 30, grammar=Forcing(None, [60, 61], [], [], [70, 71, 72, 73, 74]))
    driver.submit(replace(request, new_drafter=partial(Drafter, 10)))
    driver.launch()
    driver.land([RowResult([13])])
    guessed = []
    for results in ([14], [60, 61, 11], [12], [9], [70]):
        guessed.append(list(driver.launch().rows[0].guess))
        driver.land([RowResult(results)])
    assert guessed == [[], [60, 61], [], [13, 14, 60, 61], [70, 71, 72, 73]]


def test_a_late_row_takes_its_guess_back_and_has_it_computed_again() -> None:
    driver = engine()
    began(driver, [*SONG, 11, 12], 13)
    request = driver.requests["a"]
    driver.launch()
    assert driver.land([RowResult([14, 15], is_late=True)]) == []
    assert (request.num_computed, request.num_pending, driver.slots.cache_length_of(0)) == (10, 0, 10)
    assert rows(driver.launch()) == [("a", 5, [14, 15, 16, 17])]


def test_guesses_that_were_no_numbers_are_overwritten() -> None:
    driver = engine()
    began(driver, [*SONG, 11, 12], 13)
    driver.launch()
    driver.land([RowResult([14, 30], has_bad_surplus=True)])
    (scrub,) = driver.slots.owed
    assert (scrub.slot, scrub.start) == (0, 12)  # type: ignore[union-attr]


def test_an_end_within_a_guess_is_the_end() -> None:
    driver = engine()
    began(driver, [12, 13, 14, EOS, 16, 17, 18, 12], 13)
    assert rows(driver.launch()) == [("a", 5, [14, EOS, 16, 17])]
    (event,) = driver.land([RowResult([14, EOS, 16, 17, 18])])
    assert (event.new_token_ids, event.finish_reason, event.num_accepted) == ([14, EOS], FinishReason.STOP, 2)
    assert driver.slots.warm == {}


@pytest.mark.parametrize(("max_tokens", "num_guessed"), [(20, 4), (4, 2), (2, 0)])
def test_no_more_is_guessed_than_may_still_come(max_tokens: int, num_guessed: int) -> None:
    driver = engine()
    began(driver, [*SONG, 11, 12], 13, max_tokens)
    assert [len(row.guess) for row in driver.launch().rows] == [num_guessed]


def test_prompts_come_first_in_the_budget() -> None:
    driver = engine(budget=6)
    sing(driver, "a", [*SONG[:3], 11, 12])
    driver.launch()
    driver.land([RowResult([13])])
    sing(driver, "b", list(range(100, 108)))
    plans = []
    for results in ([RowResult([9]), RowResult()], [RowResult([9]), RowResult([9])]):
        plans.append(rows(driver.launch()))
        driver.land(results)
    assert plans == [[("a", 1, []), ("b", 5, [])], [("a", 1, []), ("b", 3, [])]]


def test_nobody_yields_memory_for_a_guess() -> None:
    # Each has computed 60 tokens and has memory for 64; 64 more are free.
    driver = engine(num_slots=2, cache_tokens=192, max_seq_len=128, budget=128)
    sing(driver, "a", [*SONG * 7, *SONG[:4]], max_tokens=60)
    sing(driver, "b", [*SONG * 7, *SONG[:4]], max_tokens=60)
    driver.launch()
    driver.land([RowResult([15]), RowResult([15])])
    assert rows(driver.launch()) == [("a", 5, [16, 17, 18, 11]), ("b", 4, [16, 17, 18])]


def test_several_steps_make_no_launch_with_a_guess() -> None:
    driver = engine(max_steps=4)
    began(driver, [*SONG, 11, 12], 13)
    assert driver.launch().num_steps == 1
    driver.land([RowResult([30])])
    assert (driver.launch().num_steps, driver.scheduler.num_running) == (4, 1)


def test_step_times_are_interpolated_and_what_is_unknown_is_hoped_to_be_cheap() -> None:
    times = StepTimes()
    assert times.of(3) == 0.0
    times.note(1, 1.0)
    assert times.of(1) == 1.0
    assert times.of(11) == pytest.approx(1.2)
    times.note(8, 3.0)
    assert [times.of(4), times.of(6)] == pytest.approx([1 + 2 * 3 / 7, 1 + 2 * 5 / 7])


def test_a_quick_step_is_believed_sooner_than_a_slow_one() -> None:
    times = StepTimes()
    times.note(1, 1.0)
    times.note(1, 2.0)
    assert times.of(1) == pytest.approx(1.1)
    times.note(1, 100.0)  # counts as 2.2
    assert times.of(1) == pytest.approx(1.21)
    times.note(1, 0.21)
    assert times.of(1) == pytest.approx(0.91)


def test_a_size_that_did_not_come_for_500_steps_is_forgotten() -> None:
    times = StepTimes()
    times.note(16, 50.0)  # something else took the machine
    for _ in range(499):
        times.note(1, 1.0)
    assert times.of(16) == 50.0
    times.note(1, 1.0)
    assert times.of(16) == pytest.approx(1.3)


def test_a_row_learns_how_often_its_guesses_are_right_by_how_much_agreed() -> None:
    rates = Rates()
    few, many = Guess([1, 2, 3, 4], 2), Guess([1, 2, 3, 4], 20)
    assert (rates.of(few), rates.of(many)) == (0.2, 0.9)
    for _ in range(20):
        rates.note(few, 4)
        rates.note(many, 0)
    assert rates.of(few) > 0.99
    assert rates.of(many) < 0.15


@pytest.mark.parametrize(
    ("cost_of_a_token", "num_rows", "expected"),
    [(0.0, 1, 16), (0.4, 1, 10), (1.0, 1, 5), (20.0, 1, 0), (0.05, 8, 10), (0.2, 8, 3), (1.0, 8, 0)],
)
def test_auto_verifies_what_is_expected_to_save_time(cost_of_a_token: float, num_rows: int, expected: int) -> None:
    """The i-th token saves a row's share of a step with a probability of 0.9 ** i, since 21 tokens before it agree."""
    driver = engine("auto", num_slots=8, budget=1024, max_seq_len=256)
    speculation = driver.scheduler.speculation
    assert speculation is not None
    for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192):
        speculation.times.note(size, 1.0 + cost_of_a_token * size)
    for index in range(num_rows):
        sing(driver, f"r{index}", [*range(20, 60), 100, 101, 102, *range(20, 40)], 60)
    driver.launch()
    driver.land([RowResult([40])] * num_rows)
    assert [len(row.guess) for row in driver.launch().rows] == [expected] * num_rows


def test_auto_does_not_try_what_is_hardly_ever_right() -> None:
    """0.2 ** 2 is less than a tenth, though a step with more tokens seems to take no longer."""
    driver = engine("auto")
    speculation = driver.scheduler.speculation
    assert speculation is not None
    speculation.times.note(1, 1.0)
    speculation.times.note(64, 0.5)
    began(driver, [12, 13, 14, 15, 16, 12], 13)
    assert rows(driver.launch()) == [("a", 2, [14])]


def test_a_text_that_is_said_again_takes_a_step_for_five_tokens() -> None:
    driver = engine(budget=64)
    began(driver, [*SONG, 11, 12], 13, max_tokens=41)
    words, num_steps = cycle([14, 15, 16, 17, 18, 11, 12, 13]), 0
    while driver.has_work:
        plan = driver.launch()
        driver.land([RowResult([next(words) for _ in range(1 + len(plan.rows[0].guess))])])
        num_steps += 1
    assert num_steps == 8
