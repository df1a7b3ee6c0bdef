"""Recurrent states that are kept for later prompts: which tokens each has taken, and which is evicted next.

A state is of use where a prompt begins with all of its tokens, so they are found like the tokens of slots. When all
rows are in use, waypoints are evicted first, then the others, the least recently used first. A waypoint is kept only in
case that a prompt parts from another just behind it; once one did, it is like the others.

A row can be reserved while the tokens that its state has taken are not known yet. Until it is named by them, nobody
finds it, and it is not evicted.

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
        self._reserved = set[int]()  # rows whose tokens are not known yet
        self._written = set[int]()  # rows that take memory

    def __len__(self) -> int:
        return len(self._lengths) + len(self._reserved)

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
        row = self._allocate(is_waypoint=is_waypoint)
        if row is not None:
            self._enter(row, tokens, salt, is_waypoint=is_waypoint)
        return row

    def reserve(self) -> int | None:
        """Reserves a row for a state that will be named later, and returns it; may evict another.

        None if half of the rows are reserved: the others are for states that are found.
        """
        if len(self._reserved) >= self.capacity // 2:
            return None
        row = self._allocate()
        if row is not None:
            self._reserved.add(row)
        return row

    def name(self, row: int, tokens: bytes, salt: str, *, is_waypoint: bool = False) -> None:
        """Says which tokens the state in a reserved row has taken, so that it is found.

        If there is one already, that one counts as used, and the row is free.
        """
        num_tokens = count_tokens(tokens)
        known = self.find(tokens, salt, num_tokens)
        if known is None or known.num_tokens < num_tokens:
            self._reserved.remove(row)
            self._enter(row, tokens, salt, is_waypoint=is_waypoint)
            return
        if not is_waypoint:
            self.use(known.row)
        self.drop(row)

    def drop(self, row: int) -> None:
        """Frees a reserved row."""
        self._reserved.remove(row)
        self._free.append(row)

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

    def reclaim_unused(self) -> list[int]:
        """Returns the rows that have memory but no state, so that the caller frees it."""
        unused = sorted(self._written - self._lengths.keys() - self._reserved)
        self._written.difference_update(unused)
        return unused

    def clear(self) -> None:
        """Forgets all states that are found."""
        for row in list(self._lengths):
            self.remove(row)

    def check(self) -> None:
        """Asserts that every row is free, is reserved or has tokens."""
        self._index.check()
        assert self._index.slots == set(self._lengths) >= set(self._waypoints), "a state without tokens"
        rows = sorted([*self._free, *self._reserved, *self._lengths])
        assert rows == list(self._rows), "a row is free and in use, or neither"

    def _allocate(self, *, is_waypoint: bool = False) -> int | None:
        """Allocates a free row, or evicts a state. None if there is none, or if a waypoint would evict what is none."""
        if not self._free:
            candidates = self._waypoints if self._waypoints or is_waypoint else self._lengths
            if not candidates:
                return None
            self.remove(next(iter(candidates)))
        row = self._free.pop()
        self._written.add(row)
        return row

    def _enter(self, row: int, tokens: bytes, salt: str, *, is_waypoint: bool) -> None:
        self._index.insert(row, tokens, salt)
        self._lengths[row] = count_tokens(tokens)
        if is_waypoint:
            self._waypoints[row] = None
