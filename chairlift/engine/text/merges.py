"""Finds the merges of a vocabulary that comes without them: the pairs of tokens that are a token together.

All parts of all tokens, millions for a large vocabulary, are looked up at once. For that each has a hash: a sum over
its characters, each a random number of 64 bits times a power of a base, so that the sums of the characters before both
of its ends tell the part's. Hashes of different parts are equal once in billions of trained vocabularies. A file can be
made to have such parts: that costs its own tokenizer a merge, or gives it a wrong one.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from chairlift.errors import CheckpointError, shown

_LONGEST_PIECE = 1024  # characters of a token; real ones have fewer than a hundred
_LENGTH_BITS = 11  # that a length takes
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse
_MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # of SplitMix64: https://prng.di.unimi.it/splitmix64.c
_ABSENT = -1
_FREE = np.uint64(0)  # the hash of no part: it is that of an empty text

_Integers = npt.NDArray[np.int64]
_Hashes = npt.NDArray[np.uint64]


def make_merges(tokens: Sequence[str], ranks: _Integers) -> list[tuple[str, str]]:
    """Lists all pairs of tokens that are a token together: the first rank first, then the longest first halves.

    `tokens`: each once. `ranks`: of all of them, from 0 on. CheckpointError for a token that is too long.
    """
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    if len(tokens) and lengths.max() > _LONGEST_PIECE:
        longest = tokens[int(lengths.argmax())]
        raise CheckpointError(
            f"its token {shown(longest)} has {len(longest)} characters, and {_LONGEST_PIECE} are the most"
        )
    ends = np.cumsum(lengths)
    hashes = _PartHashes("".join(tokens))
    places = _Places(hashes.of(ends - lengths, ends))
    counts = np.maximum(lengths - 1, 0)  # ways to cut each token in two
    wholes = np.repeat(np.arange(len(tokens)), counts)
    cuts = np.repeat(np.cumsum(counts), counts) - np.arange(len(wholes))  # in each token from its last character on
    middles, stops = (ends - lengths)[wholes] + cuts, ends[wholes]
    first = places.find(hashes.of((ends - lengths)[wholes], middles))
    is_pair = np.flatnonzero(first != _ABSENT)
    second = places.find(hashes.of(middles[is_pair], stops[is_pair]))
    is_pair, second = is_pair[second != _ABSENT], second[second != _ABSENT]
    first, in_rank = first[is_pair], ranks[wholes[is_pair]]
    most = 1 << _LENGTH_BITS
    shortness = (most - lengths[first]) << _LENGTH_BITS | (most - lengths[second])
    order = np.argsort(in_rank << 2 * _LENGTH_BITS | shortness, kind="stable")
    texts = np.array(tokens, dtype=object)  # through which half a million are looked up in half of the time
    return list(zip(*(texts[side[order]].tolist() for side in (first, second)), strict=True))


class _PartHashes:
    """The hashes of all parts of a text."""

    def __init__(self, text: str) -> None:
        mixed = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
        mixed += np.uint64(_BASE)
        for shift, factor in _MIXERS:
            mixed = (mixed ^ mixed >> np.uint64(shift)) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
        self._sums = np.zeros(len(mixed) + 1, np.uint64)
        np.cumsum(mixed * _powers(_BASE, len(mixed)), out=self._sums[1:])
        self._inverse = _powers(pow(_BASE, -1, 1 << 64), len(mixed) + 1)

    def of(self, starts: _Integers, stops: _Integers) -> _Hashes:
        """Returns the hash of each part: the difference of two sums, as if the part began the text."""
        return (self._sums[stops] - self._sums[starts]) * self._inverse[starts]


class _Places:
    """Finds the places of hashes in a list, by a table whose entries stand where the first bits say, or behind."""

    def __init__(self, hashes: _Hashes) -> None:
        num_bits = max(1, 2 * len(hashes)).bit_length()
        self._shift, self._mask = np.uint64(64 - num_bits), (1 << num_bits) - 1
        table = np.full(1 << num_bits, _ABSENT)
        left = np.arange(len(hashes))
        slots = self._slots_of(hashes)
        while len(left):
            is_free = table[slots] == _ABSENT
            table[slots[is_free]] = left[is_free]
            is_out = table[slots] != left
            left, slots = left[is_out], slots[is_out] + 1 & self._mask
        self._places = table
        # Beside the places: a look-up reads one number of this table, and one of the other if that is it.
        self._hashes = np.zeros(len(table), np.uint64)
        is_taken = table != _ABSENT
        self._hashes[is_taken] = hashes[table[is_taken]]

    def find(self, wanted: _Hashes) -> _Integers:
        """Returns the place of each hash, -1 for one that is not there."""
        found = np.full(len(wanted), _ABSENT)
        left, slots = np.arange(len(wanted)), self._slots_of(wanted)
        while len(left):
            there = self._hashes.take(slots)
            is_it = there == wanted
            found[left[is_it]] = self._places.take(slots[is_it])
            is_other = (there != _FREE) & ~is_it
            left, slots, wanted = left[is_other], slots[is_other] + 1 & self._mask, wanted[is_other]
        return found

    def _slots_of(self, hashes: _Hashes) -> _Integers:
        return (hashes >> self._shift).astype(np.int64)


def _powers(base: int, count: int) -> _Hashes:
    """Returns base^0, base^1, ... modulo 2^64."""
    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    return np.cumprod(factors)
