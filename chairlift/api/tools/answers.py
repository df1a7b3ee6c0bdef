"""Reads one answer: its thoughts, if the model thinks before it answers, then its calls, if it may call anything."""

import re
from dataclasses import dataclass

from chairlift.api.tools.families import FORMATS, ToolFamily
from chairlift.api.tools.formats import Schemas
from chairlift.api.tools.text import Piece, Pieces, Reading, Text

_NO_SCHEMAS: Schemas = {}
_LINE_BREAKS = re.compile(r"\n*")


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The marks around an answer's thoughts; line breaks next to them belong to nothing."""

    begin: str
    end: str
    has_begun: bool  # in the prompt; otherwise the answer may begin with the mark, and is no thought if it does not

    def read(self, text: Text, out: Pieces) -> Reading[None]:
        if not (yield from text.accept(self.begin)):
            text.back_to(0)
            if not self.has_begun:
                return
        yield from text.skip(_LINE_BREAKS)
        text.take()
        if (yield from text.pass_on_up_to([self.end], out.reasoning, held="\n")):
            yield from text.accept(self.end)
            yield from text.skip(_LINE_BREAKS)
            text.take()


class AnswerReader:
    """However the text is cut, the pieces joined are the same. Nothing but whitespace around thoughts and calls is lost
    before the last wanted call.
    """

    def __init__(
        self,
        family: ToolFamily | None,
        max_calls: int | None = None,
        schemas: Schemas = _NO_SCHEMAS,
        thoughts: Thoughts | None = None,
    ) -> None:
        """`family`: of calls; None: there are none. All text after `max_calls` calls (None: no limit) is dropped."""
        self._format = None if family is None else FORMATS[family]
        self._schemas = schemas
        self._thoughts = thoughts
        self._text = Text()
        self._pieces = Pieces(max_calls)
        self._reading = self._read()

    @property
    def is_full(self) -> bool:
        """True after as many calls as are wanted."""
        return self._pieces.is_full

    def push(self, text: str, is_last: bool = False) -> list[Piece]:
        """What is known from the text so far and was not passed on before. `is_last`: no more text comes."""
        self._text.feed(text, is_last)
        next(self._reading, None)
        if self._text.tap is not None:
            self._text.tap(self._text.take())
        return self._pieces.empty()

    def finish(self) -> list[Piece]:
        """What was held back because it might have become something else."""
        return self.push("", is_last=True)

    def _read(self) -> Reading[None]:
        if self._thoughts is not None:
            yield from self._thoughts.read(self._text, self._pieces)
        if self._format is not None:
            yield from self._format.read(self._text, self._pieces, self._schemas)
        else:
            yield from self._text.pass_on_up_to((), self._pieces.content)
