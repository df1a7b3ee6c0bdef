"""Keeps which slots are free, warm or claimed, how long each is, and what memory it has. Plain Python, no tensors.

A claimed slot has a committed length. A warm slot has no owner, but its first tokens stay valid: they can be claimed
with the slot, or copied. When no slot is free, warm ones are claimed like free ones. There need not be memory for
`max_seq_len` tokens in every slot: all slots share a budget (`budget.py`), and owners ask for memory. If layers have
recurrent states, `state_books.py` knows how far each has come.

The pool runs ahead of the tensors: pending copies and scrubs are queued in `owed`. A plan takes them along,
so that they are performed in this order before it is computed, or the cache's manager performs them (`settle`).

Every public method takes the lock, changes all of its slots or none, and may be called from any thread.
"""

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Iterable

from chairlift.cache.budget import TokenBudget
from chairlift.cache.prefixes import CommonPrefixes
from chairlift.cache.state_books import StateBooks
from chairlift.errors import CacheFull
from chairlift.plan import Job, Scrub, SlotCopy, StateScrub


class SlotPool:
    """Owns the ids `[0, num_slots)` and the committed length of every claimed one."""

    def __init__(
        self, num_slots: int, max_seq_len: int, max_tokens: int | None = None, states: StateBooks | None = None
    ) -> None:
        """`max_tokens`: tokens that all slots together have memory for; None: all can be full. See `TokenBudget`.

        `states` None: no layer has a recurrent state.
        """
        if num_slots < 1 or max_seq_len < 1:
            raise ValueError(f"need at least one slot of one token, not {num_slots} slots of {max_seq_len}")
        self.budget = TokenBudget(num_slots, max_seq_len, max_tokens)
        self.num_slots = num_slots
        self.max_seq_len = max_seq_len
        self.states = states
        self.owed: deque[Job] = deque()  # pending work on the tensors, in this order
        self._lock = threading.RLock()
        self._free = list(range(num_slots))  # a heap: claiming the lowest id first keeps batches dense
        self._warm: dict[int, int] = {}  # slot -> tokens that are still valid, the least recently used slot first
        self._lengths: dict[int, int] = {}  # claimed slot -> committed tokens
        self._in_flight: dict[int, int] = {}  # slot -> ticket
        self._loaded: dict[int, int] = {}  # claimed slot -> tokens, with those that were loaded and do not count yet
        self._common = CommonPrefixes()

    @property
    def num_free(self) -> int:
        """Slots without an owner and without valid tokens."""
        with self._lock:
            return len(self._free)

    @property
    def slots_remaining(self) -> int:
        """Slots that can still be claimed: free and warm ones."""
        with self._lock:
            return len(self._free) + len(self._warm)

    @property
    def warm(self) -> dict[int, int]:
        """The valid tokens of each warm slot; the least recently used slot comes first."""
        with self._lock:
            return dict(self._warm)

    @property
    def claimed(self) -> set[int]:
        """All claimed slots."""
        with self._lock:
            return set(self._lengths)

    def contains(self, seq_id: int) -> bool:
        """True if the slot is claimed; False also for ids out of range."""
        with self._lock:
            return seq_id in self._lengths

    def cache_length_of(self, seq_id: int) -> int:
        """Committed tokens of a claimed slot. ValueError if it is not claimed."""
        with self._lock:
            self._check_claimed(seq_id)
            return self._lengths[seq_id]

    def num_valid(self, seq_id: int) -> int:
        """Tokens that can be copied from a slot: those committed, or still valid in a warm one; 0 of a free one."""
        with self._lock:
            return self._lengths.get(seq_id) or self._warm.get(seq_id, 0)

    def claim(self, batch_size: int) -> list[int]:
        """Claims `batch_size` slots of length 0: all of them, or none (`CacheFull`).

        Free slots come first, by id; then warm ones, the least recently used first.
        """
        with self._lock:
            if batch_size < 0:
                raise ValueError(f"cannot claim {batch_size} slots")
            if batch_size > self.slots_remaining:
                raise CacheFull(batch_size, self.slots_remaining)
            num_free = min(batch_size, len(self._free))
            seq_ids = [heapq.heappop(self._free) for _ in range(num_free)]
            seq_ids += itertools.islice(self._warm, batch_size - num_free)
            for seq_id in seq_ids[num_free:]:
                del self._warm[seq_id]
                self._common.cut(seq_id, 0)
                self.budget.book(seq_id)
            self._lengths.update(dict.fromkeys(seq_ids, 0))
            self._cut_states(seq_ids, 0)
            return seq_ids

    def claim_slot(self, seq_id: int, num_kept: int = 0) -> None:
        """Claims this slot; a warm one keeps its first `num_kept` tokens.

        ValueError if it is claimed or out of range, or has fewer valid tokens.
        """
        with self._lock:
            self._check_in_range(seq_id)
            if seq_id in self._lengths:
                raise ValueError(f"slot {seq_id} is already claimed")
            self._check_num_valid(seq_id, num_kept)
            if seq_id in self._warm:
                del self._warm[seq_id]
                self._common.cut(seq_id, num_kept)
            else:
                self._free.remove(seq_id)
                heapq.heapify(self._free)
            self._lengths[seq_id] = num_kept
            self._cut_states([seq_id], num_kept)
            self.budget.book(seq_id, claimed=num_kept)

    def grow(self, seq_id: int, num_tokens: int) -> int:
        """Gives a claimed slot memory for its first `num_tokens`. ValueError if it is not claimed.

        Returns 0, or how many tokens warm slots must free first; in that case nothing has changed.
        """
        with self._lock:
            self._check_claimed(seq_id)
            num_missing = self.budget.num_missing({seq_id: num_tokens})
            if not num_missing:
                self.owed += self.budget.grow(seq_id, num_tokens)
            return num_missing

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """Copies the first `num_tokens` tokens of one slot to another, and sets its committed length to `num_tokens`.

        A warm source counts as used. ValueError if the source has fewer valid tokens, or the target is not claimed, is
        in flight or is the source, or there is no memory for them.
        """
        with self._lock:
            self._check_claimed(target)
            self._check_idle(target)
            if source == target:
                raise ValueError(f"slot {source} cannot be copied to itself")
            self._check_num_valid(source, num_tokens)
            if self.grow(target, num_tokens):
                raise ValueError(self._no_memory([target]))
            if source in self._warm:
                self._warm[source] = self._warm.pop(source)  # the most recently used is the last
            self._lengths[target] = num_tokens
            self._cut_states([target], 0)
            self._common.note_copy(source, target, num_tokens)
            self.owed.append(SlotCopy(source, target, num_tokens))

    def scrub(self, seq_id: int, start: int) -> None:
        """Zeroes a claimed slot from `start` to the end of what its owner may write, before the next forward pass."""
        with self._lock:
            self._check_claimed(seq_id)
            self.owed.append(Scrub(seq_id, start, self.budget.limits[seq_id]))

    def release(self, seq_id: int, num_kept: int = 0) -> None:
        """Releases a claimed slot: it becomes warm if its first `num_kept` tokens stay valid, else free.

        ValueError if it is not claimed, in flight, or has fewer tokens.
        """
        with self._lock:
            self._check_claimed(seq_id)
            self._check_idle(seq_id)
            self._check_num_valid(seq_id, num_kept)
            del self._lengths[seq_id]
            self._loaded.pop(seq_id, None)
            self._keep(seq_id, num_kept)

    def shrink_warm(self, seq_id: int, num_kept: int) -> None:
        """Only the first `num_kept` tokens of a warm slot stay valid. ValueError if it is not warm, or has fewer."""
        with self._lock:
            if seq_id not in self._warm:
                raise ValueError(f"slot {seq_id} is not warm")
            self._check_num_valid(seq_id, num_kept)
            self._keep(seq_id, num_kept)

    def num_read_by_others(self, seq_id: int) -> int:
        """Tokens of a slot that claimed slots share with it, and read there."""
        with self._lock:
            return self._common.num_read(seq_id, self._lengths)

    def give_back(self) -> None:
        """Frees all memory that holds nothing valid and is not reserved."""
        with self._lock:
            self.owed += self.budget.cut_all()
            if self.states is not None:
                self.owed += map(StateScrub, self.states.reclaim_unused(self._lengths))

    def performed(self, num_jobs: int) -> None:
        """Removes the first jobs of the pending work, once they have been performed."""
        with self._lock:
            for _ in range(num_jobs):
                self.owed.popleft()

    def check(self) -> None:
        """Asserts the ledger's invariants. Cheap enough to run whenever the engine is idle."""
        with self._lock:
            free, warm, claimed = set(self._free), set(self._warm), set(self._lengths)
            assert len(free) == len(self._free), "a slot is free twice"
            assert len(free) + len(warm) + len(claimed) == self.num_slots, "a slot is in two states, or in none"
            assert free | warm | claimed == set(range(self.num_slots)), "free, warm and claimed slots are not all slots"
            assert all(0 <= n <= self.max_seq_len for n in self._lengths.values()), "a length out of range"
            assert all(0 < n <= self.max_seq_len for n in self._warm.values()), "a warm slot's length out of range"
            assert set(self._in_flight) <= claimed, "a slot is in flight but not claimed"
            assert set(self._loaded) <= claimed - set(self._in_flight), "a slot is loaded and has no owner, or computes"
            self.budget.check()
            limits = self.budget.limits
            assert all(n <= limits[seq_id] for seq_id, n in self._lengths.items()), "tokens without memory"
            assert not any(limits[seq_id] for seq_id in free | warm), "a slot without owner has a limit"
            if self.states is not None:
                self.states.snapshots.check()

    def _keep(self, seq_id: int, num_kept: int) -> None:
        """Makes a slot without an owner warm with these tokens, or free. A warm slot keeps its LRU position."""
        self._common.cut(seq_id, num_kept)
        self._cut_states([seq_id], num_kept)
        self.budget.book(seq_id, warm=num_kept)
        if num_kept:
            self._warm[seq_id] = num_kept
        else:
            self._warm.pop(seq_id, None)
            heapq.heappush(self._free, seq_id)

    def _cut_states(self, seq_ids: Iterable[int], num_tokens: int) -> None:
        """Only the first `num_tokens` tokens of these slots count from here on."""
        if self.states is not None:
            for seq_id in seq_ids:
                self.states.cut(seq_id, num_tokens)

    def _no_memory(self, seq_ids: list[int]) -> str:
        use = self.budget.use
        names = ", ".join(map(str, seq_ids))
        return (
            f"slot {names}: there is no memory for more tokens: {use.num_running} of {use.num_tokens} are held by"
            f" claimed slots and {use.num_warm} by warm ones; release or free some"
        )

    def _check_num_valid(self, seq_id: int, num_tokens: int) -> None:
        num_valid = self.num_valid(seq_id)
        if not 0 <= num_tokens <= num_valid:
            raise ValueError(f"slot {seq_id} has {num_valid} valid tokens, not {num_tokens}")

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
