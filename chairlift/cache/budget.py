"""Accounts for the memory of each slot, from a budget of tokens, in chunks. Plain Python, no tensors.

    slot  |====== held ======|- - parked - -|
          0                                                           max_seq_len

A slot holds the tokens that its owner asked for or, if it is warm, those that stay valid. Memory that it had before
stays parked beyond these for the next owner, and is freed when another slot needs memory or the engine is idle.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from chairlift.plan import Scrub

CHUNK_TOKENS = 64
_MIN_CUT_CHUNKS = 16  # freed at a time: a cut costs a system call for each plane of the slot


def chunks_of(num_tokens: int) -> int:
    """The number of chunks that hold `num_tokens` tokens."""
    return -(-num_tokens // CHUNK_TOKENS)


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Counts the uses of a budget's tokens, in whole chunks; the rest is free."""

    num_tokens: int = 0  # the budget
    num_running: int = 0  # held by requests
    num_warm: int = 0  # held by warm slots

    @property
    def num_free(self) -> int:
        return self.num_tokens - self.num_running - self.num_warm

    @property
    def share(self) -> float:
        """The part of the budget that requests hold: 0 to 1."""
        return self.num_running / self.num_tokens if self.num_tokens else 0.0


class TokenBudget:
    """Tracks what each slot holds, and how much memory it has. Not thread-safe."""

    def __init__(self, num_slots: int, max_seq_len: int, num_tokens: int | None = None) -> None:
        """`num_tokens`: size of the budget, rounded down to chunks; None: all slots can be full.

        ValueError if a single full slot would exceed the budget: a sequence might then never finish.
        """
        slot_chunks = chunks_of(max_seq_len)
        self.num_chunks = num_slots * slot_chunks if num_tokens is None else num_tokens // CHUNK_TOKENS
        self.is_ample = self.num_chunks >= num_slots * slot_chunks  # all slots can be full
        if self.num_chunks < slot_chunks:
            raise ValueError(
                f"a cache of {num_tokens} tokens cannot hold a sequence of {max_seq_len} tokens in chunks of"
                f" {CHUNK_TOKENS}; raise the first or lower the second"
            )
        self.limits = [0] * num_slots  # by slot: tokens that its owner may write; 0 without an owner
        self._max_seq_len = max_seq_len
        self._claimed = [0] * num_slots  # in chunks, as are the next two
        self._warm = [0] * num_slots
        self._backed = [0] * num_slots  # chunks with memory: held or parked
        self._num_claimed = self._num_warm = self._num_backed = 0

    @property
    def use(self) -> CacheUse:
        return CacheUse(*(CHUNK_TOKENS * each for each in (self.num_chunks, self._num_claimed, self._num_warm)))

    @property
    def num_obtainable(self) -> int:
        """Chunks that no owner holds: they are free, parked or warm."""
        return self.num_chunks - self._num_claimed

    def num_warm_of(self, slot: int) -> int:
        """Chunks that a warm slot holds; 0 for other slots."""
        return self._warm[slot]

    def num_backed_of(self, slot: int) -> int:
        """Tokens that a slot may have memory for."""
        return min(CHUNK_TOKENS * self._backed[slot], self._max_seq_len)

    def book(self, slot: int, *, claimed: int = 0, warm: int = 0) -> None:
        """Sets what the slot holds: its owner's tokens, or warm ones. It must have memory for them."""
        num_claimed, num_warm = chunks_of(claimed), chunks_of(warm)
        assert num_claimed + num_warm <= self._backed[slot], f"slot {slot} holds what it has no memory for"
        self._num_claimed += num_claimed - self._claimed[slot]
        self._num_warm += num_warm - self._warm[slot]
        self._claimed[slot], self._warm[slot] = num_claimed, num_warm
        self.limits[slot] = min(CHUNK_TOKENS * num_claimed, self._max_seq_len)

    def num_missing(self, wanted: Mapping[int, int]) -> int:
        """Tokens that other slots must free before each claimed slot can hold `wanted[slot]`; 0: it can now."""
        growth = sum(max(0, chunks_of(num_tokens) - self._claimed[slot]) for slot, num_tokens in wanted.items())
        return CHUNK_TOKENS * max(0, growth - (self.num_chunks - self._num_claimed - self._num_warm))

    def grow(self, slot: int, num_tokens: int) -> Iterator[Scrub]:
        """Lets the slot's owner hold `num_tokens`, or more if it does already. `num_missing` must be 0 for that.

        Yields what must be scrubbed to make room; memory counts as freed when its scrub is yielded.
        """
        wanted = chunks_of(num_tokens)
        if wanted <= self._claimed[slot]:
            return
        growth = max(0, wanted - self._backed[slot])
        self._backed[slot] += growth
        self._num_backed += growth
        self.book(slot, claimed=num_tokens)
        yield from self._cut(self._num_backed - self.num_chunks, _MIN_CUT_CHUNKS)

    def cut_all(self) -> Iterator[Scrub]:
        """Frees all parked memory."""
        return self._cut(self._num_backed, self.num_chunks)

    def check(self) -> None:
        """Asserts that the sums are right, and within the budget."""
        held = [claimed + warm for claimed, warm in zip(self._claimed, self._warm, strict=True)]
        assert all(here <= backed for here, backed in zip(held, self._backed, strict=True)), "held without memory"
        assert not any(map(min, self._claimed, self._warm)), "a slot is claimed and warm"
        sums = sum(self._claimed), sum(self._warm), sum(self._backed)
        assert sums == (self._num_claimed, self._num_warm, self._num_backed), "chunks are miscounted"
        assert self._num_backed <= self.num_chunks, "there is more memory than the budget allows"

    def _cut(self, num_chunks: int, at_least: int) -> Iterator[Scrub]:
        """Frees `num_chunks` parked chunks, or all if there are fewer; at least `at_least` of a slot that has them."""
        for slot in reversed(range(len(self._backed))):  # the lowest are claimed first, so cut last
            if num_chunks <= 0:
                return
            num_parked = self._backed[slot] - self._claimed[slot] - self._warm[slot]
            if num_parked:
                num_cut, end = min(num_parked, max(num_chunks, at_least)), self.num_backed_of(slot)
                self._backed[slot] -= num_cut
                self._num_backed -= num_cut
                num_chunks -= num_cut
                yield Scrub(slot, CHUNK_TOKENS * self._backed[slot], end)
