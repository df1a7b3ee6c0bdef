"""Reads kinds of tools: what they are called, how users ask for them, what comes back and what is then said.

The known kinds stand in `tool_kinds.txt`, a block of lines for each, an empty line between two blocks:

    names of the function
    slot=names of its parameter, for every parameter, or a hyphen for none
    words, at least one of which is in every question for it | ...
    questions, with slots | ...
    results | ...
    what is said of a result

A question need not have all the slots; those it lacks are left out of the call.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from bundled_model.words import listed


@dataclass(frozen=True)
class Slot:
    """Holds a parameter: what fills it, the names it may have, its JSON type."""

    fill: str
    names: tuple[str, ...]
    type: str


@dataclass(frozen=True)
class Kind:
    """Holds a kind of tool, under one of several names."""

    names: tuple[str, ...]
    slots: tuple[Slot, ...]
    words: tuple[str, ...]
    questions: tuple[str, ...]
    results: tuple[str, ...]
    answer: str

    def may_be_meant(self, question: str) -> bool:
        """Tells whether a question may ask for this kind of tool."""
        text = question.lower()
        return any(word in text for word in self.words)

    def clashes(self, other: "Kind") -> bool:
        """Tells whether some questions suit both kinds."""
        return not set(self.words).isdisjoint(other.words)


SLOT = re.compile(r"\{(\w+)\}")
INTEGER_FILLS = ("number", "other_number", "small", "age", "year")


def _read_slot(text: str) -> Slot:
    """Reads a slot such as city=city,place."""
    fill, names = text.split("=")
    return Slot(fill, listed(names, ","), "integer" if fill in INTEGER_FILLS else "string")


def _read(block: str) -> Kind:
    """Reads a kind from its lines."""
    names, slots, words, *questions, results, answer = block.split("\n")
    return Kind(
        names=listed(names),
        slots=() if slots == "-" else tuple(_read_slot(slot) for slot in slots.split()),
        words=listed(words, "|"),
        questions=listed(" ".join(questions), "|"),
        results=listed(results, "|"),
        answer=answer,
    )


KINDS = tuple(_read(block) for block in Path(__file__).with_name("tool_kinds.txt").read_text().strip().split("\n\n"))
