"""Calls that are not JSON, of which JSON is made while they are read: Qwen3-Coder's elements, and Python's calls.

A name is passed on with the first argument, and each argument when it is complete; text of an element already while it
is written. What is wrong behind complete arguments ends the call, and is content.
"""

import ast
import json
import re
from typing import Any

from chairlift.api.tools.formats import NAME, CallFormat, Schemas
from chairlift.api.tools.text import Pieces, Reading, Text, parsed

_IN_TAG = re.compile(r"[^<>\n]*")
_IN_LITERAL = re.compile(r"""[^"'(){}\[\],]*""")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_KNOWN_ESCAPES = "\\'\"abfnrtvxuU01234567\n"  # of Python's strings
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


class Qwen3Coder(CallFormat):
    opening = "<tool_call>"
    closing = "</tool_call>"
    other_openings = ("<function=",)
    between = "\n"
    _ends = ("\n</parameter>", "</parameter>")

    def read_calls(self, text: Text, out: Pieces, schemas: Schemas) -> Reading[bool]:
        name = yield from self._read_tag(text, "<function=")
        if not name:
            return False
        properties = schemas.get(name, {}).get("properties")
        num_read = 0
        while key := (yield from self._read_tag(text, "<parameter=")):
            _begin_argument(text, out, name, key, num_read)
            schema = properties.get(key) if isinstance(properties, dict) else None
            if not (yield from self._read_value(text, out, schema if isinstance(schema, dict) else {})):
                out.end_call()
                return True
            num_read += 1
        is_closed = yield from text.accept("</function>")
        if not num_read and not is_closed:
            return False
        _end_call(text, out, name, num_read, is_closed)
        return True

    def _read_tag(self, text: Text, begin: str) -> Reading[str]:
        """The name in a tag; empty if none comes next."""
        if not (yield from text.accept(begin)):
            return ""
        start = text.position
        yield from text.skip(_IN_TAG)
        name = text.since(start).strip()
        return name if (yield from text.accept(">")) else ""

    def _read_value(self, text: Text, out: Pieces, schema: dict[str, Any]) -> Reading[bool]:
        """Reads up to the end of an element; False if the answer ends before. One line break at each end is none of
        the value's.
        """
        if (yield from text.peek()) == "\n":
            text.advance()
        text.take()
        if is_text(schema):
            out.arguments('"')
            is_whole = yield from text.pass_on_up_to(self._ends, lambda part: out.arguments(_escaped(part)))
            out.arguments('"' if is_whole else "")
        else:
            parts: list[str] = []
            yield from text.value()  # a mark in a string of JSON ends nothing
            after_value = text.position
            is_json = yield from text.accept("</parameter>")
            text.back_to(after_value if is_json else 0)
            is_whole = yield from text.pass_on_up_to(self._ends, parts.append)
            raw = ("".join(parts) + text.take()).strip()
            out.arguments(_value_text(raw, schema) if is_whole else raw)
        if is_whole:
            yield from text.accept("</parameter>")
            text.take()
        return is_whole


class Pythonic(CallFormat):
    opening = "<|python_start|>"
    closing = "<|python_end|>"
    brackets = ("[", "]")
    between = ", "
    is_bare = True

    def read_calls(self, text: Text, out: Pieces, schemas: Schemas) -> Reading[bool]:  # noqa: ARG002
        if not (yield from text.accept("[")):
            return False
        is_call = yield from self._read_call(text, out)
        goes_on = is_call
        while goes_on and not out.is_full and (yield from text.accept(",")):
            goes_on = yield from self._read_call(text, out)
        if is_call and goes_on and (yield from text.accept("]")):
            text.take()
        return is_call

    def _read_call(self, text: Text, out: Pieces) -> Reading[bool]:
        yield from text.skip()
        begin = text.position
        yield from text.skip(NAME)
        name = text.since(begin)
        if not name or not (yield from text.accept("(")):
            return False
        num_read = 0
        is_closed = yield from text.accept(")")
        while not is_closed:
            key = yield from self._read_key(text)
            if not key:
                break
            _begin_argument(text, out, name, key, num_read)
            yield from _read_literal(text)
            raw = text.take().strip()
            if text.is_at_end:
                out.arguments(raw)
                out.end_call()
                return True
            value = json_of_literal(raw)
            out.arguments(_quoted(raw) if value is None else value)
            num_read += 1
            yield from text.accept(",")
            is_closed = yield from text.accept(")")
        if not num_read and not is_closed:
            return False
        _end_call(text, out, name, num_read, is_closed)
        return True

    def _read_key(self, text: Text) -> Reading[str]:
        yield from text.skip()
        begin = text.position
        yield from text.skip(NAME)
        key = text.since(begin)
        return key if (yield from text.accept("=")) else ""


def _begin_argument(text: Text, out: Pieces, name: str, key: str, num_read: int) -> None:
    text.take()
    if num_read == 0:
        out.begin_call(name)
    out.arguments(("{" if num_read == 0 else ", ") + _quoted(key) + ": ")


def _end_call(text: Text, out: Pieces, name: str, num_read: int, is_closed: bool) -> None:
    """Unless it was closed, what was read last is no part of it."""
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
    """Reads up to the comma or bracket behind a Python literal, or the end of the answer."""
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


def json_of_literal(raw: str) -> str | None:
    """A JSON or Python literal as JSON; None if it is neither."""
    value = parsed(raw)
    try:
        if value is None and raw != "null":
            # Python warns of escapes that it does not know.
            known = _ESCAPE.sub(lambda each: each[0] if each[1] in _KNOWN_ESCAPES else "\\" + each[0], raw)
            value = ast.literal_eval(known)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return written


def is_text(schema: dict[str, Any]) -> bool:
    """Whether a value of this schema is text, which is written without quotes."""
    values = schema.get("enum")
    is_list_of_texts = isinstance(values, list) and all(isinstance(value, str) for value in values)
    return schema.get("type") == "string" or ("type" not in schema and bool(values) and is_list_of_texts)


def _value_text(raw: str, schema: dict[str, Any]) -> str:
    """JSON of a value that may be of other types than text; what is no literal, or of no type that may be, is text."""
    written = json_of_literal(raw)
    allowed = set(_types_of(schema))
    if written is None:
        return _quoted(raw)
    value = json.loads(written)
    kind = "null" if value is None else _JSON_TYPES[type(value)]
    may_be = not allowed or kind in allowed or (kind == "integer" and "number" in allowed)
    return _quoted(raw) if "string" in allowed and not may_be else written


def _types_of(schema: dict[str, Any]) -> list[str]:
    kind = schema.get("type", [])
    alternatives = [each for key in ("anyOf", "oneOf") for each in schema.get(key) or [] if isinstance(each, dict)]
    return [kind] if isinstance(kind, str) else [*kind, *(kind for each in alternatives for kind in _types_of(each))]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return _quoted(text)[1:-1]
