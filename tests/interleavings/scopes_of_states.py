"""The scopes of models with recurrent states: each is about one thing that may go wrong with these.

A state at the end of a prompt stops four to eight tokens before it, and is kept if it has taken 64 tokens more than the
one before. A prompt leaves one where it parts from others if they have 64 tokens in common.
"""

from dataclasses import replace

from chairlift.scheduler import Policy
from tests.interleavings.scope import WRONG, Ask, Scope
from tests.interleavings.scopes import answer, prompt

A, B, C, D = prompt(80, 1, 96), prompt(80, 2, 90), prompt(72, 3, 84), prompt(30, 4, 70)

JUNCTIONS = Scope(
    "junctions",
    (Ask("a", A, 2), Ask("b", B, 1), Ask("c", C, 2), Ask("d", prompt(80, 4, 110), 1)),
    num_snapshots=2,
    max_num_batched_tokens=128,
    num_aborts=1,
)
TURNS = Scope(
    "turns",
    (
        Ask("a", A, 3, ends_after=2),
        Ask("b", (*A, *answer(A, 2), *range(200, 204)), 2),
        Ask("c", (*A[:94], *range(300, 340)), 1),
        Ask("d", D, 1),
    ),
    num_slots=2,
    max_seq_len=704,  # of which a tenth is kept by a trim
    num_snapshots=2,
    max_num_batched_tokens=100,
    num_trims=1,
)
FORKS = Scope(
    "forks",
    (Ask("a", A, 2), Ask("b", A, 1), Ask("c", B, 1)),
    num_snapshots=1,
    max_num_batched_tokens=64,
    num_ahead=1,
    num_aborts=1,
    num_out_of_memory=1,
)
REPLAYS = Scope(
    "replays",
    (
        Ask("a", A, 6, guesses_right=(0, 3), guesses_half=(2,)),
        Ask("b", B, 5, ends_after=3, guesses_right=(1,), guesses_half=(0,), has_grammar=True),
        Ask("c", C, 4, guesses_wrong=(1,), spoiled=((*answer(C, 1), WRONG),)),
    ),
    num_slots=2,
    num_snapshots=1,
    num_guessed=2,
    max_num_batched_tokens=100,
    num_aborts=1,
    num_late=1,
)
SURPLUS = Scope(
    "surplus",
    (
        Ask("a", A, 6, ends_after=2),
        Ask("b", (*A, *answer(A, 2), *range(200, 210)), 4, spoiled=(answer((*A, *answer(A, 2), *range(200, 210)), 2),)),
        Ask("c", C, 4, spoiled=(answer(C, 1),)),
    ),
    num_slots=2,
    num_snapshots=2,
    max_num_batched_tokens=100,
    max_steps=3,
    num_ahead=1,
    num_aborts=1,
)
FAILURES = Scope(
    "failures",
    (
        Ask("a", A, 2),
        Ask("b", (*B, *[5] * 60), 2, spoiled=((),)),
        Ask("c", (*B, *[5] * 60, 6), 1),
    ),
    num_slots=2,
    num_snapshots=2,
    max_num_batched_tokens=100,
    num_ahead=1,
    num_crashes=1,
    num_out_of_memory=1,
)
RESETS = Scope(
    "resets",
    (Ask("a", A, 2), Ask("b", B, 2), Ask("c", A, 1, salt="x"), Ask("d", B, 1, salt="x")),
    num_slots=2,
    num_snapshots=2,
    max_num_batched_tokens=128,
    num_resets=1,
    num_trims=1,
)
EVICTIONS = Scope(
    "evictions",
    (
        Ask("a", prompt(80, 1, 126), 4, priority=1),
        Ask("b", prompt(80, 2, 125), 4),
        Ask("c", prompt(80, 3, 126), 3, priority=1, has_grammar=True),
        Ask("d", D, 3, prompt_logprobs=1),
    ),
    cache_tokens=64 * 6,
    num_snapshots=1,
    max_num_batched_tokens=128,
    policy=Policy(preempt_after=1),
)
WAYPOINTS = Scope(
    "waypoints",
    (
        Ask("a", prompt(1040, 1, 1060), 1),
        Ask("b", prompt(1050, 1, 1070), 1),
        Ask("c", prompt(1030, 2, 1040), 1),
    ),
    num_slots=2,
    max_seq_len=1088,
    num_snapshots=2,
    max_num_batched_tokens=1030,
    num_aborts=1,
)
STATES = (JUNCTIONS, TURNS, FORKS, REPLAYS, SURPLUS, FAILURES, RESETS, EVICTIONS, WAYPOINTS)
LARGE_STATES = (
    replace(JUNCTIONS, name="junctions, large", num_aborts=2, num_trims=1, num_resets=1),
    replace(TURNS, name="turns, large", num_aborts=1, num_trims=2, num_slots=3),
    replace(FORKS, name="forks, large", asks=(*FORKS.asks, Ask("d", prompt(90, 1, 120), 1)), num_aborts=2),
    replace(REPLAYS, name="replays, large", num_aborts=2, num_late=2, num_out_of_memory=1),
    replace(SURPLUS, name="surplus, large", num_aborts=2, num_holds=1, num_out_of_memory=1),
    replace(FAILURES, name="failures, large", asks=(*FAILURES.asks, Ask("d", C, 1)), num_slots=3, num_aborts=1),
    replace(RESETS, name="resets, large", num_aborts=1, num_resets=2, num_trims=2, num_ahead=1),
    replace(EVICTIONS, name="evictions, large", num_late=1, num_aborts=1, num_ahead=1),
    replace(WAYPOINTS, name="waypoints, large", num_aborts=2, num_out_of_memory=1, num_trims=1),
)
