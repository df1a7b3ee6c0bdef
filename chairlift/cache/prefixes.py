"""Which slot begins with which tokens, and which slots were copied from which. Plain Python, no tensors.

`PrefixIndex` keeps slots in the order of their tokens, as words stand in a dictionary: those that share most with a
prompt stand around the place where it would stand, and each shares no more than its neighbour that is nearer:

    slot 0  "You are ... Hi!"
    slot 4  "You are ... Tell me a joke"
                                          <- "You are ... Tell me a story" shares most with slot 4, then with 1 and 0
    slot 1  "You are ... Tell me more"

Tokens are packed, four bytes each, so that a comparison of thousands of them is one of memory. What was computed under
one `salt` is never found under another.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from operator import attrgetter
from typing import NamedTuple

_TOKEN_TYPE = "i"
_TOKEN_BYTES = array(_TOKEN_TYPE).itemsize
_MIN_COMMON_TOKENS = 128  # shorter common prefixes are not worth tracking


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as `PrefixIndex` takes them."""
    return array(_TOKEN_TYPE, token_ids).tobytes()


class SharedPrefix(NamedTuple):
    """A slot begins with the same `num_tokens` tokens as what was looked for."""

    slot: int
    num_tokens: int


class _Entry(NamedTuple):
    salt: str
    tokens: bytes
    slot: int


class PrefixIndex:
    """Slots by what they begin with. Not thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}  # by slot
        self._order: list[_Entry] = []

    def __contains__(self, slot: int) -> bool:
        return slot in self._entries

    @property
    def slots(self) -> set[int]:
        """Those that are known."""
        return set(self._entries)

    def insert(self, slot: int, tokens: bytes, salt: str = "") -> None:
        """From now on the slot holds, or will hold, these tokens, and nothing else."""
        self.remove(slot)
        self._entries[slot] = _Entry(salt, tokens, slot)
        insort(self._order, self._entries[slot])

    def remove(self, slot: int) -> None:
        """Forgets the slot, if it is known."""
        entry = self._entries.pop(slot, None)
        if entry is not None:
            del self._order[bisect_left(self._order, entry)]

    def cut(self, slot: int, num_tokens: int) -> None:
        """Forgets what a slot that is known holds beyond its first tokens."""
        entry = self._entries[slot]
        if num_tokens:
            self.insert(slot, entry.tokens[: num_tokens * _TOKEN_BYTES], entry.salt)
        else:
            self.remove(slot)

    def match(self, tokens: bytes, salt: str = "") -> Iterator[SharedPrefix]:
        """Slots that share a prefix with these tokens, the longest first. Must be used up before the index changes."""
        place = bisect_left(self._order, _Entry(salt, tokens, -1))
        sides = reversed(range(place)), range(place, len(self._order))
        return merge(*(self._shared(side, tokens, salt) for side in sides), key=attrgetter("num_tokens"), reverse=True)

    def check(self) -> None:
        """Asserts that the entries are in order."""
        assert self._order == sorted(self._entries.values()), "the order does not hold just the entries"

    def _shared(self, places: Iterable[int], shared: bytes, salt: str) -> Iterator[SharedPrefix]:
        """Along one side, away from where these tokens would stand."""
        for place in places:
            entry = self._order[place]
            if not entry.tokens.startswith(shared):
                shared = shared[: _num_common_bytes(entry.tokens, shared)]
            if entry.salt != salt or not shared:
                return
            yield SharedPrefix(entry.slot, len(shared) // _TOKEN_BYTES)


def _num_common_bytes(one: bytes, other: bytes) -> int:
    """Of the tokens with which both begin."""
    low, high = 0, min(len(one), len(other)) // _TOKEN_BYTES  # the number of equal tokens is between
    while low < high:
        middle = (low + high + 1) // 2
        begin, end = low * _TOKEN_BYTES, middle * _TOKEN_BYTES
        if one[begin:end] == other[begin:end]:
            low = middle
        else:
            high = middle - 1
    return low * _TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class CommonPrefix:
    """The first tokens of some slot are also those of this one."""

    slot: int
    num_tokens: int


class CommonPrefixes:
    """Where else the beginning of a slot can be read, because one was copied from the other.

    Attention that reads the same memory for every row finds it in the processor's caches from the second row on. Every
    chain of copies leads to one place; when that slot changes, another copy takes its part.
    """

    def __init__(self) -> None:
        self._prefixes: dict[int, CommonPrefix] = {}

    def __bool__(self) -> bool:
        return bool(self._prefixes)

    def of(self, slot: int) -> CommonPrefix:
        """That slot itself, with no tokens, if it has nothing in common with another."""
        return self._prefixes.get(slot) or CommonPrefix(slot, 0)

    def note_copy(self, source: int, target: int, num_tokens: int) -> None:
        """The first tokens of `source` are now those of `target`, whatever that held before."""
        self.cut(target, 0)
        known = self.of(source)
        self._set(target, CommonPrefix(known.slot if known.num_tokens >= num_tokens else source, num_tokens))

    def cut(self, slot: int, num_kept: int) -> None:
        """What a slot holds beyond its first tokens will be overwritten."""
        if not self._prefixes:
            return
        own = self.of(slot)
        self._set(slot, CommonPrefix(own.slot, min(own.num_tokens, num_kept)))
        losing = {
            each: prefix.num_tokens
            for each, prefix in self._prefixes.items()
            if prefix.slot == slot and prefix.num_tokens > num_kept
        }
        if losing:
            heir = max(losing, key=lambda each: losing[each])
            for each, num_tokens in losing.items():
                self._set(each, CommonPrefix(heir, 0 if each == heir else num_tokens))

    def num_read(self, slot: int, readers: Collection[int]) -> int:
        """Tokens of a slot that some of these read there as their own."""
        return max(
            (own.num_tokens for each, own in self._prefixes.items() if own.slot == slot and each in readers), default=0
        )

    def _set(self, slot: int, prefix: CommonPrefix) -> None:
        if prefix.num_tokens >= _MIN_COMMON_TOKENS:
            self._prefixes[slot] = prefix
        else:
            self._prefixes.pop(slot, None)
