"""What is put on the simulated engine: conversations, each of one or more turns.

Token ids stand for text, and only whether two prompts begin alike matters: what nobody shares counts up from a number
of its own, and a shared beginning from a number of its family's.
"""

from collections.abc import Iterator
from dataclasses import dataclass

_NUM_FIRST_IDS = 2**29  # ids fit into 31 bits, with room to count up in
_SCATTER = 2_654_435_761  # odd, so that every number below _NUM_FIRST_IDS gets a first id of its own


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation. Its prompt is all that was said before and `num_new_tokens` more."""

    num_new_tokens: int
    num_output_tokens: int
    max_tokens: int  # more than the above if it ends by an end token
    pause: float = 0.0  # seconds after the end of the turn before
    patience: float | None = None  # seconds until its client goes away
    timeout: float | None = None  # seconds until the engine gives up


@dataclass(frozen=True, slots=True)
class Prefix:
    """A beginning that a family of conversations shares, such as a system prompt."""

    family: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow one another; the first is due at `arrival`, seconds after the start."""

    arrival: float
    turns: tuple[Turn, ...]
    tenant: str = ""
    priority: int = 0
    prefixes: tuple[Prefix, ...] = ()


Workload = Iterator[Conversation]
"""In order of arrival."""


def text(number: int, num_tokens: int) -> list[int]:
    """Token ids of a text of its own."""
    first = _first_id(number)
    return list(range(first, first + num_tokens))


def opening(prefixes: tuple[Prefix, ...]) -> list[int]:
    """Token ids that all conversations with these prefixes begin with."""
    tokens: list[int] = []
    for prefix in prefixes:
        first = 2 * _NUM_FIRST_IDS + _first_id(prefix.family)
        tokens += range(first, first + prefix.num_tokens)
    return tokens


def _first_id(number: int) -> int:
    return number * _SCATTER % _NUM_FIRST_IDS
