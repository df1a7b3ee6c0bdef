"""Dresses requests up as users do: politeness, capitals, punctuation.

A request is either an order ("Spell the word apple") or a question ("What is 17 + 25"), written with a
leading capital and no final mark. `dress` returns one of the many ways in which somebody might type it.
"""

import random

from bundled_model.words import listed

_ORDER_OPENINGS = listed(
    """
    Please {} | Can you {} | Could you {} | Could you please {} | Would you {} | Now {} | Hi, {}
    """,
    separator="|",
)
_QUESTION_OPENINGS = listed(
    """
    Please tell me, {} | Can you tell me {} | Tell me, {} | Do you know {} | And {} | Hello, {} | So {}
    """,
    separator="|",
)
_QUESTION_WORDS = listed(
    """
    what how which who when why where is are do does can name
    """
)
_ASKING_OPENINGS = ("can you", "could you", "would you", "do you")
_CLOSINGS = (", please", " please", " for me", " thanks")


def is_question(text: str) -> bool:
    """Tells whether a request reads as a question rather than as an order."""
    first = text.split(" ")[0].lower().removesuffix("'s")
    return first in _QUESTION_WORDS


def lower_first(text: str) -> str:
    """Returns the text with a lower-case first letter, unless that letter is the pronoun I."""
    return text if text.startswith(("I ", "I'")) else text[:1].lower() + text[1:]


def _with_manners(rng: random.Random, text: str) -> str:
    """Put a polite opening before the request, a closing behind it, or neither."""
    choice = rng.random()
    if choice < 0.25:
        openings = _QUESTION_OPENINGS if is_question(text) else _ORDER_OPENINGS
        return rng.choice(openings).format(lower_first(text))
    if choice < 0.35:
        return text + rng.choice(_CLOSINGS)
    return text


def _with_mark(rng: random.Random, text: str) -> str:
    """End the request with a mark that suits it, or with none."""
    asks = is_question(text) or text.lower().startswith(_ASKING_OPENINGS)
    marks, weights = (("?", "", "??", "."), (70, 25, 2, 3)) if asks else ((".", "", "!", "?"), (55, 35, 6, 4))
    return text + rng.choices(marks, weights)[0]


def _with_case(rng: random.Random, text: str) -> str:
    """Leave the capitals, or write everything small, or (rarely) everything large."""
    choice = rng.random()
    if choice < 0.25:
        return text.lower()
    if choice < 0.28:
        return text.upper()
    return text


def dress(rng: random.Random, text: str) -> str:
    """Draws one way of typing the request."""
    dressed = _with_case(rng, _with_mark(rng, _with_manners(rng, text)))
    return dressed + "\n" if rng.random() < 0.01 else dressed
