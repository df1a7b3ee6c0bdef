"""How much memory slots have: the books of a budget of tokens, in chunks. Plain Python, no tensors.

    slot  |====== held ======|- - parked - -|
          0                                                           max_seq_len

A slot holds what its owner asked for, or what stays valid in a warm one. Behind that, memory from before stays parked:
the slot will be claimed again. It is given back when memory is wanted elsewhere, or when all rests.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

CHUNK_TOKENS = 64
_MIN_CUT_CHUNKS = 16  # given back at a time: a cut costs a system call for each plane of the slot


def chunks_of(num_tokens: int) -> int:
    """Chunks that so many tokens take."""
    return -(-num_tokens // CHUNK_TOKENS)


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What the tokens of a budget are used for, in whole chunks; the rest is free."""

    num_tokens: int = 0  # the budget
    num_running: int = 0  # held by requests
    num_warm: int = 0  # held by slots without request

    @property
    def num_free(self) -> int:
        return self.num_tokens - self.num_running - self.num_warm

    @property
    def share(self) -> float:
        """The part of the budget that requests hold: 0 to 1."""
        return self.num_running / self.num_tokens if self.num_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Scrub:
    """From one token to before another a slot reads as zeros, and its memory there is given back.

    It may hold NaN, and attention multiplies what it masks; or the memory is wanted elsewhere. Behind the end nothing
    was written that has not been scrubbed or is not sound.
    """

    slot: int
    start: int
    end: int


class TokenBudget:
    """What slots hold, and how far each has memory. Not thread-safe."""

    def __init__(self, num_slots: int, max_seq_len: int, num_tokens: int | None = None) -> None:
        """`num_tokens`: of the budget, rounded down to chunks; None: as many as all slots have in full.

        ValueError if a single slot in full would take more: then a sequence might never end.
        """
        slot_chunks = chunks_of(max_seq_len)
        self.num_chunks = num_slots * slot_chunks if num_tokens is None else num_tokens // CHUNK_TOKENS
        self.is_ample = self.num_chunks >= num_slots * slot_chunks  # all slots can be full
        if self.num_chunks < slot_chunks:
            raise ValueError(
                f"a cache of {num_tokens} tokens cannot hold a sequence of {max_seq_len} tokens in chunks of"
                f" {CHUNK_TOKENS}; raise the first or lower the second"
            )
        self.limits = [0] * num_slots  # by slot: tokens that its owner may write; 0 without owner
        self._max_seq_len = max_seq_len
        self._claimed = [0] * num_slots  # chunks, as below
        self._warm = [0] * num_slots
        self._backed = [0] * num_slots  # that have memory: held or parked
        self._num_claimed = self._num_warm = self._num_backed = 0

    @property
    def use(self) -> CacheUse:
        return CacheUse(*(CHUNK_TOKENS * each for each in (self.num_chunks, self._num_claimed, self._num_warm)))

    @property
    def num_obtainable(self) -> int:
        """Chunks that no owner holds: they are free, parked or warm."""
        return self.num_chunks - self._num_claimed

    def num_warm_of(self, slot: int) -> int:
        """Chunks that a warm slot holds; 0 of others."""
        return self._warm[slot]

    def num_backed_of(self, slot: int) -> int:
        """Tokens that a slot may have memory for."""
        return min(CHUNK_TOKENS * self._backed[slot], self._max_seq_len)

    def book(self, slot: int, *, claimed: int = 0, warm: int = 0) -> None:
        """What the slot holds from now on: tokens of an owner or warm ones, as far as it has memory."""
        num_claimed, num_warm = chunks_of(claimed), chunks_of(warm)
        assert num_claimed + num_warm <= self._backed[slot], f"slot {slot} holds what it has no memory for"
        self._num_claimed += num_claimed - self._claimed[slot]
        self._num_warm += num_warm - self._warm[slot]
        self._claimed[slot], self._warm[slot] = num_claimed, num_warm
        self.limits[slot] = min(CHUNK_TOKENS * num_claimed, self._max_seq_len)

    def num_missing(self, wanted: Mapping[int, int]) -> int:
        """Tokens that other slots must cease to hold before claimed slots can hold so many each; 0: they can."""
        growth = sum(max(0, chunks_of(num_tokens) - self._claimed[slot]) for slot, num_tokens in wanted.items())
        return CHUNK_TOKENS * max(0, growth - (self.num_chunks - self._num_claimed - self._num_warm))

    def grow(self, slot: int, num_tokens: int) -> Iterator[Scrub]:
        """The slot's owner holds so many tokens from now on, if not more already. Nothing may be missing for that.

        What must be given back for it comes out, and counts as given back then.
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
        """All that is parked is given back."""
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
        """Gives back so many parked chunks, or all; of a slot not fewer than `at_least`, if it has them."""
        for slot in reversed(range(len(self._backed))):  # the lowest will be claimed first
            if num_chunks <= 0:
                return
            num_parked = self._backed[slot] - self._claimed[slot] - self._warm[slot]
            if num_parked:
                num_cut, end = min(num_parked, max(num_chunks, at_least)), self.num_backed_of(slot)
                self._backed[slot] -= num_cut
                self._num_backed -= num_cut
                num_chunks -= num_cut
                yield Scrub(slot, CHUNK_TOKENS * self._backed[slot], end)
