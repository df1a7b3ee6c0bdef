"""The cache's bookkeeping: which slots are in flight, and which states are copied, beside what `pool.py` knows.

A slot is in flight between the `reserve` that announces writes to it and the `commit` that says how many of them count:

                       committed                 reserved: new_tokens + num_steps - 1
    slot  |=============================|- - - - - - - - - - - - - -|                    |
          0                          length            length + reserved            max_seq_len

Plain Python, no tensors.
"""

import itertools
from collections.abc import Iterable, Sequence

from chairlift.cache.pool import SlotPool
from chairlift.cache.state_books import StateBooks
from chairlift.plan import Reservation, SavedPart, SlotLoad, StateCopy

_tickets = itertools.count()  # shared by all ledgers, so that no reservation fits another ledger


class SlotLedger(SlotPool):
    """Slots and their launches. Thread-safe, as `SlotPool` is."""

    def reserve(
        self,
        seq_ids: Sequence[int],
        new_tokens: Sequence[int] | None = None,
        num_steps: int = 1,
        num_tentative: Sequence[int] | None = None,
    ) -> Reservation:
        """Announces `new_tokens[i]` writes to row i (1 each if None), then one more per further step.

        `num_tentative[i]`: how many of the new tokens at the end of row i a recurrent state does not take (0 each if
        None), so that they can be taken back (`rewind`).
        ValueError, before anything changes: an id that is out of range, not claimed, given twice or in flight; a
        row that would overrun its slot, for which there is no memory, or whose state is not that of its tokens; counts
        that do not match.
        """
        counts = [1] * len(seq_ids) if new_tokens is None else list(new_tokens)
        if len(counts) != len(seq_ids):
            raise ValueError(f"{len(seq_ids)} sequences, but new_tokens has {len(counts)} entries")
        if num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, not {num_steps}")
        with self._lock:
            num_replayed, tentative = self._plan_states(seq_ids, counts, num_steps, num_tentative)
            self._check_rows(seq_ids, counts, num_steps)
            ticket = next(_tickets)
            self._in_flight.update(dict.fromkeys(seq_ids, ticket))
            return Reservation(
                ticket=ticket,
                seq_ids=tuple(seq_ids),
                lengths=tuple(self._lengths[seq_id] for seq_id in seq_ids),
                num_reserved=tuple(count + num_steps - 1 for count in counts),
                common_prefixes=tuple(map(self._common.of, seq_ids)) if self._common else (),
                num_replayed=num_replayed,
                num_tentative=tentative,
            )

    def commit(self, valid_lengths: Sequence[int], reservation: Reservation) -> None:
        """Row i grows by `valid_lengths[i]`, at most what was reserved; the rows are no longer in flight.

        ValueError, before anything changes: a reservation that is not in flight (any more), a wrong count, a
        negative length, or more than was reserved.
        """
        seq_ids = reservation.seq_ids
        if len(valid_lengths) != len(seq_ids):
            raise ValueError(f"{len(seq_ids)} rows are in flight, but valid_lengths has {len(valid_lengths)} entries")
        with self._lock:
            ticket, lengths, in_flight = reservation.ticket, self._lengths, self._in_flight
            for seq_id, valid, reserved in zip(seq_ids, valid_lengths, reservation.num_reserved, strict=True):
                if in_flight.get(seq_id) != ticket:
                    raise ValueError(f"slot {seq_id} is not in flight with these cache inputs")
                if not 0 <= valid <= reserved:
                    raise ValueError(f"slot {seq_id}: cannot commit {valid} tokens, {reserved} were reserved")
            for seq_id, valid in zip(seq_ids, valid_lengths, strict=True):
                lengths[seq_id] += valid
                del in_flight[seq_id]
            if self.states is not None:
                self._advance_states(self.states, reservation)

    def rewind(self, seq_id: int, num_tokens: int = 1) -> None:
        """Uncommits the last `num_tokens` of a claimed slot. ValueError if it is in flight or has fewer."""
        with self._lock:
            self._check_claimed(seq_id)
            self._check_idle(seq_id)
            held = self._lengths[seq_id]
            if not 0 <= num_tokens <= held:
                raise ValueError(f"slot {seq_id}: cannot take {num_tokens} tokens back, {held} are held")
            self._lengths[seq_id] -= num_tokens
            self._common.cut(seq_id, self._lengths[seq_id])
            self._cut_states([seq_id], self._lengths[seq_id])

    def load(self, seq_id: int, start: int, end: int, part: SavedPart) -> None:
        """Writes tokens of a part behind what a claimed slot has. They count once `restore` says so.

        ValueError if the slot is not claimed or is in flight, if these tokens do not follow those that are committed
        or loaded, or are not in the part, or if there is no memory for them.
        """
        with self._lock:
            self._check_claimed(seq_id)
            self._check_idle(seq_id)
            num_loaded = self.num_loaded(seq_id)
            if not part.start <= start == num_loaded <= end <= part.end:
                raise ValueError(
                    f"slot {seq_id}: tokens {start} to {end} of a part from {part.start} to {part.end} cannot be loaded"
                    f" behind {num_loaded}"
                )
            if end > self.budget.limits[seq_id]:
                raise ValueError(self._no_memory([seq_id]))
            self._loaded[seq_id] = end
            self.owed.append(SlotLoad(seq_id, start, end, part))

    def num_loaded(self, seq_id: int) -> int:
        """Tokens that a slot has in one piece, with those that were loaded and do not count yet."""
        with self._lock:
            return self._loaded.get(seq_id) or self.num_valid(seq_id)

    def restore(self, seq_id: int, num_tokens: int, *, has_state: bool = False) -> None:
        """Commits the first `num_tokens` of what was loaded, and drops the rest.

        `has_state`: a recurrent state was loaded with the last of them. ValueError if the slot is not claimed or is in
        flight, if fewer were loaded or more are committed, or if there are recurrent states and none was loaded.
        """
        with self._lock:
            self._check_claimed(seq_id)
            self._check_idle(seq_id)
            length, num_loaded = self._lengths[seq_id], self.num_loaded(seq_id)
            if not length <= num_tokens <= num_loaded:
                raise ValueError(
                    f"slot {seq_id} has {length} tokens and {num_loaded} with those loaded: not {num_tokens}"
                )
            if num_tokens > length and self.states is not None:
                if not has_state:
                    raise ValueError(f"slot {seq_id} cannot go on after {num_tokens} tokens without a state")
                self.states.stand(seq_id, num_tokens)
            self._lengths[seq_id] = num_tokens
            self._loaded.pop(seq_id, None)

    def copy_state(self, source: int, target: int) -> None:
        """Copies the recurrent state in row `source` to a claimed slot: that of all its committed tokens.

        If the slot is the source, it has the state already. ValueError if there are no states, or the slot is not
        claimed or is in flight.
        """
        with self._lock:
            self._check_claimed(target)
            self._check_idle(target)
            if self.states is None:
                raise ValueError(f"no state can be copied to slot {target}, since no layer has one")
            self.states.stand(target, self._lengths[target])
            if source != target:
                self.owed.append(StateCopy(source, target))

    def keep_state(self, seq_id: int, row: int) -> None:
        """Copies a claimed slot's recurrent state, as the launches before leave it, to the row of a snapshot."""
        with self._lock:
            self._check_claimed(seq_id)
            self.owed.append(StateCopy(seq_id, row))

    def forget_state(self, seq_id: int) -> None:
        """Records that a claimed slot's recurrent state, if it has one, is not known (any more)."""
        with self._lock:
            self._check_claimed(seq_id)
            self._cut_states([seq_id], 0)

    def stop_state(self, seq_id: int, num_tokens: int) -> None:
        """Records that a claimed slot's recurrent state stopped after `num_tokens` tokens, before the end token."""
        with self._lock:
            self._check_claimed(seq_id)
            if self.states is not None:
                self.states.stop(seq_id, num_tokens)

    def abandon(self, seq_ids: Iterable[int]) -> None:
        """Cancels the reservations in flight for these slots, if there are any; nothing is committed."""
        with self._lock:
            for seq_id in seq_ids:
                if self._in_flight.pop(seq_id, None) is not None:
                    self._cut_states([seq_id], 0)  # the state may have moved

    def _plan_states(
        self, seq_ids: Sequence[int], counts: Sequence[int], num_steps: int, num_tentative: Sequence[int] | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The pending inputs that rows replay, and their tentative tokens; ValueError as `reserve` does."""
        tentative = (0,) * len(seq_ids) if num_tentative is None else tuple(num_tentative)
        if len(tentative) != len(seq_ids):
            raise ValueError(f"{len(seq_ids)} sequences, but num_tentative has {len(tentative)} entries")
        if self.states is None:
            if any(tentative):
                raise ValueError("tokens can only be tentative if layers have recurrent states")
            return (), ()
        for seq_id, count, num_last in zip(seq_ids, counts, tentative, strict=True):
            self._check_claimed(seq_id)
            self.states.check_tentative(seq_id, num_last, count, num_steps)
        return tuple(self.states.num_replayed(seq_id, self._lengths[seq_id]) for seq_id in seq_ids), tentative

    def _advance_states(self, states: StateBooks, reservation: Reservation) -> None:
        """Moves the states of these rows to where the launch leaves them."""
        rows = zip(
            reservation.seq_ids,
            reservation.lengths,
            reservation.num_reserved,
            reservation.num_tentative,
            strict=True,
        )
        for seq_id, length, num_reserved, num_last in rows:
            states.stand(seq_id, length + num_reserved - num_last, num_last)
            states.cut(seq_id, self._lengths[seq_id])

    def _check_rows(self, seq_ids: Sequence[int], counts: Sequence[int], num_steps: int) -> None:
        """Raises as `reserve` does. Once all rows are known to be valid, those with too little memory get more."""
        lengths, in_flight, limits, further = self._lengths, self._in_flight, self.budget.limits, num_steps - 1
        growing: dict[int, int] = {}  # slot -> tokens
        for seq_id, count in zip(seq_ids, counts, strict=True):
            if (
                seq_id in lengths
                and seq_id not in in_flight
                and 0 <= count <= limits[seq_id] - further - lengths[seq_id]
            ):
                continue
            growing[seq_id] = self._check_row(seq_id, count, num_steps)
        if len(set(seq_ids)) < len(seq_ids):
            twice = next(seq_id for seq_id in seq_ids if seq_ids.count(seq_id) > 1)
            raise ValueError(f"slot {twice} is given twice")
        if growing and self.budget.num_missing(growing):
            raise ValueError(self._no_memory(list(growing)))
        for seq_id, num_tokens in growing.items():
            self.owed += self.budget.grow(seq_id, num_tokens)

    def _check_row(self, seq_id: int, count: int, num_steps: int) -> int:
        """Returns the tokens that the slot will hold. ValueError if the row is invalid."""
        self._check_claimed(seq_id)
        self._check_idle(seq_id)
        if count < 0:
            raise ValueError(f"slot {seq_id}: cannot write {count} tokens")
        held = self._lengths[seq_id]
        end = held + count + num_steps - 1
        if end > self.max_seq_len:
            raise ValueError(
                f"slot {seq_id} would overrun: {held} tokens held, {count} new and {num_steps - 1} further steps make"
                f" {end}, and a slot holds {self.max_seq_len}"
            )
        return end
