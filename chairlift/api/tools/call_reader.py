"""Reads one call, a JSON object with the function's name and its arguments, out of text that comes in pieces.

With the name first and the arguments second, as models are taught, the arguments are passed on while they are written.
Any other object is held until it is complete, and is a call if it is JSON and has what a call needs.
"""

import json
from enum import Enum, auto

from chairlift.api.tools.json_value import WHITESPACE, ScanState, ValueScanner
from chairlift.api.tools.pieces import CallPiece

_ARGUMENTS_KEYS = ("arguments", "parameters")


class ReaderState(Enum):
    READING = auto()
    DONE = auto()  # the object is complete; `rest` comes after it
    FAILED = auto()  # not a call, or not JSON any more from the beginning of `rest` on


class _Expect(Enum):
    OBJECT = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    SEPARATOR = auto()


class CallReader:
    """One object. `held` is what was read and not passed on; `has_begun` once the name was passed on."""

    def __init__(self, index: int, must_have_arguments: bool) -> None:
        self.state = ReaderState.READING
        self.rest = ""
        self.has_begun = False
        self.is_value_open = False  # the name was passed on, and the arguments' end was not reached yet
        self._index = index
        self._must_have_arguments = must_have_arguments
        self._expect = _Expect.OBJECT
        self._scanner: ValueScanner | None = None  # of the key or value that is being read
        self._token: list[str] = []  # its text so far
        self._is_streaming = False  # and whether that text is passed on at once
        self._key = ""
        self._members: dict[str, str] = {}  # raw JSON by key
        self._held: list[str] = []
        self._pieces: list[CallPiece] = []

    @property
    def held(self) -> str:
        return "".join(self._held)

    def push(self, text: str) -> list[CallPiece]:
        """Reads until the object ends or fails. What is not read then is in `rest`."""
        self._pieces = []
        position = 0
        while position < len(text) and self.state is ReaderState.READING:
            if self._scanner is not None:
                position = self._read_token(self._scanner, text, position)
            else:
                position += self._read_mark(text[position])
        self.rest = text[position:]
        return self._pieces

    def _read_mark(self, char: str) -> int:
        """Reads what stands between keys and values. Returns how many characters that took: one or none."""
        if char in WHITESPACE:
            if not self.is_value_open:  # before the arguments, of which it is no part
                self._held.append(char)
            return 1
        match self._expect, char:
            case (_Expect.FIRST_KEY | _Expect.KEY, '"') | (_Expect.VALUE, _):
                self._scanner = ValueScanner()
                self._is_streaming = self.is_value_open and char in "{["
                return 0
            case _Expect.OBJECT, "{":
                self._expect = _Expect.FIRST_KEY
            case _Expect.COLON, ":":
                self._expect = _Expect.VALUE
            case _Expect.SEPARATOR, ",":
                self._expect = _Expect.KEY
            case ((_Expect.FIRST_KEY | _Expect.SEPARATOR), "}"):
                self.state = ReaderState.DONE
            case _:
                self.state = ReaderState.FAILED
                return 0
        self._held.append(char)
        if char == ":":
            self._begin_if_in_order()
        elif char == "}":
            self._end_object()
        return 1

    def _begin_if_in_order(self) -> None:
        if self.has_begun or self._key not in _ARGUMENTS_KEYS or list(self._members) != ["name"]:
            return
        name = _text_of(self._members["name"])
        if name:
            self.has_begun = self.is_value_open = True
            self._pass_on(name, "")

    def _read_token(self, scanner: ValueScanner, text: str, position: int) -> int:
        end = scanner.scan(text, position)
        if self._is_streaming:
            self._pass_on(None, text[position:end])
        else:
            self._held.append(text[position:end])
            self._token.append(text[position:end])
        if scanner.state is ScanState.MALFORMED:
            self.state = ReaderState.FAILED
        elif scanner.state is ScanState.COMPLETE:
            self._end_token()
        return end

    def _end_token(self) -> None:
        raw = "".join(self._token)
        self._token = []
        self._scanner = None
        if self._expect is not _Expect.VALUE:
            self._key = _text_of(raw) or ""
            self._expect = _Expect.COLON
            return
        self._expect = _Expect.SEPARATOR
        if not self.is_value_open:
            self._members[self._key] = raw
            return
        self.is_value_open = False
        if not self._is_streaming:
            self._pass_on(None, _arguments_text(raw))
        self._is_streaming = False

    def _end_object(self) -> None:
        if self.has_begun:
            return
        name = _text_of(self._members.get("name", ""))
        arguments = next((self._members[key] for key in _ARGUMENTS_KEYS if key in self._members), None)
        if not name or (arguments is None and self._must_have_arguments) or _parsed(self.held) is None:
            self.state = ReaderState.FAILED
        else:
            self._pass_on(name, "{}" if arguments is None else _arguments_text(arguments))

    def _pass_on(self, name: str | None, arguments: str) -> None:
        self._held = []
        if name or arguments:
            self._pieces.append(CallPiece(self._index, name, arguments))


def _parsed(raw: str) -> object:
    """None for what is not JSON, and for null. Line breaks inside strings, a habit of small models, are let pass."""
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
