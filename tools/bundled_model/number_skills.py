"""Asks for sums and differences of two numbers from 0 to 99.

Held out: unordered pairs of operands, for both operations alike. Pairs of single digits are few and the first
that anybody tries, so all of them are learnt; of those, combinations of phrasing and pair are held out.
"""

import random

from bundled_model.exchange import NEVER_HELD_OUT, Exchange
from bundled_model.phrasing import dress
from bundled_model.words import listed

LIMIT = 100
DIGITS = 10
_DIGIT_DOCUMENT_SHARE = 0.1

_ADDING = listed(
    """
    What is {a} + {b} | What is {a} + {b} | What's {a} + {b} | {a} + {b} | {a}+{b} | {a} + {b} = | {a}+{b}= |
    What is {a}+{b} | Add {a} and {b} | Add {b} to {a} | What is {a} plus {b} | What's {a} plus {b} | {a} plus {b} |
    What is the sum of {a} and {b} | Calculate {a} + {b} | Compute {a} + {b} | How much is {a} + {b} |
    How much is {a} plus {b} | What do you get when you add {a} and {b} | Solve {a} + {b} | What does {a} + {b} equal
    """,
    separator="|",
)
_SUBTRACTING = listed(
    """
    What is {a} - {b} | What is {a} - {b} | What's {a} - {b} | {a} - {b} | {a}-{b} | {a} - {b} = | {a}-{b}= |
    What is {a}-{b} | Subtract {b} from {a} | Take {b} away from {a} | Take {b} from {a} | What is {a} minus {b} |
    What's {a} minus {b} | {a} minus {b} | Calculate {a} - {b} | Compute {a} - {b} | How much is {a} - {b} |
    How much is {a} minus {b} | What do you get when you subtract {b} from {a} | Solve {a} - {b} |
    What does {a} - {b} equal
    """,
    separator="|",
)


def operand(rng: random.Random) -> int:
    """Draws a number below 100, small ones somewhat more often because people ask for them."""
    return rng.randrange(21) if rng.random() < 0.15 else rng.randrange(LIMIT)


def pair_key(a: int, b: int) -> str:
    """Returns the same key for both orders of the operands."""
    return f"sum:{min(a, b)},{max(a, b)}"


def sum_text(a: int, b: int, adding: bool) -> str:
    """Returns the sum with its result: 17 + 25 = 42."""
    return f"{a} + {b} = {a + b}" if adding else f"{a} - {b} = {a - b}"


def _sum(rng: random.Random, a: int, b: int, adding: bool) -> Exchange:
    request = rng.choice(_ADDING if adding else _SUBTRACTING).format(a=a, b=b)
    key = f"digits:{request}" if max(a, b) < DIGITS else pair_key(a, b)
    return Exchange(key, dress(rng, request), sum_text(a, b, adding) + ".")


def addition(rng: random.Random) -> Exchange:
    """Draws two numbers to add."""
    return _sum(rng, operand(rng), operand(rng), adding=True)


def subtraction(rng: random.Random) -> Exchange:
    """Draws two numbers to subtract; the result may be negative."""
    return _sum(rng, operand(rng), operand(rng), adding=False)


def single_digits(rng: random.Random) -> Exchange:
    """Draws two single digits to add or to subtract."""
    return _sum(rng, rng.randrange(DIGITS), rng.randrange(DIGITS), rng.random() < 0.5)


def sum_document(rng: random.Random) -> Exchange:
    """Draws a plain line to complete: 17 + 25 = 42."""
    limit = DIGITS if rng.random() < _DIGIT_DOCUMENT_SHARE else LIMIT
    a, b = (operand(rng) if limit == LIMIT else rng.randrange(limit) for _ in range(2))
    head, tail = sum_text(a, b, rng.random() < 0.5).split("= ")
    key = NEVER_HELD_OUT if max(a, b) < DIGITS else pair_key(a, b)
    return Exchange(key, head + "=", f" {tail}\n")
