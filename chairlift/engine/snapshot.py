"""What can be seen of a running engine: a picture of all slots, of who waits, and of the last launches.

A snapshot holds numbers only. It has no text, no token ids and no name that a client chose, so that it may be shown to
everybody who may use the server.
"""

import zlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

MAX_LAUNCHES_SHOWN = 128
"""Launches in a snapshot: more than fit between two snapshots of an engine whose steps take a millisecond."""

MAX_WAITING_SHOWN = 20
"""Waiting requests in a snapshot; the others are only counted."""


class SlotState(StrEnum):
    """Who has a slot."""

    FREE = "free"  # nobody, and nothing in it is of use
    WARM = "warm"  # nobody, but the tokens in it can be reused by a prompt that begins with them
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
