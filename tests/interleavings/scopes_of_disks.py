"""The scopes of prefixes that were saved on disk: each is about one thing that may go wrong while they are read.

A part has 64 tokens. Nothing is read for less than 16.
"""

from dataclasses import replace

from chairlift.scheduler import Policy
from tests.interleavings.scope import Ask, Scope
from tests.interleavings.scopes import prompt

READS = Scope(
    "reads",
    (Ask("a", prompt(130, 1, 140), 2), Ask("b", prompt(130, 2, 150), 1), Ask("c", prompt(130, 1, 140), 1, salt="x")),
    num_slots=2,
    max_num_batched_tokens=100,
    saved=((prompt(130, 1, 140), ""),),
    num_aborts=1,
    num_lost=1,
    num_stale=1,
)
SHORT = Scope(
    "short of memory",
    (
        Ask("a", prompt(70, 1, 126), 4, priority=1),
        Ask("b", prompt(100, 2, 128), 2),
        Ask("c", prompt(64, 3, 126), 4, priority=1),
    ),
    cache_tokens=64 * 5,
    max_num_batched_tokens=64,
    saved=((prompt(100, 2, 128), ""),),
    policy=Policy(preempt_after=1),
    num_stale=1,
)
RESETS = Scope(
    "resets of disks",
    (Ask("a", prompt(130, 1, 140), 2), Ask("b", prompt(130, 1, 140), 1)),
    num_slots=2,
    max_num_batched_tokens=100,
    num_ahead=1,
    saved=((prompt(130, 1, 140), ""),),
    num_resets=1,
    num_trims=1,
    num_aborts=1,
    num_crashes=1,
    num_stale=1,
)
SPOILT = Scope(
    "spoilt on disk",
    (Ask("a", prompt(130, 1, 140), 1, spoiled=((),)), Ask("b", prompt(130, 1, 150), 1)),
    num_slots=2,
    max_num_batched_tokens=100,
    saved=((prompt(130, 1, 140), ""),),
    num_lost=1,
    num_out_of_memory=1,
)
READS_OF_STATES = Scope(
    "reads of states",
    (Ask("a", prompt(130, 1, 140), 2), Ask("b", prompt(130, 1, 150), 1), Ask("c", prompt(130, 1, 140), 1, salt="x")),
    num_slots=2,
    num_snapshots=1,
    max_num_batched_tokens=150,
    saved=((prompt(130, 1, 120), ""), (prompt(130, 1, 100), "x")),
    is_in_order=True,
    num_aborts=1,
    num_lost=1,
)
DISKS = (READS, SHORT, RESETS, SPOILT, READS_OF_STATES)
LARGE_DISKS = (
    replace(READS, name="reads, large", asks=(*READS.asks, Ask("d", prompt(70, 4, 100), 1)), num_slots=3, num_ahead=1),
    replace(SHORT, name="short of memory, large", num_aborts=1, num_lost=1, num_ahead=1),
    replace(RESETS, name="resets of disks, large", asks=(*RESETS.asks, Ask("c", prompt(130, 2, 150), 1)), num_resets=2),
    replace(
        READS_OF_STATES, name="reads of states, large", num_slots=3, num_resets=1, num_ahead=1, num_out_of_memory=1
    ),
)
