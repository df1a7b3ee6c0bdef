"""What can be read of an engine: its counts since it was made, and a picture of slots, queue and launches.

The engine's thread counts after each launch, in integers and lists; a reader takes a copy. A snapshot holds numbers
only: no text, token ids or name that a client chose, so that it may be shown to every client of the server.
"""

import zlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Protocol

from chairlift.cache.budget import CacheUse

NO_MEMORY = CacheUse()

MAX_LAUNCHES_SHOWN = 128
"""Launches in a snapshot: more than fit between two snapshots of an engine whose steps take a millisecond."""

MAX_WAITING_SHOWN = 20
"""Waiting requests in a snapshot; the others are only counted."""


class SlotState(StrEnum):
    """Who has a slot."""

    FREE = "free"  # no request, and nothing in it is of use
    WARM = "warm"  # no request, but the tokens in it can be reused by a prompt that begins with them
    PREFILLING = "prefilling"  # a request whose prompt is not computed yet
    DECODING = "decoding"  # a request that generates


@dataclass(frozen=True, slots=True)
class SlotSnapshot:
    """One slot between two launches; its number is its place in `Snapshot.slots`. Counts are tokens.

        |== reused ==|== computed ==|-- to do --|== generated ==|
        0   num_reused   num_computed   num_prompt_tokens   num_tokens

    of which "to do" and "generated" are never there at once. A warm slot has `num_computed` only.
    """

    state: SlotState = SlotState.FREE
    request_id: str = ""  # see `short_id`
    num_reused: int = 0  # of the prompt, found in this slot or copied from another
    num_computed: int = 0  # with keys and values in the slot, the reused ones included
    num_prompt_tokens: int = 0
    num_tokens: int = 0  # prompt and generated
    num_held: int = 0  # that it has memory for


@dataclass(frozen=True, slots=True)
class WaitingSnapshot:
    """One request that waits for a slot."""

    request_id: str  # see `short_id`
    num_prompt_tokens: int
    seconds: float = field(compare=False)  # since it came


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """One launch: `num_steps` steps of the same rows."""

    num_prefill_tokens: int
    num_decode_rows: int  # each makes one token a step
    num_steps: int
    seconds: float  # for all of its steps, from planning to the last bookkeeping


@dataclass(slots=True)
class Totals:
    """Counts since the engine was made, which only grow."""

    num_prompt_tokens: int = 0  # of all requests whose prompt was computed
    num_cached_tokens: int = 0  # those of them that were reused
    num_generated_tokens: int = 0
    num_finished: int = 0  # requests that ended, however they did
    num_preemptions: int = 0  # requests that lost their slot to another, each time
    num_first_tokens: int = 0  # requests of which a first token was made
    seconds_to_first_token: float = 0.0  # their sum, each from its request's coming
    num_drafted_tokens: int = 0  # that were guessed and verified
    num_accepted_tokens: int = 0  # those of them that are part of an answer


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An engine between two launches. Two snapshots are equal if nothing happened from one to the other."""

    time: float = field(compare=False)  # seconds since the engine was made
    slot_len: int  # tokens that a slot can hold
    slots: tuple[SlotSnapshot, ...]
    num_waiting: int
    waiting: tuple[WaitingSnapshot, ...]  # the first `MAX_WAITING_SHOWN`, in the order in which they get slots
    num_launches: int  # since the engine was made
    launches: tuple[LaunchRecord, ...]  # the newest `MAX_LAUNCHES_SHOWN` of them, oldest first
    totals: Totals
    cache: CacheUse = NO_MEMORY


class SnapshotSource(Protocol):
    """What can be looked at: `AsyncLLM`, and in tests something smaller."""

    async def take_snapshot(self) -> Snapshot:
        """The engine after its present launch, or right away if it has nothing to do.

        `EngineClosed` or `EngineDead` where there is nothing to look at any more. May be cancelled at any time.
        """
        ...


def short_id(request_id: str) -> str:
    """Eight hexadecimal digits that tell a generation from others, and by which its own client can find it.

    It is the CRC-32 of the generation's id, which is a sequence's id without its last two parts (its serial number and
    its place among `n`). For `POST /v1/chat/completions` that is the completion's id with `-0` behind it.
    """
    generation_id = request_id.rsplit("-", 2)[0]
    return f"{zlib.crc32(generation_id.encode()):08x}"


STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Bounds for what takes a step or so."""

WAIT_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
"""Bounds for what a client waits for."""

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TOKEN_COUNTS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True, slots=True)
class Distribution:
    """How many values fell into each range. Range i ends with `bounds[i]`, which is in it; the last has no end."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]  # one more than bounds
    sum: float  # of all values

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def cumulative(self) -> list[int]:
        """Values up to each bound, and last all of them: what Prometheus calls buckets."""
        return list(accumulate(self.counts))


class Histogram:
    """A `Distribution` while it grows. Adding to it costs a fraction of a microsecond."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """That value, so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def read(self) -> Distribution:
        """As it is now."""
        return Distribution(self._bounds, tuple(self._counts), self._sum)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine's counts after its newest launch or, if that was later, request that came or left."""

    time: float  # seconds since the engine was made
    totals: Totals
    num_waiting: int
    num_prefilling: int  # requests that have a slot, and whose prompt is not computed yet
    num_decoding: int  # all others that have a slot
    num_warm: int  # slots of no request, with tokens that can be reused
    step_seconds: Distribution  # a launch of several steps counts as that many, each with its share of the time
    step_rows: Distribution
    step_tokens: Distribution  # whose keys and values a step computed
    queue_seconds: Distribution  # from a request's coming to its first slot; of requests whose prompt was computed
    first_token_seconds: Distribution  # from a request's coming to its first token
    inter_token_seconds: Distribution  # from one token of a request to the next; tokens of a launch share its time
    cache: CacheUse = NO_MEMORY
    accepted_at: tuple[int, ...] = ()  # accepted tokens by their place in a guess

    @property
    def num_running(self) -> int:
        return self.num_prefilling + self.num_decoding
