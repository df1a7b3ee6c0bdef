"""Random prompts without a tokenizer: token ids for completions, short words for chat.

A prompt is first drawn as numbers below the count of choices, then written as ids or as words. Prompts of one test are
all different, so that no server answers one from what it cached of another. Each purpose has random numbers of its own:
the same seed gives the same prompts at any rate, and asking for more keeps the first ones.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from chairlift.bench.failures import BenchError

# Short and frequent, so that most vocabularies hold each (with its leading space) as a single token.
_COMMON_WORDS = """
    the of and to in is for on that by this with you it not or be are from at as your all have new more an was
    we will home can us about if page my has search free but our one other do no time they site he up may what
    which their news out use any there see only so his when here who web also now help get view first been
    would how were me some these its like than find
"""
WORDS = tuple(_COMMON_WORDS.split())

Draws = tuple[int, ...]


class Purpose(IntEnum):
    """What random numbers are for."""

    PROMPTS = 0
    PROMPT_LENGTHS = 1
    OUTPUT_LENGTHS = 2
    ARRIVALS = 3
    PREFIXES = 4
    FAMILIES = 5
    BLOCKS = 6
    WARM_UP = 7


def generator_of(seed: int, purpose: Purpose, *details: int) -> np.random.Generator:
    """The random numbers that a test with this seed has for a purpose."""
    return np.random.default_rng([seed, purpose, *details])


@dataclass(frozen=True, slots=True)
class TokenWriter:
    """Writes prompts for /v1/completions: token ids from `low` up to, not including, `high`."""

    low: int
    high: int

    @property
    def num_choices(self) -> int:
        return self.high - self.low

    def write(self, draws: Draws, prefix: Draws = ()) -> dict[str, Any]:
        """The fields of a request's body that hold its prompt."""
        return {"prompt": [self.low + draw for draw in prefix + draws]}


@dataclass(frozen=True, slots=True)
class WordWriter:
    """Writes prompts for /v1/chat/completions: a word for each draw, a prefix as the system's message."""

    num_choices: int = len(WORDS)

    def write(self, draws: Draws, prefix: Draws = ()) -> dict[str, Any]:
        """The fields of a request's body that hold its prompt."""
        messages = [{"role": "user", "content": _words(draws)}]
        if prefix:
            messages.insert(0, {"role": "system", "content": _words(prefix)})
        return {"messages": messages}


Writer = TokenWriter | WordWriter


def _words(draws: Draws) -> str:
    return " ".join(WORDS[draw] for draw in draws)


def num_possible_prompts(num_choices: int, length: int) -> int:
    """How many different prompts of `length` draws there are; never mind beyond 64 draws."""
    return int(num_choices ** min(length, 64))


def distinct_draws(lengths: Sequence[int], num_choices: int, generator: np.random.Generator) -> list[Draws]:
    """For each length so many draws from [0, num_choices), no two alike. Raises `BenchError` if there are too few."""
    for length, needed in Counter(lengths).items():
        possible = num_possible_prompts(num_choices, length)
        if possible < needed:
            raise BenchError(
                f"{needed} prompts of {length} tokens cannot all differ: {num_choices} choices for each token allow "
                f"only {possible}; raise --prompt-tokens, lower --num-requests, or for completions widen --token-range"
            )
    drawn: dict[Draws, None] = {}
    for length in lengths:
        while (draws := draw_one(length, num_choices, generator)) in drawn:
            pass
        drawn[draws] = None
    return list(drawn)


def draw_one(length: int, num_choices: int, generator: np.random.Generator) -> Draws:
    """`length` independent draws from [0, num_choices)."""
    return tuple(generator.integers(num_choices, size=length).tolist())
