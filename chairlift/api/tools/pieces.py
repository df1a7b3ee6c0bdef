"""What a parser makes of a model's text: pieces of content and pieces of calls, in the order of the text."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentPiece:
    """Text for the reader. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """New characters of the JSON text of call `index`'s arguments. Its first piece, and no other, has the name."""

    index: int
    name: str | None
    arguments: str


Piece = ContentPiece | CallPiece


class ToolCallParser(Protocol):
    """Reads one answer. However the text is cut, the pieces joined are the same."""

    def push(self, text: str) -> list[Piece]:
        """What can be told from the text so far and was not told before."""
        ...

    def finish(self) -> list[Piece]:
        """No more text comes: what was held back because it might have become something else."""
        ...
