"""The search finds defects in what the engine does with recurrent states, and tells a short way to each."""

from dataclasses import replace
from typing import Any

import pytest

from chairlift.cache.ledger import SlotLedger
from chairlift.cache.prefixes import count_tokens, cut_tokens
from chairlift.cache.snapshots import Snapshots, StateSource
from chairlift.cache.state_books import StateBooks
from chairlift.scheduler import RequestState
from chairlift.scheduler.state_reuse import StateReuse
from tests.interleavings.planting import Defect, assert_found, each_of
from tests.interleavings.scopes_of_states import FAILURES, FORKS, JUNCTIONS, REPLAYS, RESETS, SURPLUS, TURNS


def forget_to_copy(patch: pytest.MonkeyPatch) -> None:
    """A slot gets the keys and values of another, and the books say that it has the state as well."""

    def stand_only(self: SlotLedger, source: int, target: int) -> None:
        del source
        assert self.states is not None
        self.states.stand(target, self.cache_length_of(target))

    patch.setattr(SlotLedger, "copy_state", stand_only)


def replay_nothing(patch: pytest.MonkeyPatch) -> None:
    """Inputs that were accepted are not applied."""
    patch.setattr(StateBooks, "num_replayed", lambda *_: 0)


def take_guesses(patch: pytest.MonkeyPatch) -> None:
    """A state takes guessed tokens before they are verified."""
    patch.setattr(RequestState, "num_tentative", lambda *_: 0)


def go_past_marks(patch: pytest.MonkeyPatch) -> None:
    """A chunk does not end where a state is wanted."""
    patch.setattr(RequestState, "end_at_mark", lambda _, num_new: num_new)


def keep_bad_states(patch: pytest.MonkeyPatch) -> None:
    """Keeps what a failed row left."""
    patch.setattr(StateReuse, "forget", lambda *_, **__: None)


def keep_forgotten_states(patch: pytest.MonkeyPatch) -> None:
    """A reset leaves the kept states."""
    patch.setattr(StateReuse, "forget_all", lambda _: None)


def keep_for_fewer_tokens(patch: pytest.MonkeyPatch) -> None:
    """A state is kept as that of one token less."""
    add = Snapshots.add

    def add_less(self: Snapshots, tokens: bytes, salt: str, **more: Any) -> int | None:
        return add(self, cut_tokens(tokens, count_tokens(tokens) - 1), salt, **more)

    patch.setattr(Snapshots, "add", add_less)


def keep_out_of_turn(patch: pytest.MonkeyPatch) -> None:
    """A state is kept before pending work that it follows from."""
    keep_state = SlotLedger.keep_state

    def keep_first(self: SlotLedger, seq_id: int, row: int) -> None:
        keep_state(self, seq_id, row)
        self.owed.rotate(1)

    patch.setattr(SlotLedger, "keep_state", keep_first)


def free_what_is_kept(patch: pytest.MonkeyPatch) -> None:
    """Trimming frees the memory of all kept states."""

    def reclaim_all(self: Snapshots) -> list[int]:
        written, self._written = sorted(self._written), set()
        return written

    patch.setattr(Snapshots, "reclaim_unused", reclaim_all)


def free_nothing(patch: pytest.MonkeyPatch) -> None:
    """Trimming frees no memory of states."""
    patch.setattr(StateBooks, "reclaim_unused", lambda *_: [])


def ignore_salts(patch: pytest.MonkeyPatch) -> None:
    """A state is found across the walls between clients."""
    find = Snapshots.find

    def find_any(self: Snapshots, tokens: bytes, salt: str, most: int) -> StateSource | None:
        found = (find(self, tokens, each, most) for each in (salt, *self._index._roots))
        return max(filter(None, found), key=lambda source: source.num_tokens, default=None)

    patch.setattr(Snapshots, "find", find_any)


def keep_positions(patch: pytest.MonkeyPatch) -> None:
    """A slot that is claimed anew still has the state of its former owner."""
    claim = SlotLedger.claim

    def claim_as_it_is(self: SlotLedger, batch_size: int) -> list[int]:
        assert self.states is not None
        before = [(self.states.position(slot), self.states.reach(slot)) for slot in range(self.num_slots)]
        slots = claim(self, batch_size)
        for slot in slots:
            position, reach = before[slot]
            self.states.stand(slot, position, reach - position)
        return slots

    patch.setattr(SlotLedger, "claim", claim_as_it_is)


def stop_anywhere(patch: pytest.MonkeyPatch) -> None:
    """A state counts as stopped at whatever end, though launches only notice end tokens."""

    def stop(self: StateReuse, request: RequestState) -> None:
        assert request.slot is not None
        self._slots.stop_state(request.slot, request.num_computed)

    patch.setattr(StateReuse, "stop_at_end", stop)


IN_ORDER = replace(RESETS, is_in_order=True, num_resets=0, num_trims=0)

DEFECTS = [
    Defect(forget_to_copy, FORKS, "goes on from row"),
    Defect(replay_nothing, JUNCTIONS, "goes on from row"),
    Defect(take_guesses, REPLAYS, "cannot go on after"),
    Defect(go_past_marks, JUNCTIONS, "where its state is wanted"),
    Defect(keep_bad_states, FAILURES, "the kept state in row .: it is NaN"),
    Defect(keep_forgotten_states, RESETS, "a state is kept, though it was forgotten"),
    Defect(keep_for_fewer_tokens, JUNCTIONS, "the kept state in row"),
    Defect(keep_out_of_turn, FORKS, "the state of b: it is token 63 of a, not token 89 of a"),
    Defect(free_what_is_kept, TURNS, "the kept state in row .: it is zeros"),
    Defect(free_nothing, RESETS, "takes memory, and nobody needs its state"),
    Defect(ignore_salts, IN_ORDER, "is token 79 of a, not token 79 of c"),
    Defect(keep_positions, TURNS, "cannot go on after 0 tokens"),
    Defect(stop_anywhere, SURPLUS, "the state of warm slot"),
]


@each_of(DEFECTS)
def test_a_planted_defect_is_found(defect: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_found(defect, monkeypatch)
