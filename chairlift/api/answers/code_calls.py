"""Calls that are code: elements, as Qwen3-Coder's and Seed-OSS's, and Python's, which become JSON while they are read.

A name is passed on with the first argument, each argument when it is complete, and text of an element while it is
written. Anything malformed after complete arguments ends the call, and is content.
"""

import json
import re
from collections.abc import Callable, Collection, Sequence

from chairlift.api.answers.formats import NAME, CallFormat, Schemas
from chairlift.api.answers.mending import json_of_container
from chairlift.api.answers.text import PieceBuffer, Reading, Text, json_of_literal, quoted

_IN_TAG = re.compile(r"[^<>\n]*")
_IN_LITERAL = re.compile(r"""[^"'(){}\[\],]*""")
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


class Qwen3Coder(CallFormat):
    opening = "<tool_call>"
    closing = "</tool_call>"
    other_openings = ("<function=",)
    has_types = False
    padding = "\n"
    between = "\n"

    @property
    def closings(self) -> tuple[str, ...]:
        return (self.closing, "</function>", "</parameter>")

    def read_calls(self, text: Text, out: PieceBuffer, schemas: Schemas) -> Reading[bool]:
        name = yield from self._read_tag(text, "<function=")
        if not name:
            return False
        head = text.position
        properties = schemas.get(name, {}).get("properties")
        known = properties if isinstance(properties, dict) else {}
        num_read = 0
        while key := (yield from self._read_tag(text, "<parameter=")):
            _begin_argument(text, out, name, key, num_read)
            if not (yield from self._read_value(text, out, known.get(key), known)):
                out.end_call()
                return True
            num_read += 1
        is_closed = yield from text.accept("</function>")
        if not num_read and not is_closed:
            if not (yield from text.accept_one_of((self.closing, *self.beginnings))):
                return False
            text.back_to(head)
        _end_call(text, out, name, num_read, is_closed or not num_read)
        return True

    def _read_tag(self, text: Text, begin: str) -> Reading[str]:
        """The name in a tag, before which the end of an element may stand that was not begun; empty if none comes next.

        Models quote the name at times, or forget the bracket at the end of its line.
        """
        position = text.position
        while (yield from text.accept("</parameter>")):
            position = text.position
        text.back_to(position)
        if not (yield from text.accept(begin)):
            return ""
        name = (yield from text.word(_IN_TAG)).strip()
        if len(name) > 2 and name[0] == name[-1] and name[0] in "\"'":
            name = name[1:-1]
        return name if (yield from text.accept(">")) or (yield from text.peek()) == "<" else ""

    def _read_value(self, text: Text, out: PieceBuffer, schema: object, known: Collection[str]) -> Reading[bool]:
        """Reads up to the end of an element; False if the answer was cut off before. One line break at each end does
        not belong to the value, unless there is none at the first and elements have no padding. `known`: the function's
        parameters.
        """
        is_padded = (yield from text.peek()) == "\n"
        if is_padded:
            text.advance()
        text.take()
        marks = [*self.closings, "<parameter="]
        padded = marks if is_padded or self.padding else [mark for mark in marks if mark != "</parameter>"]
        marks += ["\n" + mark for mark in padded]
        if is_text(schema):
            out.arguments('"')
            is_whole = yield from self._pass_on_value(text, lambda part: out.arguments(_escaped(part)), marks, known)
            out.arguments('"' if is_whole else "")
        else:
            parts: list[str] = []
            yield from text.value()  # a mark in a JSON string does not end the value
            after_value = text.position
            is_json = yield from self._is_at_end_of_value(text, known)
            text.back_to(after_value if is_json else 0)
            parts.append(text.take())
            is_whole = yield from self._pass_on_value(text, parts.append, marks, known)
            raw = "".join(parts).strip()
            out.arguments(_value_text(raw, schema) if is_whole else raw)
        return is_whole

    def _pass_on_value(
        self, text: Text, add: Callable[[str], None], marks: Sequence[str], known: Collection[str]
    ) -> Reading[bool]:
        """Passes on the rest of a value, and reads its end; False if the answer was cut off before."""
        while (yield from text.pass_on_up_to(marks, add)):
            if (yield from self._is_at_end_of_value(text, known)):
                yield from text.accept("</parameter>")
                text.take()
                return True
            text.advance()
            add(text.take())
        return text.is_whole

    def _is_at_end_of_value(self, text: Text, known: Collection[str]) -> Reading[bool]:
        """True if a mark that comes next ends a value, and is not part of it: models forget the right one."""
        position = text.position
        if (yield from text.accept_one_of(("</parameter>", self.closing))):
            is_end = True
        elif (yield from text.accept("</function>")):
            is_end = (yield from text.accept_one_of((self.closing, *self.beginnings))) or text.is_at_end
        else:
            key = yield from self._read_tag(text, "<parameter=")
            is_end = bool(key) and (not known or key in known)
        text.back_to(position)
        return is_end


class SeedOss(Qwen3Coder):
    opening = "<seed:tool_call>"
    closing = "</seed:tool_call>"
    padding = ""


class Pythonic(CallFormat):
    opening = "<|python_start|>"
    closing = "<|python_end|>"
    brackets = ("[", "]")
    between = ", "
    bare_opening = "["

    def read_head(self, text: Text) -> Reading[str | None]:
        yield from text.accept("[")
        name = yield from text.word(NAME)
        return name if (yield from text.accept("(")) else None

    def read_calls(self, text: Text, out: PieceBuffer, schemas: Schemas) -> Reading[bool]:
        """Reads a list; or, where an answer begins, calls of known functions without its brackets."""
        is_list = yield from text.accept("[")
        if not is_list and not (schemas and (yield from self._is_known_call(text, schemas))):
            return False
        return (yield from self.read_list(text, out, self._read_call))

    def _read_call(self, text: Text, out: PieceBuffer) -> Reading[bool]:
        name = yield from text.word(NAME)
        if not name or not (yield from text.accept("(")):
            return False
        num_read = 0
        is_closed = yield from text.accept(")")
        while not is_closed:
            key = yield from text.word(NAME)
            if not key or not (yield from text.accept("=")):
                break
            _begin_argument(text, out, name, key, num_read)
            yield from _read_literal(text)
            raw = text.take().strip()
            value = json_of_literal(raw)
            if text.is_at_end and (value is None or not text.is_whole):
                out.arguments(raw)
                out.end_call()
                return True
            out.arguments(quoted(raw) if value is None else value)
            num_read += 1
            yield from text.accept(",")
            is_closed = yield from text.accept(")")
        if not num_read and not is_closed:
            return False
        _end_call(text, out, name, num_read, is_closed)
        return True


def _begin_argument(text: Text, out: PieceBuffer, name: str, key: str, num_read: int) -> None:
    text.take()
    if num_read == 0:
        out.begin_call(name)
    out.arguments(("{" if num_read == 0 else ", ") + quoted(key) + ": ")


def _end_call(text: Text, out: PieceBuffer, name: str, num_read: int, is_closed: bool) -> None:
    """Ends a call. If it was not closed, what was read last is not part of it."""
    if is_closed:
        text.take()
    else:
        text.back_to(0)
    if num_read == 0:
        out.begin_call(name, "{}")
    else:
        out.arguments("}")
    out.end_call()


def _read_literal(text: Text) -> Reading[None]:
    """Reads up to the comma or bracket after a Python literal, or the end of the answer."""
    depth = 0
    while True:
        yield from text.skip(_IN_LITERAL)
        char = yield from text.peek()
        if char in ("'", '"') and char:
            yield from text.string(char)
        elif not char or (not depth and char in ",)]}"):
            return
        else:
            depth += (char in "([{") - (char in ")]}")
            text.advance()


def is_text(schema: object) -> bool:
    """True if a value of this schema is text, which is written without quotes."""
    if not isinstance(schema, dict):
        return False
    values = schema.get("enum")
    is_list_of_texts = isinstance(values, list) and all(isinstance(value, str) for value in values)
    return schema.get("type") == "string" or ("type" not in schema and bool(values) and is_list_of_texts)


def _value_text(raw: str, schema: object) -> str:
    """JSON of a value that need not be text; what is not a literal, or not of an allowed type, becomes text."""
    written, allowed = json_of_literal(raw), _types_of(schema)
    if allowed & {"array", "object"} and "string" not in allowed:
        written = json_of_container(raw) or written
    if written is None:
        return quoted(raw)
    value = json.loads(written)
    kind = "null" if value is None else _JSON_TYPES[type(value)]
    may_be = not allowed or kind in allowed or (kind == "integer" and "number" in allowed)
    return quoted(raw) if "string" in allowed and not may_be else written


def _types_of(schema: object) -> set[str]:
    """The types that a schema names; the schema itself may be invalid."""
    if not isinstance(schema, dict):
        return set()
    kinds = schema.get("type")
    found = {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}
    for alternatives in (schema.get("anyOf"), schema.get("oneOf"), schema.get("allOf")):
        found.update(*map(_types_of, alternatives if isinstance(alternatives, list) else []))
    return found


def _escaped(text: str) -> str:
    return quoted(text)[1:-1]
