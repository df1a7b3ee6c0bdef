"""What all formats of calls have in common: marks around calls, and text before, between and after them.

Content is passed on verbatim, except whitespace before a call that needs its marks, and whitespace between calls.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from chairlift.api.tools.text import WHITESPACE, PieceBuffer, Reading, Text

NAME = re.compile(r"[A-Za-z0-9_.-]*")

Schemas = Mapping[str, dict[str, Any]]
"""By function: the JSON schema of its arguments."""


class CallFormat(ABC):
    """How one family writes calls: `opening`, calls, `closing`. Whitespace may stand between these anywhere."""

    opening: ClassVar[str]
    closing: ClassVar[str] = ""
    other_marks: ClassVar[tuple[str, ...]] = ()  # within calls
    other_openings: ClassVar[tuple[str, ...]] = ()  # how calls without the opening mark begin
    brackets: ClassVar[tuple[str, str]] = ("", "")  # around all calls after an opening; empty: none
    between: ClassVar[str]  # separates two calls, as chat templates write them
    has_types: ClassVar[bool] = True  # written values show their types without the schemas
    is_bare: ClassVar[bool] = False  # a call needs no opening where an answer begins and after another call

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks of a call: often special tokens of the vocabulary, which are otherwise not part of a text."""
        return tuple(mark for mark in (self.opening, self.closing, *self.other_marks) if mark)

    def read(self, text: Text, out: PieceBuffer, schemas: Schemas) -> Reading[None]:
        """Reads an answer, or the rest after its thoughts. All text after the last wanted call is dropped."""
        may_be_bare = self.is_bare
        openings = (self.opening, *self.other_openings)
        while not out.is_full:
            held = "" if self.is_bare else WHITESPACE
            if not may_be_bare and not (yield from text.pass_on_up_to(openings, out.content, held)):
                return
            yield from text.accept(self.opening)
            is_call = yield from self.read_calls(text, out, schemas)
            if is_call:
                yield from self._read_closing(text)
            else:
                out.content(text.take())
            may_be_bare = is_call and self.is_bare

    @abstractmethod
    def read_calls(self, text: Text, out: PieceBuffer, schemas: Schemas) -> Reading[bool]:
        """Reads what is between the marks. False if it is not a call: what was read stays held, and is content."""

    def read_list(
        self, text: Text, out: PieceBuffer, read_one: Callable[[Text, PieceBuffer], Reading[bool]]
    ) -> Reading[bool]:
        """Reads calls up to the closing bracket. False if the first is not one."""
        if not (yield from read_one(text, out)):
            return False
        while not out.is_full and (yield from text.accept(",")):
            if not (yield from read_one(text, out)):
                return True
        if (yield from text.accept("]")):
            text.take()
        return True

    def _read_closing(self, text: Text) -> Reading[None]:
        """Reads what closes a call, and what separates it from the next call or the end of the answer."""
        if self.closing and (yield from text.accept(self.closing)):
            text.take()
        if not self.brackets[0]:
            yield from text.accept(self.between.strip())
        yield from text.skip()
        text.take_tail_of(self.closing)
        if not self.is_bare:
            text.back_to(0)
