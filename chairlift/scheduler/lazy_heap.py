"""A heap whose members' keys grow while they are in it."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Generic, TypeVar

_MIN_PRUNED = 64  # heaps with fewer entries are not pruned

_Member = TypeVar("_Member")


class LazyHeap(Generic[_Member]):
    """Finds the member with the lowest key. A key only grows, or becomes None when its member has left.

    A stale entry surfaces too early, and is corrected then.
    """

    def __init__(self, key_of: Callable[[_Member], float | None]) -> None:
        self._key_of = key_of
        self._entries: list[tuple[float, int, _Member]] = []  # equal keys in order of insertion
        self._serials = count()
        self._max_entries = _MIN_PRUNED

    def __len__(self) -> int:
        """Number of entries, including those of members that have left."""
        return len(self._entries)

    def push(self, key: float, member: _Member) -> None:
        """Adds a member, which must not be in the heap yet."""
        if len(self._entries) >= self._max_entries:
            self._entries = [entry for entry in self._entries if self._key_of(entry[2]) is not None]
            heapq.heapify(self._entries)
            self._max_entries = 2 * len(self._entries) + _MIN_PRUNED
        heapq.heappush(self._entries, (key, next(self._serials), member))

    def first(self) -> _Member | None:
        """The member with the lowest key, which stays in the heap. None if there is none."""
        while self._entries:
            entered, serial, member = self._entries[0]
            key = self._key_of(member)
            if key is None:
                heapq.heappop(self._entries)
            elif key > entered:
                heapq.heapreplace(self._entries, (key, serial, member))
            else:
                return member
        return None
