"""The scopes: each is about one thing that may go wrong, and small enough that every state of it can be visited.

Sizes are those of the engine: memory comes in chunks of 64 tokens, a prompt waits for another one that computes 16
tokens more for it, and slots that share 128 tokens read them in one place.
"""

from dataclasses import replace

from chairlift.prompt_work import Pooling
from chairlift.scheduler import Policy
from tests.interleavings.scope import WRONG, Ask, Scope, alone


def prompt(num_shared: int, own: int, num_tokens: int = 64) -> tuple[int, ...]:
    """A prompt that begins as others do, and goes on with a token of its own."""
    return (*range(10, 10 + num_shared), *[own] * (num_tokens - num_shared))


def answer(tokens: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """The first tokens that follow a prompt."""
    return alone(tokens, "", len(tokens) + num_tokens)[0][len(tokens) :]


A, B, C, D = prompt(48, 1), prompt(48, 2), prompt(56, 3), prompt(30, 4)

ORDER = Scope(
    "order",
    (Ask("a", A, 3), Ask("b", B, 3, ends_after=2), Ask("c", D, 2), Ask("d", A, 2, prompt_logprobs=1)),
    num_aborts=1,
)
LEADERS = Scope(
    "leaders",
    (
        Ask("a", prompt(150, 1, 170), 1),
        Ask("b", prompt(150, 2, 165), 2),
        Ask("c", prompt(150, 3, 160), 1),
        Ask("d", prompt(90, 4, 100), 1),
    ),
    max_num_batched_tokens=70,
    num_aborts=1,
)
OVERLAP = Scope(
    "overlap",
    (Ask("a", A, 4, ends_after=2), Ask("b", B, 3), Ask("c", C, 2, ends_after=1)),
    num_slots=2,
    num_ahead=1,
    num_aborts=1,
    num_out_of_memory=1,
)
HOLDS = Scope(
    "holds",
    (Ask("a", A, 3), Ask("b", B, 3), Ask("c", C, 2)),
    num_slots=2,
    max_steps=2,
    num_ahead=1,
    num_holds=1,
)
MEMORY = Scope(
    "memory",
    (
        Ask("a", prompt(48, 1, 62), 4),
        Ask("b", prompt(48, 2, 63), 4),
        Ask("c", prompt(30, 4, 60), 6, priority=1),
        Ask("d", prompt(48, 1, 126), 3, prompt_logprobs=1),
    ),
    cache_tokens=64 * 4,
    max_num_batched_tokens=64,
)
LITTLE = Scope(
    "little",
    (Ask("a", prompt(48, 1, 62), 4, ends_after=3), Ask("b", prompt(48, 2, 63), 4), Ask("c", prompt(62, 1, 100), 3)),
    cache_tokens=64 * 3,
    max_num_batched_tokens=64,
    max_steps=2,
    num_ahead=1,
    num_aborts=1,
)
PRIORITIES = Scope(
    "priorities",
    (Ask("a", A, 4, priority=1), Ask("b", B, 3, priority=1), Ask("c", C, 2), Ask("d", D, 1, priority=-1)),
    num_slots=2,
    max_num_batched_tokens=64,
    num_ahead=1,
    policy=Policy(preempt_after=1),
)
GUESSES = Scope(
    "guesses",
    (
        Ask("a", A, 6, guesses_right=(0, 3)),
        Ask("b", B, 5, ends_after=3, guesses_right=(1,), guesses_half=(0,)),
        Ask("c", C, 4, guesses_wrong=(1,), spoiled=((*answer(C, 1), WRONG),)),
    ),
    num_slots=2,
    num_guessed=2,
    num_aborts=1,
    num_out_of_memory=1,
)
FORCED = Scope(
    "forced",
    (
        Ask("a", prompt(48, 1, 62), 8, guesses_right=(1,), has_grammar=True, forced=(4,), forced_half=(2,)),
        Ask("b", prompt(48, 2, 62), 5, guesses_half=(0,), guesses_wrong=(2,)),
        Ask("c", prompt(62, 1, 100), 4, guesses_right=(1,)),
    ),
    cache_tokens=64 * 4,
    max_num_batched_tokens=64,
    num_guessed=2,
    num_aborts=1,
    num_late=1,
)
PROMPTS = Scope(
    "prompts",
    (Ask("a", A, 0), Ask("b", B, 0, prompt_logprobs=1), Ask("c", C, 3), Ask("d", A, 0, spoiled=((),))),
    num_slots=2,
    max_num_batched_tokens=60,
    max_steps=2,
    num_ahead=1,
)
POOLED = Scope(
    "pooled",
    (
        Ask("a", prompt(48, 1, 62), 3),
        Ask("b", prompt(48, 1, 126), 0, pooling=Pooling.MEAN),
        Ask("c", prompt(48, 3, 62), 0, pooling=Pooling.LAST),
    ),
    num_slots=2,
    max_num_batched_tokens=60,
    num_ahead=1,
    num_aborts=1,
    is_in_order=True,
)
APART = Scope(
    "apart",
    (
        Ask("a", prompt(48, 1, 62), 4, priority=1),
        Ask("b", prompt(48, 1, 62), 4),
        Ask("c", prompt(48, 1, 62), 0),
        Ask("d", prompt(62, 1, 100), 3),
    ),
    cache_tokens=64 * 4,
    max_num_batched_tokens=64,
    policy=Policy(enable_prefix_caching=False, preempt_after=1),
    num_aborts=1,
)
ALONE = replace(APART, name="alone", asks=APART.asks[1:], num_snapshots=2)
STEPS = Scope(
    "steps",
    (
        Ask("a", A, 6),
        Ask("b", B, 5, ends_after=2, spoiled=(answer(B, 2),)),
        Ask("c", C, 4, spoiled=(answer(C, 1),)),
    ),
    num_slots=2,
    max_steps=3,
    num_ahead=1,
    num_aborts=1,
)
GRAMMARS = Scope(
    "grammars",
    (Ask("a", A, 4, ends_after=3, has_grammar=True), Ask("b", B, 3, ends_after=2), Ask("c", A, 2, has_grammar=True)),
    num_slots=2,
    num_ahead=1,
    num_late=2,
)
SALTS = Scope(
    "salts",
    (Ask("a", A, 2), Ask("b", A, 2, salt="x"), Ask("c", A, 1), Ask("d", B, 1, salt="x", spoiled=((),))),
    num_slots=2,
    num_trims=1,
)
FORGETTING = Scope(
    "forgetting",
    (
        Ask("a", prompt(130, 1, 140), 2),
        Ask("b", prompt(130, 2, 140), 2),
        Ask("c", prompt(140, 3, 150), 2),
        Ask("d", prompt(129, 4, 135), 1, salt="x"),
    ),
    max_num_batched_tokens=100,
    num_resets=1,
)
CRASHES = Scope(
    "crashes",
    (Ask("a", A, 2), Ask("b", B, 2, spoiled=((),)), Ask("c", C, 2)),
    num_slots=3,
    max_num_running=2,
    num_ahead=1,
    num_crashes=1,
)
QUEUE = Scope(
    "queue",
    (
        Ask("a", A, 1, tenant="x"),
        Ask("b", B, 1, priority=1, timeout=1.0),
        Ask("c", C, 1, tenant="x", priority=1),
        Ask("d", D, 1, timeout=2.0),
    ),
    num_slots=1,
    max_num_batched_tokens=64,
    max_queue_size=2,
    policy=Policy(queue_timeout=2.0),
    num_ticks=2,
)

FULL = (
    *(ORDER, LEADERS, OVERLAP, HOLDS, MEMORY, LITTLE, PRIORITIES, GUESSES, FORCED, STEPS, GRAMMARS, SALTS, FORGETTING),
    *(CRASHES, QUEUE, PROMPTS, POOLED, APART, ALONE),
)
EVERYDAY = (MEMORY, GUESSES, SALTS)
LARGE = (
    replace(ORDER, name="order, large", num_aborts=2, num_trims=1, num_resets=1),
    replace(LEADERS, name="leaders, large", num_aborts=2, num_resets=1, num_out_of_memory=1),
    replace(OVERLAP, name="overlap, large", num_aborts=2, num_holds=1, num_resets=1),
    replace(MEMORY, name="memory, large", num_aborts=2, num_ahead=1, max_steps=2, num_out_of_memory=1),
    replace(LITTLE, name="little, large", num_aborts=2, num_holds=1, num_out_of_memory=1, max_steps=3),
    replace(PRIORITIES, name="priorities, large", num_aborts=1, num_holds=1, max_steps=2),
    replace(GUESSES, name="guesses, large", num_aborts=2, num_holds=1, num_resets=1, num_slots=3),
    replace(FORCED, name="forced, large", num_aborts=2, num_holds=1, num_late=2, num_out_of_memory=1),
    replace(STEPS, name="steps, large", num_aborts=2, num_holds=1, num_resets=1, num_slots=3),
    replace(GRAMMARS, name="grammars, large", num_late=3, num_aborts=1, num_out_of_memory=1),
    replace(SALTS, name="salts, large", num_aborts=1, num_resets=1, num_trims=2, num_slots=3),
    replace(FORGETTING, name="forgetting, large", num_aborts=1, num_resets=2),
    replace(
        CRASHES, name="crashes, large", asks=(*CRASHES.asks, Ask("d", A, 1)), num_crashes=2, num_aborts=1, max_steps=2
    ),
    replace(PROMPTS, name="prompts, large", num_aborts=2, num_out_of_memory=1, num_resets=1),
    replace(POOLED, name="pooled, large", num_aborts=2, num_out_of_memory=1, num_resets=1, max_steps=2),
    replace(APART, name="apart, large", num_aborts=2, num_out_of_memory=1, max_steps=2, num_ahead=1),
    replace(ALONE, name="alone, large", asks=APART.asks, num_aborts=2, num_out_of_memory=1, num_crashes=1),
    replace(QUEUE, name="queue, large", num_ticks=3, num_aborts=1, num_slots=2),
)
