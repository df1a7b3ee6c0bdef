"""The books of the cache: which slots are claimed, how long each is, what is in flight. Plain Python, no tensors.

A slot is free or claimed. A claimed slot has a committed length, and is in flight between the `reserve` that
announces writes to it and the `commit` that says how many of them count.

                       committed                 reserved: new_tokens + num_steps - 1
    slot  |=============================|- - - - - - - - - - - - - -|                    |
          0                          length            length + reserved            max_seq_len

Every public method takes the lock, changes all of its rows or none, and may be called from any thread.
"""

import heapq
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.errors import CacheFull

_tickets = itertools.count()  # one count for all ledgers, so that no reservation fits another one's


@dataclass(frozen=True, slots=True)
class Reservation:
    """Writes announced for some slots: row i may write up to `num_reserved[i]` tokens after `lengths[i]`."""

    ticket: int  # tells this reservation from an earlier one of the same slots
    seq_ids: tuple[int, ...]
    lengths: tuple[int, ...]
    num_reserved: tuple[int, ...]


class SlotLedger:
    """Owns the ids `[0, num_slots)` and the committed length of every claimed one."""

    def __init__(self, num_slots: int, max_seq_len: int) -> None:
        if num_slots < 1 or max_seq_len < 1:
            raise ValueError(f"need at least one slot of one token, not {num_slots} slots of {max_seq_len}")
        self.num_slots = num_slots
        self.max_seq_len = max_seq_len
        self._lock = threading.RLock()
        self._free = list(range(num_slots))  # a heap: the lowest id is claimed first, which keeps batches dense
        self._lengths: dict[int, int] = {}  # claimed slot -> committed tokens
        self._in_flight: dict[int, int] = {}  # slot -> ticket

    @property
    def num_free(self) -> int:
        with self._lock:
            return len(self._free)

    def contains(self, seq_id: int) -> bool:
        """True if the slot is claimed; False also for ids out of range."""
        with self._lock:
            return seq_id in self._lengths

    def length_of(self, seq_id: int) -> int:
        """Committed tokens of a claimed slot. ValueError if it is not claimed."""
        with self._lock:
            self._check_claimed(seq_id)
            return self._lengths[seq_id]

    def claim(self, batch_size: int) -> list[int]:
        """Claims that many slots, each of length 0: all of them, or none and `CacheFull`."""
        with self._lock:
            if batch_size < 0:
                raise ValueError(f"cannot claim {batch_size} slots")
            if batch_size > len(self._free):
                raise CacheFull(batch_size, len(self._free))
            seq_ids = [heapq.heappop(self._free) for _ in range(batch_size)]
            self._lengths.update(dict.fromkeys(seq_ids, 0))
            return seq_ids

    def claim_slot(self, seq_id: int) -> None:
        """Claims that very slot. ValueError if it is taken or out of range."""
        with self._lock:
            self._check_in_range(seq_id)
            if seq_id in self._lengths:
                raise ValueError(f"slot {seq_id} is already claimed")
            self._free.remove(seq_id)
            heapq.heapify(self._free)
            self._lengths[seq_id] = 0

    def release(self, seq_id: int) -> None:
        """Frees a claimed slot. ValueError if it is not claimed, or in flight."""
        with self._lock:
            self._check_claimed(seq_id)
            self._check_idle(seq_id)
            del self._lengths[seq_id]
            heapq.heappush(self._free, seq_id)

    def reserve(
        self, seq_ids: Sequence[int], new_tokens: Sequence[int] | None = None, num_steps: int = 1
    ) -> Reservation:
        """Announces `new_tokens[i]` writes to row i (1 each if None), then one more per further step.

        ValueError, before anything changes: an id that is out of range, not claimed, given twice or in flight; a
        row that would overrun its slot; counts that do not match.
        """
        counts = [1] * len(seq_ids) if new_tokens is None else list(new_tokens)
        if len(counts) != len(seq_ids):
            raise ValueError(f"{len(seq_ids)} sequences, but new_tokens has {len(counts)} entries")
        if num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, not {num_steps}")
        with self._lock:
            seen: set[int] = set()
            for seq_id, count in zip(seq_ids, counts, strict=True):
                self._check_row(seq_id, count, num_steps, seen)
                seen.add(seq_id)
            ticket = next(_tickets)
            self._in_flight.update(dict.fromkeys(seq_ids, ticket))
            return Reservation(
                ticket=ticket,
                seq_ids=tuple(seq_ids),
                lengths=tuple(self._lengths[seq_id] for seq_id in seq_ids),
                num_reserved=tuple(count + num_steps - 1 for count in counts),
            )

    def commit(self, valid_lengths: Sequence[int], reservation: Reservation) -> None:
        """Row i grows by `valid_lengths[i]`, at most what was reserved; the rows are no longer in flight.

        ValueError, before anything changes: a reservation that is not in flight (any more), a wrong count, a
        negative length, or more than was reserved.
        """
        if len(valid_lengths) != len(reservation.seq_ids):
            raise ValueError(
                f"{len(reservation.seq_ids)} rows are in flight, but valid_lengths has {len(valid_lengths)} entries"
            )
        with self._lock:
            rows = list(zip(reservation.seq_ids, valid_lengths, reservation.num_reserved, strict=True))
            for seq_id, valid, reserved in rows:
                if self._in_flight.get(seq_id) != reservation.ticket:
                    raise ValueError(f"slot {seq_id} is not in flight with these cache inputs")
                if not 0 <= valid <= reserved:
                    raise ValueError(f"slot {seq_id}: cannot commit {valid} tokens, {reserved} were reserved")
            for seq_id, valid, _ in rows:
                self._lengths[seq_id] += valid
                del self._in_flight[seq_id]

    def abandon(self, seq_ids: Sequence[int]) -> None:
        """Ends what is in flight for these slots, if anything is; nothing of it counts."""
        with self._lock:
            for seq_id in seq_ids:
                self._in_flight.pop(seq_id, None)

    def check(self) -> None:
        """Asserts the invariants of the books. Cheap enough to run whenever the engine is idle."""
        with self._lock:
            free, claimed = set(self._free), set(self._lengths)
            assert len(free) == len(self._free), "a slot is free twice"
            assert not free & claimed, f"slots both free and claimed: {free & claimed}"
            assert free | claimed == set(range(self.num_slots)), "free and claimed slots are not all slots"
            assert all(0 <= n <= self.max_seq_len for n in self._lengths.values()), "a length out of range"
            assert set(self._in_flight) <= claimed, "a slot is in flight but not claimed"

    def _check_row(self, seq_id: int, count: int, num_steps: int, seen: set[int]) -> None:
        self._check_claimed(seq_id)
        if seq_id in seen:
            raise ValueError(f"slot {seq_id} is given twice")
        self._check_idle(seq_id)
        if count < 0:
            raise ValueError(f"slot {seq_id}: cannot write {count} tokens")
        end = self._lengths[seq_id] + count + num_steps - 1
        if end > self.max_seq_len:
            raise ValueError(
                f"slot {seq_id} would overrun: {self._lengths[seq_id]} tokens held, {count} new and"
                f" {num_steps - 1} further steps make {end}, and a slot holds {self.max_seq_len}"
            )

    def _check_in_range(self, seq_id: int) -> None:
        if not 0 <= seq_id < self.num_slots:
            raise ValueError(f"slot {seq_id} is not in [0, {self.num_slots})")

    def _check_claimed(self, seq_id: int) -> None:
        self._check_in_range(seq_id)
        if seq_id not in self._lengths:
            raise ValueError(f"slot {seq_id} is not claimed")

    def _check_idle(self, seq_id: int) -> None:
        if seq_id in self._in_flight:
            raise ValueError(f"slot {seq_id} is in flight")
