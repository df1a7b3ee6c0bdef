"""Defines the unit of training and of evaluation, one question with its answer, and the split between the two.

Every exchange has a key that names what is held out: an operand pair, a word, a story's subject, or a
combination of phrasing and item. `is_held_out` depends on the key alone, so that the same keys are held
out of chat and of plain documents, whatever the seed.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

HELD_OUT_PERCENT = 8
NEVER_HELD_OUT = ""


@dataclass(frozen=True)
class Exchange:
    """Holds a question, its answer, and the key by which it is in training or held out."""

    key: str
    question: str
    answer: str


Maker = Callable[[random.Random], Exchange]


def is_held_out(key: str) -> bool:
    """Tells whether exchanges with this key are kept for evaluation."""
    if key == NEVER_HELD_OUT:
        return False
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def draw(maker: Maker, rng: random.Random, held_out: bool) -> Exchange:
    """Draws the next exchange of a maker that is on the wanted side of the split."""
    while True:
        exchange = maker(rng)
        if is_held_out(exchange.key) == held_out:
            return exchange
