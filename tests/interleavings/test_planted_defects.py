"""The search finds what it is for: with a defect planted in the engine, it tells a short way to it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from chairlift.cache.ledger import SlotLedger
from chairlift.cache.prefixes import PrefixIndex, SharedPrefix
from chairlift.plan import RowPlan, RowResult, SlotCopy, StepPlan
from chairlift.scheduler import RequestState, Scheduler, TokenEvent
from chairlift.scheduler import finding as finding_module
from chairlift.scheduler.placement import Placement
from tests.interleavings.planting import Defect, assert_found, each_of
from tests.interleavings.scopes import (
    APART,
    FORCED,
    FORGETTING,
    GRAMMARS,
    GUESSES,
    LEADERS,
    MEMORY,
    ORDER,
    OVERLAP,
    PROMPTS,
    SALTS,
    STEPS,
)


def copy_too_little(patch: pytest.MonkeyPatch) -> None:
    """A copy is one token short."""
    copy_prefix = SlotLedger.copy_prefix

    def copy_less(self: SlotLedger, source: int, target: int, num_tokens: int) -> None:
        copy_prefix(self, source, target, num_tokens)
        self.owed[-1] = SlotCopy(source, target, num_tokens - 1)

    patch.setattr(SlotLedger, "copy_prefix", copy_less)


def forget_scrubs(patch: pytest.MonkeyPatch) -> None:
    """Leaves what may be NaN in its slot."""
    patch.setattr(SlotLedger, "scrub", lambda *_: None)


def forget_surplus(patch: pytest.MonkeyPatch) -> None:
    """Scrubs nothing that a row computed for a wrong guess before it continues."""
    patch.setattr(Placement, "scrub_surplus", lambda *_: None)


def keep_surplus(patch: pytest.MonkeyPatch) -> None:
    """Counts what was computed after a request's last token as its own."""
    patch.setattr(RequestState, "drop_surplus", lambda _: None)


def follow_each_other(patch: pytest.MonkeyPatch) -> None:
    """A request that waits for a leader may lead others."""
    patch.setattr(finding_module, "_can_lead", lambda owner, request: owner is not request)


def never_look_again(patch: pytest.MonkeyPatch) -> None:
    """A request waits for its leader for good."""
    follow = Placement.follow

    def follow_once(self: Placement, request: RequestState, finding: Any = None) -> None:
        if finding is not None:
            follow(self, request, finding)

    patch.setattr(Placement, "follow", follow_once)


def release_early(patch: pytest.MonkeyPatch) -> None:
    """A slot is released though a launch still writes to it."""
    release_if_idle = Scheduler._release_if_idle

    def release(self: Scheduler, request: RequestState) -> None:
        request.num_launches = 0
        release_if_idle(self, request)

    patch.setattr(Scheduler, "_release_if_idle", release)


def release_twice(patch: pytest.MonkeyPatch) -> None:
    """A slot is released again after another request got it."""
    release = SlotLedger.release

    def release_again(self: SlotLedger, seq_id: int, num_kept: int = 0) -> None:
        release(self, seq_id, num_kept)
        self._free.append(seq_id)

    patch.setattr(SlotLedger, "release", release_again)


def lose_an_event(patch: pytest.MonkeyPatch) -> None:
    """The last row of a launch is not heard of."""
    update = Scheduler.update

    def update_all_but_one(self: Scheduler, plan: StepPlan, results: Sequence[RowResult]) -> list[TokenEvent]:
        return update(self, plan, results)[:-1]

    patch.setattr(Scheduler, "update", update_all_but_one)


def keep_wrong_tokens(patch: pytest.MonkeyPatch) -> None:
    """The books do not take back what was guessed wrongly."""

    def step_back(_: Placement, request: RequestState, num_tokens: int) -> None:
        request.num_computed -= num_tokens

    patch.setattr(Placement, "step_back", step_back)


def ignore_salts(patch: pytest.MonkeyPatch) -> None:
    """Prompts are reused across the walls between clients."""
    match = PrefixIndex.match

    def match_any(self: PrefixIndex, tokens: bytes, salt: str = "") -> Iterator[SharedPrefix]:
        del salt
        for each in list(self._roots):
            yield from match(self, tokens, each)

    patch.setattr(PrefixIndex, "match", match_any)


def forget_too_little(patch: pytest.MonkeyPatch) -> None:
    """Prompts that are being computed can be reused after prefixes were to be forgotten."""

    def forget_prefixes(self: Placement) -> None:
        for slot in self._slots.warm:
            self._slots.shrink_warm(slot, 0)
            self._index.remove(slot)

    patch.setattr(Placement, "forget_prefixes", forget_prefixes)


def admit_always(patch: pytest.MonkeyPatch) -> None:
    """Requests get slots though there is no memory for them."""
    patch.setattr(Placement, "has_memory_for", lambda *_: True)


def answer_prompts(patch: pytest.MonkeyPatch) -> None:
    """A prompt that is to be computed and no more gets a token."""
    accept = RequestState.accept

    def accept_one(self: RequestState, sampled: list[int], *more: Any) -> list[int]:
        self.max_tokens = max(self.max_tokens, 1)
        return accept(self, sampled, *more)

    patch.setattr(RequestState, "accept", accept_one)


def keep_all(patch: pytest.MonkeyPatch) -> None:
    """Slots stay warm, whether or not prefixes are reused."""
    patch.setattr(PrefixIndex, "__contains__", lambda *_: True)


def never_settle(patch: pytest.MonkeyPatch) -> None:
    """A row goes on from a token that was sampled without its mask, and so do those that follow it."""
    record = RequestState.record

    def record_alone(self: RequestState, row: RowPlan, result: RowResult) -> list[int]:
        kept = record(self, row, result)
        self.is_stuck = False
        return kept

    patch.setattr(RequestState, "record", record_alone)


def trust_grammars(patch: pytest.MonkeyPatch) -> None:
    """Verifies nothing that a grammar forces."""
    step_back = Placement.step_back

    def step_back_others(self: Placement, request: RequestState, num_tokens: int) -> None:
        if request.grammar is None:
            step_back(self, request, num_tokens)

    patch.setattr(Placement, "step_back", step_back_others)


# All of their states must be known here.
ONE = replace(GRAMMARS, asks=GRAMMARS.asks[:1], num_late=1)
THREE = replace(LEADERS, asks=LEADERS.asks[:3], num_out_of_memory=0)

DEFECTS = [
    Defect(copy_too_little, ORDER, "token 39 is invalid contents, not token 39 of a"),
    Defect(lose_an_event, ORDER, "has ended for one of its client and the scheduler"),
    Defect(release_twice, ORDER, "a slot is free twice"),
    Defect(never_look_again, THREE, "requests starve"),
    Defect(follow_each_other, THREE, "requests starve"),
    Defect(release_early, OVERLAP, "KeyError"),
    Defect(keep_surplus, STEPS, "was released with NaN in it"),
    Defect(forget_scrubs, STEPS, "was released with NaN in it"),
    Defect(keep_wrong_tokens, GUESSES, "c and its slot"),
    Defect(forget_surplus, GUESSES, "before NaN, which masks do not stop"),
    Defect(ignore_salts, SALTS, "token 0 is token 0 of a, not token 0 of b"),
    Defect(forget_too_little, FORGETTING, "is copied, though it was forgotten"),
    Defect(answer_prompts, PROMPTS, "b hears"),
    Defect(keep_all, APART, "a slot is warm though nothing is reused"),
    Defect(never_settle, ONE, "requests starve"),
    Defect(trust_grammars, FORCED, "token 65 is unknown, not token 65 of a"),
    Defect(admit_always, MEMORY, "was given a slot without memory"),
]


@each_of(DEFECTS)
def test_a_planted_defect_is_found(defect: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_found(defect, monkeypatch, most_actions=7)
