"""Breaks text into lines between words, as it arrives, for a terminal."""

import re
from unicodedata import combining, east_asian_width

_PARTS = re.compile(r"\n|[^\S\n]+|\S+")
_FENCE = "```"


class WordWrap:
    """Takes pieces of a text, and gives them back with line breaks where a word would cross the edge.

    The last word waits until it is complete. Blocks of code stay as they are.
    """

    def __init__(self, width: int) -> None:
        """`width`: columns of the terminal."""
        self.width = max(1, width)
        self._column = 0
        self._waiting = ""
        self._space = ""  # before the next word, unless that begins a line
        self._is_code = False
        self._line = ""  # as the text has it

    def push(self, piece: str) -> str:
        """Takes more text; returns what can be shown."""
        parts = _PARTS.findall(self._waiting + piece)
        self._waiting = parts.pop() if parts and not parts[-1].isspace() else ""
        return "".join(map(self._show, parts))

    def end(self) -> str:
        """Returns what waits, at the end of the text."""
        rest, self._waiting = self._waiting, ""
        return self._show(rest) if rest else ""

    def _show(self, part: str) -> str:
        if part == "\n":
            self._is_code ^= self._line.lstrip().startswith(_FENCE)
            self._column, self._space, self._line = 0, "", ""
            return part
        self._line += part
        if part.isspace():
            self._space += part
            return ""
        space, self._space = self._space, ""
        size = _columns(part)
        if not self._is_code and self._column and self._column + _columns(space) + size > self.width:
            self._column = size % self.width
            return f"\n{part}"
        self._column += _columns(space) + size
        return space + part


def _columns(text: str) -> int:
    """Counts the columns of a terminal that a text takes."""
    return sum(0 if combining(each) else 2 if east_asian_width(each) in "WF" else 1 for each in text)
