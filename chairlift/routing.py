"""Chooses the replica for a prompt: the one with its longest warm prefix, unless that replica is loaded too much.

Plain Python over byte strings and names, so that Ray Serve's router and the fleet simulation share this code. A prompt
is cut into blocks, each named by a digest of everything up to its end. The router remembers where each block was last
sent, and forgets the oldest blocks first. It does not ask the replicas, so this only estimates what they hold.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

Replica = TypeVar("Replica", bound=Hashable)

BLOCK_BYTES = 128
"""Bytes of a block of text: some 30 tokens, so that little of a shared prefix is missed."""

_MAX_BLOCKS = 512  # of one prompt; prompts hardly ever share more than 64 KB of text
_MAX_REMEMBERED = 200_000
_DIGEST_BYTES = 12


def name_blocks(owner: bytes, prompt: bytes, block_bytes: int = BLOCK_BYTES) -> list[bytes]:
    """The names of a prompt's whole blocks, in order. Two prompts of one owner share the names of their common prefix.

    `owner`: identifies those who may reuse each other's prompts, for instance an API key and a cache salt.
    """
    digest = blake2b(owner, digest_size=_DIGEST_BYTES)
    names = []
    for end in range(block_bytes, min(len(prompt), block_bytes * _MAX_BLOCKS) + 1, block_bytes):
        digest.update(prompt[end - block_bytes : end])
        names.append(digest.digest())
    return names


class PrefixRouter(Generic[Replica]):
    """Remembers to which replica each block was sent. Each process that routes has its own."""

    def __init__(self, slack: int = 8, max_remembered: int = _MAX_REMEMBERED) -> None:
        """`slack`: requests by which a warm replica's load may exceed the lowest one, at least; see `rank`."""
        self._slack = slack
        self._max_remembered = max_remembered
        self._homes: OrderedDict[bytes, Replica] = OrderedDict()

    def rank(self, blocks: Sequence[bytes], loads: Mapping[Replica, int]) -> list[Replica]:
        """All replicas, best first. `loads`: the requests that each runs or holds in its queue.

        A replica's load may exceed the lowest one by the slack, or by half of the mean load if that is more. So a
        prefix that many prompts share spreads over as many replicas as its load needs, and stays warm on each.
        """
        limit = min(loads.values(), default=0) + max(self._slack, sum(loads.values()) / (2 * max(1, len(loads))))
        warm = self._count_warm(blocks, loads)
        return sorted(loads, key=lambda replica: (loads[replica] > limit, -warm.get(replica, 0), loads[replica]))

    def note(self, blocks: Sequence[bytes], replica: Replica) -> None:
        """Records that a prompt with these blocks was sent to the replica."""
        for block in reversed(blocks):  # so that the end of a prompt is forgotten before its beginning
            self._homes[block] = replica
            self._homes.move_to_end(block)
        while len(self._homes) > self._max_remembered:
            self._homes.popitem(last=False)

    def _count_warm(self, blocks: Sequence[bytes], loads: Mapping[Replica, int]) -> dict[Replica, int]:
        """Leading blocks that each replica has, as far as is known: one that got a block also got all before it."""
        warm: dict[Replica, int] = {}
        for position, block in enumerate(blocks, start=1):
            home = self._homes.get(block)
            if home is None:
                break
            if home in loads:
                warm[home] = position
        return warm
