"""Reads what all formats of calls have in common: marks around calls, and text before, between and after them.

Content is passed on verbatim, except whitespace before a call that needs its marks, and whitespace between calls.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from chairlift.api.answers.text import WHITESPACE, PieceBuffer, Reading, Text

_EXCESS = re.compile(r"[ \t\n\r}\])`]*")
NAME = re.compile(r"[A-Za-z0-9_.-]*")

Schemas = Mapping[str, dict[str, Any]]
"""By function: the JSON schema of its arguments, as far as its format needs that."""


class CallFormat(ABC):
    """Tells how one family writes calls: `opening`, calls, `closing`. Whitespace may stand between these anywhere."""

    opening: ClassVar[str]
    closing: ClassVar[str] = ""
    other_marks: ClassVar[tuple[str, ...]] = ()  # within calls
    other_openings: ClassVar[tuple[str, ...]] = ()  # how calls without the opening mark begin
    padding: ClassVar[str] = ""  # between a value and the marks of its element
    brackets: ClassVar[tuple[str, str]] = ("", "")  # around all calls after an opening; empty: none
    between: ClassVar[str]  # separates two calls, as chat templates write them
    has_types: ClassVar[bool] = True  # written values show their types without the schemas
    bare_opening: ClassVar[str] = ""  # how a call begins where an answer begins or another call ends; empty: marked

    @property
    def is_bare(self) -> bool:
        """True if a call needs no opening mark where an answer begins and after another call."""
        return bool(self.bare_opening)

    @property
    def opening_marks(self) -> tuple[str, ...]:
        """The marks with which calls begin."""
        return (self.opening, *self.other_openings)

    @property
    def closings(self) -> tuple[str, ...]:
        """Lists the marks that close a call or its parts."""
        return (self.closing,) if self.closing else ()

    @property
    def beginnings(self) -> tuple[str, ...]:
        """Lists the texts with which a further call may begin."""
        bare = (self.between.strip(), self.bare_opening) if self.is_bare else ()
        return (*self.opening_marks, *bare)

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks of a call: often special tokens of the vocabulary, which are otherwise not part of a text."""
        return tuple(mark for mark in (self.opening, self.closing, *self.other_marks) if mark)

    def read(self, text: Text, out: PieceBuffer, schemas: Schemas) -> Reading[None]:
        """Reads an answer, or the rest after its thoughts. All text after the last wanted call is dropped."""
        yield from self._skip_closings(text)
        may_be_bare, is_closed = self.is_bare, True
        openings = (*self.opening_marks, *((self.bare_opening,) if self.is_bare and schemas else ()))
        while not out.is_full:
            held = "" if self.is_bare else WHITESPACE
            marks = openings if is_closed else (*openings, self.closing)
            if not may_be_bare and not (yield from text.pass_on_up_to(marks, out.content, held)):
                return
            if not is_closed and (is_closed := (yield from self._skip_closings(text))):
                continue
            is_bare = not may_be_bare and self.is_bare and (yield from text.peek()) == self.bare_opening
            if is_bare and not (yield from self._is_known_call(text, schemas)):
                text.advance()
                out.content(text.take())
                continue
            while (yield from text.accept(self.opening)):
                pass  # some models write it twice
            is_call = yield from self.read_calls(text, out, schemas)
            if is_call:
                is_closed = yield from self._read_closing(text)
            else:
                out.content(text.take())
            may_be_bare = is_call and self.is_bare

    def read_head(self, text: Text) -> Reading[str | None]:
        """Reads the beginning of a call without marks; the function's name, or None if it is no call."""
        raise NotImplementedError

    @abstractmethod
    def read_calls(self, text: Text, out: PieceBuffer, schemas: Schemas) -> Reading[bool]:
        """Reads what is between the marks. False if it is not a call: what was read stays held, and is content."""

    def read_list(
        self, text: Text, out: PieceBuffer, read_one: Callable[[Text, PieceBuffer], Reading[bool]]
    ) -> Reading[bool]:
        """Reads calls up to the closing bracket, even without commas. False if the first is not one."""
        if not (yield from read_one(text, out)):
            return False
        while not out.is_full:
            yield from text.accept(",")
            if (yield from text.accept("]")):
                text.take()
                break
            if not (yield from read_one(text, out)):
                text.back_to(0)
                break
        return True

    def _is_known_call(self, text: Text, schemas: Schemas) -> Reading[bool]:
        """True if a call of a known function comes next, without marks and in the middle of an answer."""
        position = text.position
        name = yield from self.read_head(text)
        text.back_to(position)
        return name in schemas

    def _read_closing(self, text: Text) -> Reading[bool]:
        """Reads what closes a call, and what separates it from the next call or the end of the answer. False if the
        closing mark may still come.
        """
        yield from self._skip_excess(text)
        is_closed = yield from self._skip_closings(text)
        if not self.brackets[0]:
            yield from text.accept(self.between.strip())
        yield from text.skip()
        text.drop_truncated(self.closing)
        if not self.is_bare:
            text.back_to(0)
        return is_closed or not self.closing

    def _skip_closings(self, text: Text) -> Reading[bool]:
        """Skips closing marks, also some that close nothing; False if none comes next."""
        is_any = False
        while (yield from text.accept_one_of(self.closings)):
            text.take()
            is_any = True
        text.back_to(0)
        return is_any

    def _skip_excess(self, text: Text) -> Reading[None]:
        """Skips brackets that close nothing, unless they belong to a text that follows."""
        yield from text.skip(_EXCESS)
        position = text.position
        is_excess = text.is_at_end or (yield from text.accept_one_of((*self.closings, *self.beginnings)))
        text.back_to(position if is_excess else 0)
        text.take()
