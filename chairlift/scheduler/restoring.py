"""Prefixes that are read from disk: who waits for one, and what of it counts.

A request that gets a slot has what other slots hold of its prompt (`placement.py`). If more of it was saved, that is
read while the request waits in its slot, as it would wait for a leader:

    prompt    |== from slots ==|== part ==|== part ==|- - to compute - -|
              0           num_computed              end

Parts are written behind what the request has, as they come. They count once the last one is there, or none follows; a
recurrent state comes with the last, and without it nothing counts. A request that leaves, or loses its slot, leaves its
ticket: what is read for that later belongs to nobody.
"""

from dataclasses import dataclass
from typing import Protocol

from chairlift.cache.ledger import SlotLedger
from chairlift.cache.prefixes import pack_tokens
from chairlift.plan import SavedPart
from chairlift.scheduler.request import RequestState


class SavedPrefixes(Protocol):
    """Finds and reads prefixes that were saved."""

    def begin(self, tokens: bytes, salt: str, num_held: int, most: int) -> int | None:
        """Begins to read a saved prefix of these packed tokens that is longer than `num_held`; returns its ticket.

        At most `most` tokens of it will be used. Its parts come to `Restoring.load`, the last of them in any case. None
        if there is none that is worth it.
        """
        ...

    def cancel(self, ticket: int) -> None:
        """Stops a reading that is not complete. No part of it comes any more."""
        ...

    def forget(self, tokens: bytes, salt: str) -> None:
        """Removes what was saved of these tokens, as it may be at fault."""
        ...


class NothingSaved:
    """Stands for a disk on which there is nothing."""

    def begin(self, tokens: bytes, salt: str, num_held: int, most: int) -> None:
        """Finds nothing."""

    def cancel(self, ticket: int) -> None:
        """Is never called, since no ticket is given."""

    def forget(self, tokens: bytes, salt: str) -> None:
        """Has nothing to forget."""


@dataclass(slots=True)
class _Reading:
    """A prefix that is being read."""

    request: RequestState
    end: int  # tokens that the slot has in one piece with what was read
    has_state: bool = False  # that of `end` tokens


class Restoring:
    """The readings of the requests that wait for one."""

    def __init__(self, slots: SlotLedger, saved: SavedPrefixes) -> None:
        self._slots = slots
        self._saved = saved
        self._readings: dict[int, _Reading] = {}  # by ticket
        self._origins: dict[int, int] = {}  # by slot: first tokens of which some were read from disk

    @property
    def origins(self) -> dict[int, int]:
        """By slot that was filled from disk: of the tokens that it had then, those that its later requests kept."""
        return dict(self._origins)

    def begin(self, request: RequestState, tokens: bytes) -> None:
        """Has the rest of a request's prefix read, if more was saved than its slot holds."""
        assert request.reading is None, f"{request.request_id} waits for the disk already"
        if request.num_computed >= request.max_reused:
            return
        ticket = self._saved.begin(tokens, request.options.cache_salt, request.num_computed, request.max_reused)
        if ticket is not None:
            request.reading = ticket
            self._readings[ticket] = _Reading(request, request.num_computed)

    def load(self, part: SavedPart) -> None:
        """Loads a part into the slot of the request that waits for it, if it still does."""
        reading = self._readings.get(part.ticket)
        if reading is None:
            return
        request, slot = reading.request, reading.request.slot
        assert slot is not None, f"{request.request_id} waits for the disk without a slot"
        end = min(part.end, request.max_reused)
        is_whole = end == part.end or not part.has_state
        if part.content is not None and part.start <= reading.end < end and is_whole:
            self._slots.load(slot, reading.end, end, part)
            reading.end, reading.has_state = end, part.has_state
        if part.is_last:
            self._finish(part.ticket, reading, slot)

    def drop(self, request: RequestState) -> None:
        """Stops the reading of a request that loses its slot, if it waits for one."""
        if request.reading is not None:
            del self._readings[request.reading]
            self._saved.cancel(request.reading)
            request.reading = None
            assert request.slot is not None, f"{request.request_id} waits for the disk without a slot"
            self._slots.restore(request.slot, request.num_computed)  # nothing of what was loaded

    def drop_all(self) -> None:
        """Stops all readings; those who waited for them compute the rest."""
        for reading in list(self._readings.values()):
            self.drop(reading.request)

    def forget(self, request: RequestState) -> None:
        """Has what was read for a failed request removed, so that it does no harm to others."""
        if request.num_restored:
            self._saved.forget(pack_tokens(request.token_ids[: request.num_reused]), request.options.cache_salt)

    def note_owner(self, slot: int, num_kept: int) -> None:
        """Records that a slot was given to a request, with its first `num_kept` tokens."""
        if num_kept >= self._origins.get(slot, 0):
            return
        if num_kept:
            self._origins[slot] = num_kept
        else:
            del self._origins[slot]

    def check(self) -> None:
        """Asserts that who waits has a slot, and no row in flight."""
        for ticket, reading in self._readings.items():
            request = reading.request
            assert request.reading == ticket, f"{request.request_id} waits for another reading"
            assert request.slot is not None, f"{request.request_id} waits for the disk without a slot"
            assert request.leader is None, f"{request.request_id} waits for two"
            assert not request.num_launches, f"{request.request_id} computes what is being read for it"
            assert request.num_uncomputed >= 2, f"{request.request_id} would decode before its prefix is there"

    def _finish(self, ticket: int, reading: _Reading, slot: int) -> None:
        """Lets the request go on, after what was read."""
        request = reading.request
        del self._readings[ticket]
        request.reading = None
        needs_state = self._slots.states is not None
        if reading.end <= request.num_computed or (needs_state and not reading.has_state):
            self._slots.restore(slot, request.num_computed)
            return
        is_sound = request.contents.num_sound(request.num_computed) == request.num_computed
        self._slots.restore(slot, reading.end, has_state=reading.has_state)
        request.num_restored = reading.end - request.num_computed
        request.reuse(reading.end)
        if is_sound:
            request.contents.copied(reading.end)
        self._origins[slot] = reading.end
