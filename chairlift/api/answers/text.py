"""An answer's text, which arrives in pieces, and what is parsed from it.

Readers are generators that go through the text in order as if it were complete, and yield where they must wait for
more. The work is linear in the text, and the joined pieces are the same however it is split.
"""

import ast
import json
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

WHITESPACE = " \t\n\r"  # as JSON defines it
_SPACE = re.compile(r"[ \t\n\r]*")
_SCALAR = re.compile(r"[0-9A-Za-z+.-]*")
_BETWEEN = re.compile(r"[0-9A-Za-z+.,: \t\n\r-]*")  # between the strings and brackets of an array or object
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_KNOWN_ESCAPES = "\\'\"abfnrtvxuU01234567\n"  # of Python's strings

_Result = TypeVar("_Result")
Reading = Generator[None, None, _Result]


@dataclass(frozen=True, slots=True)
class Sighting(Generic[_Result]):
    """Locates what comes next in a text: nothing up to `begin`, then perhaps something that ends at `end`."""

    begin: int
    end: int = 0
    found: _Result | None = None  # None: more text decides what there is from `begin` on


Look = Callable[[str, int, bool], Sighting[_Result]]
"""Looks for something in a text from a position on; the third argument is true if no more text follows."""


@dataclass(frozen=True, slots=True)
class ContentPiece:
    """Text of the answer itself. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """Text of the model's thoughts. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """New characters of the JSON text of call `index`'s arguments. Its first piece, and no other, has the name."""

    index: int
    name: str | None
    text: str


Piece = ContentPiece | ReasoningPiece | CallPiece


class PieceBuffer:
    """The pieces that readers have found since it was last emptied."""

    def __init__(self, max_calls: int | None) -> None:
        self.max_calls = max_calls
        self.num_calls = 0
        self._pieces: list[Piece] = []

    @property
    def is_full(self) -> bool:
        """True once all wanted calls were read: the rest of the answer is dropped."""
        return self.num_calls == self.max_calls

    def empty(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def content(self, text: str) -> None:
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, ContentPiece):
            self._pieces[-1] = ContentPiece(last.text + text)
        elif text:
            self._pieces.append(ContentPiece(text))

    def reasoning(self, text: str) -> None:
        if text:
            self._pieces.append(ReasoningPiece(text))

    def begin_call(self, name: str, arguments: str = "") -> None:
        self._pieces.append(CallPiece(self.num_calls, name, arguments))

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the current call."""
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, CallPiece) and last.name is None and last.index == self.num_calls:
            self._pieces[-1] = CallPiece(last.index, None, last.text + text)
        elif text:
            self._pieces.append(CallPiece(self.num_calls, None, text))

    def end_call(self) -> None:
        self.num_calls += 1

    def add(self, pieces: Sequence[Piece]) -> None:
        """Adds what another reader found before any call was found here."""
        self._pieces += pieces
        self.num_calls += len({piece.index for piece in pieces if isinstance(piece, CallPiece)})


class Text:
    """The text, how far it was read, and how much was taken. What was read but not taken can be read again."""

    def __init__(self) -> None:
        self._text = ""
        self._start = self._at = 0  # what was read but not taken lies between
        self._is_over = False
        self.is_whole = False  # once it is over: nothing cut it off
        self.tap: Callable[[str], None] | None = None  # if set, gets what was read before the reader waits for more

    def feed(self, more: str, is_over: bool, is_whole: bool = False) -> None:
        """`is_over`: nothing follows; `is_whole`: nor would have followed without a limit."""
        self._text = self._text[self._start :] + more
        self._at -= self._start
        self._start = 0
        self._is_over = is_over
        self.is_whole = is_over and is_whole

    @property
    def position(self) -> int:
        """Counts the characters that were read but not taken."""
        return self._at - self._start

    @property
    def is_at_end(self) -> bool:
        return self._is_over and self._at == len(self._text)

    def since(self, position: int) -> str:
        return self._text[self._start + position : self._at]

    def take(self) -> str:
        """Takes all that was read but not taken."""
        taken = self._text[self._start : self._at]
        self._start = self._at
        return taken

    def advance(self, num_characters: int = 1) -> None:
        """Reads what `peek` or `ahead` has seen; nothing at the end of the answer."""
        self._at = min(self._at + num_characters, len(self._text))

    def back_to(self, position: int) -> None:
        """Goes back, so that what was read since then is read again."""
        self._at = self._start + position

    def drop_truncated(self, mark: str) -> None:
        """Drops the end of the answer if it is the beginning of this mark, truncated."""
        if self._is_over and mark.startswith(self._text[self._at :]):
            self._at = len(self._text)
            self.take()

    def peek(self) -> Reading[str]:
        """The next character; empty at the end of the answer."""
        while self._at == len(self._text) and not self._is_over:
            yield
        return self._text[self._at : self._at + 1]

    def glance(self) -> str:
        """Reads whitespace, and returns the next character if it has come already; empty if not."""
        match = _SPACE.match(self._text, self._at)
        assert match is not None, "a run may be empty"
        self._at = match.end()
        return self._text[self._at : self._at + 1]

    def ahead(self, num_characters: int) -> Reading[str]:
        """The next characters, so many unless the answer ends before."""
        while len(self._text) - self._at < num_characters and not self._is_over:
            yield
        return self._text[self._at : self._at + num_characters]

    def skip(self, run: re.Pattern[str] = _SPACE) -> Reading[bool]:
        """Reads all characters of a run, by default whitespace; True if there were any."""
        is_any = False
        while True:
            match = run.match(self._text, self._at)
            assert match is not None, "a run may be empty"
            is_any = is_any or match.end() > self._at
            self._at = match.end()
            if self._at < len(self._text) or self._is_over:
                return is_any
            yield

    def word(self, run: re.Pattern[str]) -> Reading[str]:
        """Reads whitespace, then all characters of a run, and returns those."""
        yield from self.skip()
        begin = self.position
        yield from self.skip(run)
        return self.since(begin)

    def accept(self, literal: str) -> Reading[bool]:
        """True if this comes next, perhaps after whitespace; reads it then, and whitespace in any case."""
        yield from self.skip()
        while not self._is_over and len(self._text) - self._at < len(literal):
            if not literal.startswith(self._text[self._at :]):
                return False
            yield
        if not self._text.startswith(literal, self._at):
            return False
        self._at += len(literal)
        return True

    def accept_one_of(self, literals: Sequence[str]) -> Reading[bool]:
        """True if one of these comes next, perhaps after whitespace; reads it then, and whitespace in any case."""
        for literal in literals:
            if (yield from self.accept(literal)):
                return True
        return False

    def pass_on_up_to(self, marks: Sequence[str], add: Callable[[str], None], held: str = "") -> Reading[bool]:
        """Passes text on up to the first of these marks, which comes next then; False if none comes before the end.

        Characters of `held` right before the mark are read and not passed on.
        """
        pattern = re.compile("|".join(re.escape(mark) for mark in marks if mark) or "(?!)")
        while True:
            found = pattern.search(self._text, self._at)
            if found is None and self._is_over:
                self._at = len(self._text)
                add(self.take())
                return False
            num_begun = max([num_begun_of(mark, self._text, self._at) for mark in marks]) if marks else 0
            end = len(self._text) - num_begun if found is None else found.start()
            text = self._text[self._at : end].rstrip(held)
            if text:
                self._at += len(text)
                add(self.take())
            self._at = end
            if found is not None:
                return True
            yield

    def pass_on_up_to_sight(self, look: Look[_Result], add: Callable[[str], None]) -> Reading[_Result | None]:
        """Passes text on up to the first thing that is seen, and reads that; None if there is none before the end.

        It looks again when the text that it holds back has grown by a sixteenth, so that the work stays linear.
        """
        while True:
            seen = look(self._text, self._at, self._is_over)
            self._at = seen.begin
            passed = self.take()
            if passed:
                add(passed)
            if seen.found is not None:
                self._at = seen.end
            if seen.found is not None or self._is_over:
                return seen.found
            num_held = len(self._text) - self._at
            yield
            while not self._is_over and len(self._text) - self._at < num_held + num_held // 16:
                yield

    # In JSON only strings and depth are followed; the rest is for `json.loads` to judge.

    def value(self) -> Reading[bool]:
        """True if a JSON value comes next; reads it, or up to what cannot be part of it."""
        depth = 0
        while True:
            char = yield from self.peek()
            if char == '"':
                is_good = yield from self.string()
            elif char in ("{", "[") or (depth and char in ("}", "]")):
                self.advance()
                depth += 1 if char in "{[" else -1
                is_good = True
            else:
                is_good = yield from self.skip(_BETWEEN if depth else _SCALAR)
            if not is_good or not depth:
                return is_good

    def string(self, quote: str = '"') -> Reading[bool]:
        """True if a string comes next, perhaps after whitespace; reads it."""
        if not (yield from self.accept(quote)):
            return False
        run = _IN_STRING[quote]
        while True:
            yield from self.skip(run)
            char = yield from self.peek()
            self.advance()
            if char in (quote, ""):
                return char == quote
            yield from self.peek()  # the escaped character
            self.advance()


_IN_STRING = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}


def num_begun_of(mark: str, text: str, at: int) -> int:
    """Counts the characters at the end of the text, from this position on, that may be the beginning of the mark."""
    lengths = range(min(len(text) - at, len(mark) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(mark[:length])), 0)


def parsed(raw: str) -> object:
    """The value; None for null and for what is not JSON. Accepts line breaks in strings: small models write them."""
    try:
        value: object = json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        return None
    return value


def json_of_literal(raw: str) -> str | None:
    """A JSON or Python literal as JSON; None if it is neither."""
    value = parsed(raw)
    try:
        if value is None and raw != "null":
            # Python warns of escapes that it does not know.
            known = _ESCAPE.sub(lambda each: each[0] if each[1] in _KNOWN_ESCAPES else "\\" + each[0], raw)
            value = ast.literal_eval(known)
        written = whole_characters(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return written


def is_sendable(text: object) -> bool:
    """True for a text that UTF-8 can encode, so without half a surrogate pair."""
    try:
        return isinstance(text, str) and bool(text.encode() or True)
    except UnicodeEncodeError:
        return False


def whole_characters(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which UTF-8 cannot encode."""
    return text if is_sendable(text) else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def quoted(text: str) -> str:
    """The text as a JSON string, which UTF-8 can encode."""
    return json.dumps(whole_characters(text), ensure_ascii=False)
