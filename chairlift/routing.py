"""Which replica serves a prompt: the one that has most of its beginning warm, unless it is loaded more.

Plain Python over byte strings and names, so that Ray Serve's router and the simulation of a fleet are the same code.
A prompt is cut into blocks, and each block's name is a digest of everything up to its end. Where a block was last sent
is remembered, the oldest forgotten first. Nothing is asked of the replicas: the memory is a guess at what they keep.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

Replica = TypeVar("Replica", bound=Hashable)

BLOCK_BYTES = 128
"""Bytes of a block of text: some 30 tokens, so that little of a shared beginning is missed."""

_MAX_BLOCKS = 512  # of one prompt; prompts hardly ever share more than 64 KB of text
_MAX_REMEMBERED = 200_000
_DIGEST_BYTES = 12


def name_blocks(owner: bytes, prompt: bytes, block_bytes: int = BLOCK_BYTES) -> list[bytes]:
    """The names of a prompt's whole blocks, in order. Two prompts of one owner share as many as they begin alike.

    `owner`: who may reuse what: an API key, a cache salt.
    """
    digest = blake2b(owner, digest_size=_DIGEST_BYTES)
    names = []
    for end in range(block_bytes, min(len(prompt), block_bytes * _MAX_BLOCKS) + 1, block_bytes):
        digest.update(prompt[end - block_bytes : end])
        names.append(digest.digest())
    return names


class PrefixRouter(Generic[Replica]):
    """Remembers which blocks went where. One for each place that routes."""

    def __init__(self, slack: int = 8, max_remembered: int = _MAX_REMEMBERED) -> None:
        """`slack`: by how many running requests a warm replica may be ahead of the least loaded one, at least."""
        self._slack = slack
        self._max_remembered = max_remembered
        self._homes: OrderedDict[bytes, Replica] = OrderedDict()

    def rank(self, blocks: Sequence[bytes], loads: Mapping[Replica, int]) -> list[Replica]:
        """All replicas, best first. `loads`: the requests that each runs or holds in its queue.

        A replica may be ahead of the least loaded one by the slack, or by half of the mean if that is more: a prompt
        that many share then spreads over as many replicas as its load needs, each of which has it warm from there on.
        """
        limit = min(loads.values(), default=0) + max(self._slack, sum(loads.values()) / (2 * max(1, len(loads))))
        warm = self._count_warm(blocks, loads)
        return sorted(loads, key=lambda replica: (loads[replica] > limit, -warm.get(replica, 0), loads[replica]))

    def note(self, blocks: Sequence[bytes], replica: Replica) -> None:
        """A prompt with these blocks went there."""
        for block in reversed(blocks):  # so that a prompt's end is forgotten before its beginning
            self._homes[block] = replica
            self._homes.move_to_end(block)
        while len(self._homes) > self._max_remembered:
            self._homes.popitem(last=False)

    def _count_warm(self, blocks: Sequence[bytes], loads: Mapping[Replica, int]) -> dict[Replica, int]:
        """How many first blocks a replica has, as far as is remembered: where a block went, all before it went."""
        warm: dict[Replica, int] = {}
        for position, block in enumerate(blocks, start=1):
            home = self._homes.get(block)
            if home is None:
                break
            if home in loads:
                warm[home] = position
        return warm
