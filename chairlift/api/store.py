"""Replies that clients ask to keep, with the conversations that they answer, in memory. All servers of an engine share
one store.
"""

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

MAX_STORED_BYTES = 2**26
"""Limit on the bytes of all stored conversations and replies."""

_OVERHEAD_BYTES = 1024  # of a reply, in addition to its texts


@dataclass(frozen=True, slots=True, weakref_slot=True)
class StoredReply:
    """A reply, and the conversation that it answers, without instructions; both as JSON."""

    conversation: bytes  # a list of messages, as chat templates know them
    reply: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.conversation) + len(self.reply) + _OVERHEAD_BYTES


class Store(Protocol):
    """Stores replies: a `ReplyStore`, or a proxy for one in another process. Usable from any thread."""

    def keep(self, owner: str, reply_id: str, reply: StoredReply) -> None:
        """Does not wait, so other processes may not find the reply yet; see `settled`."""
        ...

    async def settled(self) -> None:
        """Returns once every process can find what was kept before."""
        ...

    def find(self, owner: str, reply_id: str) -> StoredReply | None: ...

    def delete(self, owner: str, reply_id: str) -> bool:
        """False if there is no such reply."""
        ...


class ReplyStore:
    """Replies by owner and id. No owner can read, delete or continue another's. Usable from any thread."""

    def __init__(self, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._replies: dict[str, dict[str, StoredReply]] = {}  # by owner, from the oldest
        self._num_bytes: Counter[str] = Counter()  # by owner
        self._lock = threading.Lock()

    def keep(self, owner: str, reply_id: str, reply: StoredReply) -> None:
        """Drops the oldest replies of the owner with the most bytes to make room. One over the limit is not kept."""
        with self._lock:
            if reply.num_bytes > self._max_bytes:
                return
            self._replies.setdefault(owner, {})[reply_id] = reply
            self._num_bytes[owner] += reply.num_bytes
            while self._num_bytes.total() > self._max_bytes:
                richest = max(self._num_bytes, key=self._num_bytes.__getitem__)
                self._remove(richest, next(iter(self._replies[richest])))

    async def settled(self) -> None:
        """Returns at once, because all lookups use this store."""

    def find(self, owner: str, reply_id: str) -> StoredReply | None:
        with self._lock:
            return self._replies.get(owner, {}).get(reply_id)

    def delete(self, owner: str, reply_id: str) -> bool:
        """False if there is no such reply."""
        with self._lock:
            is_there = reply_id in self._replies.get(owner, {})
            if is_there:
                self._remove(owner, reply_id)
            return is_there

    def _remove(self, owner: str, reply_id: str) -> None:
        self._num_bytes[owner] -= self._replies[owner].pop(reply_id).num_bytes
        if not self._replies[owner]:
            del self._replies[owner], self._num_bytes[owner]
