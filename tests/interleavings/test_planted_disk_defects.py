"""The search finds defects in what the engine does with prefixes from disk, and tells a short way to each."""

import pytest

from chairlift.cache.ledger import SlotLedger
from chairlift.plan import SavedPart
from chairlift.scheduler import RequestState
from chairlift.scheduler.restoring import Restoring, _Reading
from tests.interleavings.planting import Defect, assert_found, each_of
from tests.interleavings.scopes_of_disks import READS, READS_OF_STATES, RESETS, SHORT


def count_too_much(patch: pytest.MonkeyPatch) -> None:
    """The books count a token more than was written."""
    load = SlotLedger.load

    def load_less(self: SlotLedger, seq_id: int, start: int, end: int, part: SavedPart) -> None:
        load(self, seq_id, start, end - 1, part)
        self._loaded[seq_id] = end

    patch.setattr(SlotLedger, "load", load_less)


def ignore_salts(patch: pytest.MonkeyPatch) -> None:
    """Saved prompts are reused across the walls between clients."""

    def begin(self: Restoring, request: RequestState, tokens: bytes) -> None:
        if request.num_computed < request.max_reused:
            ticket = self._saved.begin(tokens, "", request.num_computed, request.max_reused)
            if ticket is not None:
                request.reading = ticket
                self._readings[ticket] = _Reading(request, request.num_computed)

    patch.setattr(Restoring, "begin", begin)


def keep_the_ticket(patch: pytest.MonkeyPatch) -> None:
    """Lets a request that has left wait for the disk."""

    def drop_half(self: Restoring, request: RequestState) -> None:
        if request.reading is not None:
            self._saved.cancel(request.reading)
            request.reading = None

    patch.setattr(Restoring, "drop", drop_half)


def wait_for_the_lost(patch: pytest.MonkeyPatch) -> None:
    """Nobody hears that a file could not be read."""
    load = Restoring.load

    def load_contents(self: Restoring, part: SavedPart) -> None:
        if part.content is not None:
            load(self, part)

    patch.setattr(Restoring, "load", load_contents)


def read_on(patch: pytest.MonkeyPatch) -> None:
    """Readings go on after prefixes were to be forgotten."""
    patch.setattr(Restoring, "drop_all", lambda _: None)


def need_no_state(patch: pytest.MonkeyPatch) -> None:
    """Tokens count though the state after them was lost."""
    finish = Restoring._finish

    def finish_always(self: Restoring, ticket: int, reading: _Reading, slot: int) -> None:
        reading.has_state = True
        finish(self, ticket, reading, slot)

    patch.setattr(Restoring, "_finish", finish_always)


def compute_meanwhile(patch: pytest.MonkeyPatch) -> None:
    """A request computes what is being read for it."""
    patch.setattr(RequestState, "is_ready", property(lambda request: request.leader is None))


DEFECTS = [
    Defect(count_too_much, SHORT, "token 63 is invalid contents, not token 63 of"),
    Defect(ignore_salts, READS, "token 0 is token 0 of a, not token 0 of c"),
    Defect(keep_the_ticket, READS, "a waits for another reading"),
    Defect(wait_for_the_lost, READS, "KeyError"),
    Defect(read_on, RESETS, "is used, though it was forgotten"),
    Defect(need_no_state, READS_OF_STATES, "the state of a: it is zeros"),
    Defect(compute_meanwhile, READS, "a would decode before its prefix is there"),
]


@each_of(DEFECTS)
def test_a_planted_defect_is_found(defect: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_found(defect, monkeypatch)
