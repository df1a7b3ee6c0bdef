"""Custom tools, which are called with a text instead of arguments: how the model sees them and what it wrote.

Chat templates know functions only, so a custom tool is shown as a function with one parameter, `input`, and the input
of a call is that argument. A grammar for the input is enforced where it is regular: see `lark`.
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from chairlift.api.answers.functions import FunctionSpec
from chairlift.api.answers.lark import GrammarSyntaxError, NotRegular, pattern_of_lark
from chairlift.api.answers.text import CallPiece, Piece, is_sendable, parsed
from chairlift.errors import InvalidRequest

INPUT = "input"
"""The name of the one parameter."""

_HEAD = re.compile(rf'\s{{0,32}}{{\s{{0,32}}"{INPUT}"\s{{0,32}}:\s{{0,32}}"')
_WHOLE_TEXT = re.compile(  # up to an escape or a surrogate pair that is not complete yet
    r"""(?:[^"\\]++|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}
    |\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4}|(?=[^\\]|\\[^u])))*+""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class InputGrammar:
    """Constrains the input of a custom tool; `syntax`: lark or regex."""

    syntax: str
    definition: str


def custom_function(name: str, description: str | None, grammar: InputGrammar | None) -> FunctionSpec:
    """A custom tool as a function. InvalidRequest if its grammar is not one."""
    about: dict[str, Any] = {"type": "string", "description": "the input of the tool, as plain text"}
    if grammar is not None:
        about["description"] = f"the input of the tool, which must match this {grammar.syntax}:\n{grammar.definition}"
    parameters = {"type": "object", "properties": {INPUT: about}, "required": [INPUT], "additionalProperties": False}
    function = FunctionSpec(name, parameters, None, description, is_custom=True)
    if grammar is None:
        return function
    try:
        return replace(function, input_pattern=_pattern_of(grammar))
    except NotRegular as problem:
        return replace(function, left_out=(f"tools: the grammar of custom tool {name!r} is not enforced: {problem}",))
    except GrammarSyntaxError as error:
        raise InvalidRequest(f"tools: the grammar of custom tool {name!r} cannot be read: {error}", "tools") from error


@lru_cache(256)  # a request has up to 128, and asks for each several times
def _pattern_of(grammar: InputGrammar) -> str:
    """The regular expression whose whole matches are the inputs."""
    if grammar.syntax == "lark":
        return pattern_of_lark(grammar.definition)
    return re.sub(r"(?<!\\)((?:\\\\)*)\$$", r"\1", grammar.definition.removeprefix("^"))


def call_arguments(text: str) -> str:
    """The arguments, as JSON, of a call with this input."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class CustomCallPiece(CallPiece):
    """New characters of the input of call `index` of a custom tool. Its first piece, and no other, has the name."""


class CustomInputs:
    """Turns the pieces of custom tools' calls, which are JSON, into pieces of their inputs."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._index: int | None = None  # of the call that is being read, if it is of a custom tool
        self._input = _InputText()

    def read(self, pieces: Sequence[Piece], is_last: bool) -> list[Piece]:
        """The pieces with those of custom tools replaced. `is_last`: no others follow."""
        if not self._names:
            return list(pieces)
        told: list[Piece] = []
        for piece in pieces:
            if not isinstance(piece, CallPiece) or piece.index != self._index:
                told += self._end()
            if isinstance(piece, CallPiece) and piece.name in self._names:
                self._index, self._input = piece.index, _InputText()
            if not isinstance(piece, CallPiece) or piece.index != self._index:
                told.append(piece)
            elif (text := self._input.push(piece.text)) or piece.name is not None:
                told.append(CustomCallPiece(piece.index, piece.name, text))
        return told + (self._end() if is_last else [])

    def _end(self) -> list[Piece]:
        index, self._index = self._index, None
        rest = "" if index is None else self._input.finish()
        return [] if index is None or not rest else [CustomCallPiece(index, None, rest)]


class _InputText:
    """Decodes the input in a call's arguments while they are written. Arguments of another form are kept to the end."""

    def __init__(self) -> None:
        self._held = ""  # of the arguments, not yet decoded
        self._is_begun = False
        self._is_ended = False

    def push(self, text: str) -> str:
        """The new characters of the input."""
        self._held += text
        if not self._is_begun:
            head = _HEAD.match(self._held)
            if head is None:
                return ""
            self._is_begun, self._held = True, self._held[head.end() :]
        if self._is_ended:
            return ""
        whole = _WHOLE_TEXT.match(self._held)
        assert whole is not None, "it matches nothing, too"
        self._is_ended = self._held[whole.end() : whole.end() + 1] == '"'
        self._held = self._held[whole.end() :]
        return _decoded(whole[0])

    def finish(self) -> str:
        """Returns what is still held back at the end: the arguments, or the text in them, if they have another form."""
        if self._is_begun:
            return ""
        value = parsed(self._held)
        texts = list(value.values()) if isinstance(value, dict) else [value]
        is_text = len(texts) == 1 and isinstance(texts[0], str) and is_sendable(texts[0])
        return str(texts[0]) if is_text else "" if value == {} else self._held


def _decoded(written: str) -> str:
    """The text of a JSON string without its quotes; as it is if it is not one."""
    try:
        text = str(json.loads(f'"{written}"', strict=False))
    except ValueError:
        return written
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
