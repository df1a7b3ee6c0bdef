"""Recurrent states that are kept for later prompts: which tokens each has taken, and which is evicted next.

A state is of use where a prompt begins with all of its tokens, so they are found like the tokens of slots. When all
rows are taken, waypoints are evicted first, then the others, the least recently used first. A waypoint is kept only in
case that a prompt parts from another just behind it; once one did, it is like the others.

Plain Python, no tensors; not thread-safe.
"""

from collections.abc import Callable
from dataclasses import dataclass

from chairlift.cache.prefixes import PrefixIndex, count_tokens


@dataclass(frozen=True, slots=True)
class StateSource:
    """A row that holds the state after the first `num_tokens` tokens of a prompt."""

    row: int
    num_tokens: int


class Snapshots:
    """Rows of states behind those of the slots, found by the tokens that the states have taken."""

    def __init__(self, first_row: int, num_rows: int) -> None:
        self._index = PrefixIndex()
        self._rows = range(first_row, first_row + num_rows)
        self._free = list(reversed(self._rows))
        self._lengths: dict[int, int] = {}  # the least recently used comes first
        self._waypoints: dict[int, None] = {}  # likewise
        self._written = set[int]()  # rows that take memory

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def capacity(self) -> int:
        """The number of states that can be kept."""
        return len(self._rows)

    def find(self, tokens: bytes, salt: str, most: int) -> StateSource | None:
        """Finds the longest state that has taken nothing but the first tokens of these, and at most `most`."""
        found: StateSource | None = None
        for prefix in self._index.match(tokens, salt):
            if found is not None and prefix.num_tokens <= found.num_tokens:
                break
            longest = min(prefix.num_tokens, most)
            for row in prefix.slots:
                length = self._lengths[row]
                if length <= longest and (found is None or length > found.num_tokens):
                    found = StateSource(row, length)
        return found

    def count(self, tokens: bytes, salt: str) -> int:
        """Counts the states that have taken nothing but the first tokens of these."""
        found = set[int]()
        for prefix in self._index.match(tokens, salt):
            found |= {row for row in prefix.slots - found if self._lengths[row] <= prefix.num_tokens}
        return len(found)

    def lengths(self, tokens: bytes, salt: str) -> set[int]:
        """Returns how many of these tokens each state has taken that has taken nothing else; waypoints are left out."""
        found = set[int]()
        for prefix in self._index.match(tokens, salt):
            found |= {
                self._lengths[row]
                for row in prefix.slots
                if self._lengths[row] <= prefix.num_tokens and row not in self._waypoints
            }
        return found

    def use(self, row: int) -> None:
        """Records that a prompt goes on from the state in this row."""
        self._lengths[row] = self._lengths.pop(row)
        self._waypoints.pop(row, None)

    def add(self, tokens: bytes, salt: str, *, is_waypoint: bool = False) -> int | None:
        """Returns the row for the state after these tokens, to be copied there; may evict another.

        None if there is one already, which then counts as used, or if a waypoint would evict what is none.
        """
        num_tokens = count_tokens(tokens)
        known = self.find(tokens, salt, num_tokens)
        if known is not None and known.num_tokens == num_tokens:
            if not is_waypoint:
                self.use(known.row)
            return None
        if not self._free:
            candidates = self._waypoints if self._waypoints or is_waypoint else self._lengths
            if not candidates:
                return None
            self.remove(next(iter(candidates)))
        row = self._free.pop()
        self._written.add(row)
        self._index.insert(row, tokens, salt)
        self._lengths[row] = num_tokens
        if is_waypoint:
            self._waypoints[row] = None
        return row

    def remove(self, row: int) -> None:
        """Forgets the state in this row."""
        self._index.remove(row)
        del self._lengths[row]
        self._waypoints.pop(row, None)
        self._free.append(row)

    def forget(self, tokens: bytes, salt: str, above: int = 0) -> None:
        """Forgets all states that have taken more than `above` tokens, all of them the first of these."""
        while (found := self.find(tokens, salt, count_tokens(tokens))) is not None and found.num_tokens > above:
            self.remove(found.row)

    def keep_only(self, is_wanted: Callable[[bytes, str], bool]) -> None:
        """Forgets the states whose tokens and salt are not wanted."""
        for row in list(self._lengths):
            if not is_wanted(*self._index.entry(row)):
                self.remove(row)

    def take_unused(self) -> list[int]:
        """Returns the rows that hold no state and take memory, which is to be freed."""
        unused = sorted(self._written - self._lengths.keys())
        self._written.difference_update(unused)
        return unused

    def clear(self) -> None:
        """Forgets all states."""
        for row in list(self._lengths):
            self.remove(row)

    def check(self) -> None:
        """Asserts that every row is free or has tokens."""
        self._index.check()
        assert self._index.slots == set(self._lengths) >= set(self._waypoints), "a state without tokens"
        assert sorted([*self._free, *self._lengths]) == list(self._rows), "a row is free and taken, or neither"
