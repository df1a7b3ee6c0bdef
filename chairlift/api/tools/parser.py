"""Reads tool calls out of an answer whose text comes in pieces.

One generator reads the answer in order and yields where it has to wait for more text. The work is linear in the text.

With the name first and the arguments second, as models are taught, arguments are passed on while they are written; the
rest of a call that breaks then goes into its arguments. Any other object is held until it is complete, and is a call if
it is JSON and has what a call needs; if not, it is content with its marks. Content is passed on verbatim, but for
whitespace before a call that needs its marks, and whitespace between calls.
"""

import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

from chairlift.api.tools.formats import FORMATS, ToolFamily

_WHITESPACE = " \t\n\r"  # what JSON calls so
_SPACE = re.compile(r"[ \t\n\r]*")
_SCALAR = re.compile(r"[0-9A-Za-z+.-]*")
_BETWEEN = re.compile(r"[0-9A-Za-z+.,: \t\n\r-]*")  # between the strings and brackets of an array or object
_IN_STRING = re.compile(r'[^"\\]*')
_ARGUMENTS_KEYS = ("arguments", "parameters")
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("[^"\\]*(?:\\.[^"\\]*)*")\s*,\s*"(?:arguments|parameters)"\s*:', re.DOTALL)

_Result = TypeVar("_Result")
_Reading = Generator[None, None, _Result]


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


@dataclass(frozen=True, slots=True)
class _Member:
    """Where the key and the value of a member stand in an object's text."""

    key: slice
    value: slice


class ToolCallParser:
    """Reads one answer. However the text is cut, the pieces joined are the same."""

    def __init__(self, family: ToolFamily, max_calls: int | None = None) -> None:
        """All text after `max_calls` calls (at least 1; None: no limit) is dropped."""
        self._format = FORMATS[family]
        self._max_calls = max_calls
        self._num_calls = 0
        self._pieces: list[Piece] = []
        # What was read but not passed on is `_held`, then `_text` from `_start` to `_at`; reading goes on at `_at`.
        self._held: list[str] = []
        self._num_held = 0
        self._text = ""
        self._start = self._at = 0
        self._is_streaming = False  # what is being read are a call's arguments
        self._is_over = False
        self._reading = self._read_answer()

    @property
    def is_full(self) -> bool:
        """True after as many calls as are wanted: nothing more comes of this answer."""
        return self._num_calls == self._max_calls

    def push(self, text: str) -> list[Piece]:
        """What is known from the text so far and was not passed on before."""
        self._pieces = []
        self._held.append(self._text[self._start : self._at])
        self._num_held += self._at - self._start
        self._text = self._text[self._at :] + text
        self._start = self._at = 0
        next(self._reading, None)
        if self._is_streaming:
            self._add_arguments(self._take())
        return self._pieces

    def finish(self) -> list[Piece]:
        """No more text comes: what was held back because it might have become something else."""
        self._is_over = True
        return self.push("")

    def _read_answer(self) -> _Reading[None]:
        opening = self._format.opening
        may_be_bare = self._format.is_bare
        while not self.is_full:
            if not may_be_bare and not (yield from self._pass_on_up_to(opening, self._add_content)):
                return
            yield from self._accept(opening)
            is_call = yield from self._read_call()
            if is_call:
                self._num_calls += 1
                yield from self._read_closing()
            may_be_bare = is_call and self._format.is_bare

    def _read_call(self) -> _Reading[bool]:
        """Reads a call's object. One that is no call becomes content, up to what is wrong with it."""
        yield from self._skip(_SPACE)
        lead = self._take()
        members: list[_Member] = []
        has_begun = False
        is_good = yield from self._accept("{")
        is_whole = is_good and (yield from self._accept("}"))
        while is_good and not is_whole:
            yield from self._skip(_SPACE)
            begin = self._num_read
            is_good = yield from self._read_string()
            key = slice(begin, self._num_read)
            is_good = is_good and (yield from self._accept(":"))
            if not is_good:
                break
            begins_now = len(members) == 1 and self._begin_call()
            has_begun = has_begun or begins_now
            yield from self._skip(_SPACE)
            begin = self._num_read
            is_good = yield from (self._read_arguments() if begins_now else self._read_value())
            members.append(_Member(key, slice(begin, self._num_read)))
            is_whole = is_good and (yield from self._accept("}"))
            is_good = is_whole or (is_good and (yield from self._accept(",")))
        if has_begun:
            if not is_whole and not self._is_at_end:
                self._unread()  # the arguments are complete; what is wrong after them is no part of the call
            self._take()
            return True
        text = self._take()
        call = _call_of(text, members, self._format.is_bare) if is_whole else None
        if call is None:
            self._add_content(lead + text)
            return False
        self._pieces.append(CallPiece(self._num_calls, *call))
        return True

    def _begin_call(self) -> bool:
        """Passes on the name, if it came first and the arguments come now."""
        head = _HEAD.fullmatch("".join(self._held) + self._text[self._start : self._at])
        name = None if head is None else _text_of(head[1])
        if not name:
            return False
        self._take()
        self._pieces.append(CallPiece(self._num_calls, name, ""))
        return True

    def _read_arguments(self) -> _Reading[bool]:
        """Reads the arguments of the call that has begun. False if they are not JSON, and go up to the closing mark."""
        self._take()  # whitespace
        self._is_streaming = (yield from self._peek()) in ("{", "[")
        is_value = yield from self._read_value()
        raw = self._take()
        self._add_arguments(raw if self._is_streaming or not is_value else _arguments_text(raw))
        self._is_streaming = False
        if not is_value:
            yield from self._pass_on_up_to(self._format.closing, self._add_arguments)
        return is_value

    def _read_closing(self) -> _Reading[None]:
        """Reads what closes a call, and what stands between it and the next call or the end of the answer."""
        separator = self._format.separator.strip(_WHITESPACE)
        if self._format.closing and (yield from self._accept(self._format.closing)):
            self._take()
        if separator:
            yield from self._accept(separator)
        yield from self._skip(_SPACE)
        if self._is_over and self._format.closing.startswith(self._text[self._at :]):  # it may be cut off
            self._at = len(self._text)
            self._take()
        elif not self._format.is_bare:
            self._unread()

    # --- JSON: only strings and depth are followed, the rest is for `json.loads` to judge

    def _read_value(self) -> _Reading[bool]:
        """Whether a JSON value comes next; reads it, or up to what cannot be part of it."""
        depth = 0
        while True:
            char = yield from self._peek()
            if char == '"':
                is_good = yield from self._read_string()
            elif char in ("{", "["):
                self._at += 1
                depth += 1
                is_good = True
            elif depth and char in ("}", "]"):
                self._at += 1
                depth -= 1
                is_good = True
            else:
                is_good = yield from self._skip(_BETWEEN if depth else _SCALAR)
            if not is_good or not depth:
                return is_good

    def _read_string(self) -> _Reading[bool]:
        if not (yield from self._accept('"')):
            return False
        while True:
            yield from self._skip(_IN_STRING)
            char = yield from self._peek()
            self._at += len(char)
            if char in ('"', ""):
                return char == '"'
            escaped = yield from self._peek()
            self._at += len(escaped)

    # --- text

    @property
    def _num_read(self) -> int:
        """Characters that were read and not passed on."""
        return self._num_held + self._at - self._start

    @property
    def _is_at_end(self) -> bool:
        return self._is_over and self._at == len(self._text)

    def _peek(self) -> _Reading[str]:
        """The next character; empty at the end of the answer."""
        while self._at == len(self._text) and not self._is_over:
            yield
        return self._text[self._at : self._at + 1]

    def _skip(self, run: re.Pattern[str]) -> _Reading[bool]:
        """Reads all characters of a run; whether there was any."""
        is_any = False
        while True:
            match = run.match(self._text, self._at)
            assert match is not None, "a run may be empty"
            is_any = is_any or match.end() > self._at
            self._at = match.end()
            if self._at < len(self._text) or self._is_over:
                return is_any
            yield

    def _accept(self, literal: str) -> _Reading[bool]:
        """Whether this comes next, perhaps after whitespace; reads it then, and whitespace in any case."""
        yield from self._skip(_SPACE)
        while not self._is_over and len(self._text) - self._at < len(literal):
            if not literal.startswith(self._text[self._at :]):
                return False
            yield
        if not self._text.startswith(literal, self._at):
            return False
        self._at += len(literal)
        return True

    def _pass_on_up_to(self, mark: str, add: Callable[[str], None]) -> _Reading[bool]:
        """Passes text on up to a mark, which comes next then; False if none comes before the end ("": there is none).

        Of content before a call that needs its marks, whitespace is read and held.
        """
        holds_space = mark == self._format.opening and not self._format.is_bare
        while True:
            at = self._text.find(mark, self._at) if mark else -1
            if at < 0 and self._is_over:
                self._at = len(self._text)
                add(self._take())
                return False
            end = at if at >= 0 else len(self._text) - _num_begun(self._text[self._at :], mark)
            text = self._text[self._at : end].rstrip(_WHITESPACE if holds_space else "")
            if text:
                self._at += len(text)
                add(self._take())
            self._at = end
            if at >= 0:
                return True
            yield

    def _take(self) -> str:
        """All that was read and not passed on, which now counts as passed on."""
        taken = "".join(self._held) + self._text[self._start : self._at]
        self._held = []
        self._num_held = 0
        self._start = self._at
        return taken

    def _unread(self) -> None:
        """All that was read and not passed on is to be read again."""
        held = "".join(self._held)
        if held:
            self._text = held + self._text[self._start :]
            self._held, self._num_held, self._start = [], 0, 0
        self._at = self._start

    def _add_content(self, text: str) -> None:
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, ContentPiece):
            self._pieces[-1] = ContentPiece(last.text + text)
        elif text:
            self._pieces.append(ContentPiece(text))

    def _add_arguments(self, text: str) -> None:
        if text:
            self._pieces.append(CallPiece(self._num_calls, None, text))


def _num_begun(text: str, mark: str) -> int:
    """How many characters at the end of the text may be the beginning of the mark."""
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((length for length in lengths if mark.startswith(text[-length:])), 0)


def _call_of(text: str, members: list[_Member], needs_arguments: bool) -> tuple[str, str] | None:
    """Name and arguments of the call that a whole object is; None if it is not a call."""
    if _parsed(text) is None:
        return None
    values = {_text_of(text[member.key]): text[member.value] for member in members}
    name = _text_of(values.get("name", ""))
    arguments = next((values[key] for key in _ARGUMENTS_KEYS if key in values), None)
    if not name or (arguments is None and needs_arguments):
        return None
    return name, "{}" if arguments is None else _arguments_text(arguments)


def _parsed(raw: str) -> object:
    """None for what is not JSON, and for null. Line breaks inside strings, a habit of small models, are accepted."""
    try:
        parsed: object = json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        return None
    return parsed


def _text_of(raw: str) -> str | None:
    """The text of a JSON string. None if it is not one, or one that UTF-8 has no bytes for (half a surrogate pair)."""
    text = _parsed(raw)
    if not isinstance(text, str):
        return None
    try:
        text.encode()
    except UnicodeEncodeError:
        return None
    return text


def _arguments_text(raw: str) -> str:
    """As written, but for two habits of models: null for no arguments, and the object inside a string."""
    if raw == "null":
        return "{}"
    if raw.startswith('"'):
        inner = _text_of(raw)
        if inner is not None and isinstance(_parsed(inner), dict):
            return inner
    return raw
