"""JSON as a model writes it, made valid while it is written: arguments that are sent are always JSON.

Valid JSON passes unchanged. In any other text
- control characters in strings are escaped, as are backslashes that escape nothing and quotes that do not end a string;
- half a surrogate pair becomes U+FFFD;
- strings may have single quotes, `True`, `False` and `None` become JSON's, and other words become strings;
- missing commas, colons, values and brackets are added, and superfluous ones are left out.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

from chairlift.api.answers.text import WHITESPACE, Reading, Text, json_of_literal, parsed, quoted, whole_characters

_PLAIN = re.compile("[^\"'\\\\\\x00-\\x1f\ud800-\udfff]*")  # in strings
_ESCAPE = re.compile(r'\\["\\/bfnrt]|(\\u[0-9A-Fa-f]{4})+')
_BEGUN_ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{0,3})?")
_HALF = re.compile(r"\\u[Dd][89A-Fa-f][0-9A-Fa-f]{2}")
_PAIR = re.compile(r"\\u[Dd][89ABab][0-9A-Fa-f]{2}\\u[Dd][C-Fc-f][0-9A-Fa-f]{2}")
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_PYTHONS = {"True": "true", "False": "false", "None": "null"}
_CLOSERS = {"{": "}", "[": "]"}


class _Need(Enum):
    """Names what comes next in JSON."""

    VALUE = auto()
    KEY = auto()
    COLON = auto()
    NEXT = auto()  # a comma, or the end of the object or array
    NOTHING = auto()


class JsonMender:
    """Reads one value and writes it as JSON. What is read but not taken is not decided yet: whitespace, a word."""

    def __init__(self, text: Text, write: Callable[[str], None], marks: Sequence[str] = ()) -> None:
        """`marks` end the value, except in a string."""
        self._text = text
        self._write = write
        self._marks = marks
        self._begins_mark = "".join(mark[0] for mark in marks)
        first = re.escape(self._begins_mark)
        self._in_key, self._in_word = re.compile(rf'[^,:{{}}\[\]"\n{first}]*'), re.compile(rf"[^,}}\]\n{first}]*")
        self._open: list[str] = []  # brackets that have to be closed
        self._num_open = Counter[str]()  # of each kind
        self._need = _Need.VALUE
        self._has_comma = False  # which is written with the next member, because it may be superfluous
        self._is_begun = False
        self._is_in_string = False

    def read(self) -> Reading[None]:
        """Reads the value. If a mark, or the end of the answer, comes before its end, what is missing is added.

        Nothing is added if the answer was cut off or ends within a string: half a value must not look like a whole one.
        """
        while self._need is not _Need.NOTHING:
            char = self._text.glance() or (yield from self._next_character())
            if not char or (not self._open and char in "}],:"):
                break
            if char in self._begins_mark and (yield from self._is_at_mark()):
                break
            if char in "{}[],:":
                self._read_punctuation(char)
            elif self._need is _Need.COLON:
                self._write(":")
                self._need = _Need.VALUE
            elif self._need is _Need.NEXT:
                self._has_comma = True
                self._need = self._member
            else:
                yield from self._read_literal(char)
        if self._is_cut:
            self._begin()
        else:
            self.close()

    def close(self) -> None:
        """Writes what is missing, even to half a string."""
        if self._is_in_string:
            self._write('"')
            self._is_in_string = False
            self._need = _Need.COLON if self._need is _Need.KEY else _Need.NEXT
        self._write_missing_value()
        self._write("".join(_CLOSERS[bracket] for bracket in reversed(self._open)))
        self._write("" if self._is_begun else "{}")
        self._open.clear()
        self._is_begun = True

    @property
    def _is_cut(self) -> bool:
        return self._is_in_string or (self._text.is_at_end and not self._text.is_whole)

    @property
    def _member(self) -> _Need:
        return _Need.KEY if self._open[-1] == "{" else _Need.VALUE

    @property
    def _after_value(self) -> _Need:
        return _Need.NEXT if self._open else _Need.NOTHING

    def _next_character(self) -> Reading[str]:
        yield from self._text.skip()
        return (yield from self._text.peek())

    def _is_at_mark(self) -> Reading[bool]:
        begin = self._text.position
        for mark in self._marks:
            is_here = yield from self._text.accept(mark)
            self._text.back_to(begin)
            if is_here:
                return True
        return False

    def _begin(self) -> None:
        """Writes what precedes a key or value."""
        self._write("," if self._has_comma else "")
        self._write(self._text.take())
        self._has_comma = False
        self._is_begun = True

    def _leave_out(self) -> None:
        self._text.advance()
        self._text.take()

    def _read_punctuation(self, char: str) -> None:
        """Reads a bracket, comma or colon; or, where it cannot come, writes what is missing before it."""
        if char in "}]":
            self._read_closer("{" if char == "}" else "[")
        elif char == ",":
            self._read_comma()
        elif char == ":":
            self._read_colon()
        elif self._need is _Need.VALUE:
            self._begin()
            self._text.advance()
            self._write(self._text.take())
            self._open.append(char)
            self._num_open[char] += 1
            self._need = self._member
        elif self._need is _Need.KEY:
            self._leave_out()
        elif self._need is _Need.COLON:
            self._write(":")
            self._need = _Need.VALUE
        else:
            self._has_comma = True
            self._need = self._member

    def _read_closer(self, opener: str) -> None:
        """Closes what this bracket closes, and what was opened since."""
        if not self._num_open[opener]:
            self._leave_out()
            return
        self._write_missing_value()
        self._has_comma = False
        self._write(self._text.take())
        is_closed = False
        while not is_closed:
            bracket = self._open.pop()
            self._num_open[bracket] -= 1
            self._write(_CLOSERS[bracket])
            is_closed = bracket == opener
        self._leave_out()
        self._need = self._after_value

    def _read_comma(self) -> None:
        self._write_missing_value()
        if self._need is _Need.NEXT:
            self._write(self._text.take())
            self._has_comma = True
            self._need = self._member
        self._leave_out()

    def _read_colon(self) -> None:
        if self._need is _Need.KEY:
            self._begin()
            self._write('""')
            self._need = _Need.COLON
        if self._need is _Need.COLON:
            self._begin()
            self._write(":")
            self._need = _Need.VALUE
        self._leave_out()

    def _write_missing_value(self) -> None:
        if self._need is _Need.COLON:
            self._write(": null")
        elif self._need is _Need.VALUE and self._open[-1:] == ["{"]:
            self._begin()
            self._write("null")
        else:
            return
        self._need = _Need.NEXT

    def _read_literal(self, char: str) -> Reading[None]:
        """Reads a key or a value that is a string or a word."""
        self._begin()
        is_key = self._need is _Need.KEY
        if char in "\"'":
            yield from self._read_string(char, is_key)
        else:
            yield from self._read_word(is_key)
        self._need = _Need.COLON if is_key else self._after_value

    def _read_word(self, is_key: bool) -> Reading[None]:
        """Reads up to the punctuation after a word, or several words."""
        while True:
            yield from self._text.skip(self._in_key if is_key else self._in_word)
            char = yield from self._text.peek()
            if not char or char not in self._begins_mark or (yield from self._is_at_mark()):
                break
            self._text.advance()
        raw = self._text.take()
        word = raw.rstrip(WHITESPACE)
        as_value = "" if is_key else _PYTHONS.get(word, word)
        is_ready = self._is_cut or _SCALAR.fullmatch(as_value)
        self._write(raw if self._is_cut else as_value if is_ready else quoted(word))
        self._write("" if self._is_cut else raw[len(word) :])

    def _read_string(self, quote: str, is_key: bool) -> Reading[None]:
        """Reads a string. A plain run of characters is passed on at once."""
        text = self._text
        text.advance()
        text.take()
        self._write('"')
        self._is_in_string = True
        while self._is_in_string:
            text.tap = self._write
            yield from text.skip(_PLAIN)
            text.tap = None
            self._write(text.take())
            char = yield from text.peek()
            if not char:
                return
            if char == quote and (is_key or (yield from self._is_end_of_value())):
                self._leave_out()
                self._is_in_string = False
                self._write('"')
            elif char == "\\":
                yield from self._read_escape()
            else:
                text.advance()
                self._write(quoted(text.take())[1:-1])

    def _is_end_of_value(self) -> Reading[bool]:
        """True if the quote that comes next ends a value, because of what follows it."""
        text = self._text
        text.advance()
        char = text.glance() or (yield from self._next_character())
        is_end = not char or char in ",}]" or (char in "\"'" and "\n" in text.since(1))
        is_end = is_end or (char in self._begins_mark and (yield from self._is_at_mark()))
        text.back_to(0)
        return is_end

    def _read_escape(self) -> Reading[None]:
        text = self._text
        escape = yield from text.ahead(2)
        if escape[1:] == "u":
            escape = yield from text.ahead(6)
            if _HALF.fullmatch(escape):
                both = yield from text.ahead(12)
                escape = both if _PAIR.fullmatch(both) else escape
        if _BEGUN_ESCAPE.fullmatch(escape) and not text.is_whole:  # the answer was cut off there
            written = escape
        elif _HALF.fullmatch(escape):
            written = "\\ufffd"
        elif escape == "\\'":
            written = "'"
        elif _ESCAPE.fullmatch(escape):
            written = escape
        else:
            escape, written = "\\", "\\\\"
        text.advance(len(escape))
        text.take()
        self._write(written)


def mended(raw: str) -> str:
    """One value as JSON, whole even if it was cut off."""
    written: list[str] = []
    text = Text()
    text.feed(raw, is_over=True, is_whole=True)
    mender = JsonMender(text, written.append)
    for _ in mender.read():
        raise AssertionError("nothing more will come")
    mender.close()
    return "".join(written)


def json_of_container(raw: str) -> str | None:
    """An object or array as JSON, where nothing else is allowed; None if it is none.

    It may be Python, stand in a string, be escaped as if it did, or be malformed.
    """
    inside = parsed(raw if raw.startswith('"') else f'"{raw}"')
    for text in (raw, inside):
        written = json_of_literal(text.strip()) if isinstance(text, str) else None
        if written is not None and written[0] in "{[":
            return written
    return json_of_literal(mended(raw)) if raw[:1] in ("{", "[") else None


def arguments_of(written: object) -> dict[str, Any]:
    """A call's arguments as chat templates and Anthropic's API need them: an object, whatever was written.

    Text that is nearly JSON is mended, and an object in a string is that object. Nothing is no arguments. Any other
    value is kept under the name `arguments`, so that whoever reads it sees it.
    """
    value = _value_of(_value_of(written))  # clients and models put objects into strings
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"arguments": value}


def _value_of(written: object) -> object:
    """The value of a JSON text; anything else as it is."""
    if not isinstance(written, str):
        return written
    text = written.strip(WHITESPACE)
    if text in ("", "null"):
        return None
    value = None if _HALF.search(text) else parsed(text)
    if value is None and text[0] in '{["':
        value = parsed(mended(written))
    return whole_characters(written) if value is None else value
