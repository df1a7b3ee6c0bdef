"""How calls are parsed: what all formats have in common, those whose calls are JSON, and those whose calls are code.

If the name comes first and the arguments second, as models are taught, arguments are passed on while they are written;
if such a call is malformed, its rest goes into its arguments. Any other JSON object is held until it is complete: it is
a call if it has what a call needs, else it is content, with its marks. Content is passed on verbatim, except whitespace
before a call that needs its marks, and whitespace between calls.

Calls that are code (Qwen3-Coder's elements, Python's calls) become JSON while they are read. A name is passed on with
the first argument, each argument when it is complete, and text of an element while it is written. Anything malformed
after complete arguments ends the call, and is content.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from chairlift.api.tools.text import WHITESPACE, PieceBuffer, Reading, Text, is_sendable, json_of_literal, parsed

NAME = re.compile(r"[A-Za-z0-9_.-]*")
_ARGUMENTS_KEYS = ("arguments", "parameters")

Schemas = Mapping[str, dict[str, Any]]
"""By function: the JSON schema of its arguments."""


class CallFormat:
    """How one family writes calls: `opening`, calls, `closing`. Whitespace may stand between these anywhere.

    Unless a family says otherwise, a call is a JSON object with the function's name and its arguments.
    """

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

    def read_calls(self, text: Text, out: PieceBuffer, schemas: Schemas) -> Reading[bool]:  # noqa: ARG002
        """Reads what is between the marks. False if it is not a call: what was read stays held, and is content."""
        return self.read_object(text, out)

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

    def read_object(self, text: Text, out: PieceBuffer) -> Reading[bool]:
        """Reads a call that is a JSON object. False: what was read, up to what is wrong, is held.

        Without marks, an object with a name but without arguments is not a call.
        """
        yield from text.skip()
        begin = text.position
        name = yield from _read_head(text)
        if name:
            text.take()
            out.begin_call(name)
            is_value = yield from self.read_arguments(text, out)
            out.end_call()
            if is_value and not (yield from _read_rest(text)) and not text.is_at_end:
                text.back_to(0)  # the arguments are complete; anything malformed after them is not part of the call
            text.take()
            return True
        text.back_to(begin)
        is_object = (yield from text.peek()) == "{" and (yield from text.value())
        call = parsed(text.since(begin)) if is_object else None
        if not isinstance(call, dict) or not call.get("name") or not is_sendable(call["name"]):
            return False
        arguments = next((call[key] for key in _ARGUMENTS_KEYS if key in call), None)
        if arguments is None and self.is_bare:
            return False
        text.take()
        out.begin_call(call["name"], _arguments_text(json.dumps(arguments, ensure_ascii=False)))
        out.end_call()
        return True

    def read_arguments(self, text: Text, out: PieceBuffer) -> Reading[bool]:
        """Reads the arguments of the current call. If they are not JSON, False, and they extend to a mark."""
        yield from text.skip()
        text.take()
        if (yield from text.peek()) in ("{", "["):
            text.tap = out.arguments
        is_value = yield from text.value()
        raw = text.take()
        out.arguments(_arguments_text(raw) if is_value and text.tap is None else raw)
        text.tap = None
        if not is_value:
            yield from text.pass_on_up_to([self.closing or self.opening], out.arguments)
        return is_value


class Hermes(CallFormat):
    opening = "<tool_call>"
    closing = "</tool_call>"
    between = "\n"


class Llama3Json(CallFormat):
    opening = "<|python_tag|>"
    between = "; "
    is_bare = True


class Mistral(CallFormat):
    opening = "[TOOL_CALLS]"
    other_marks = ("[ARGS]", "[CALL_ID]")
    brackets = ("[", "]")
    between = ", "

    def read_calls(self, text: Text, out: PieceBuffer, schemas: Schemas) -> Reading[bool]:  # noqa: ARG002
        if not (yield from text.accept("[")):
            return (yield from self._read_named(text, out))
        return (yield from self.read_list(text, out, self.read_object))

    def _read_named(self, text: Text, out: PieceBuffer) -> Reading[bool]:
        name = yield from text.word(NAME)
        if (yield from text.accept("[CALL_ID]")):
            yield from text.word(NAME)
        has_mark = yield from text.accept("[ARGS]")
        if not name or not (has_mark or (yield from text.peek()) == "{"):
            return False
        text.take()
        out.begin_call(name)
        yield from self.read_arguments(text, out)
        out.end_call()
        return True


def _read_head(text: Text) -> Reading[str | None]:
    """The function's name, if an object begins with it and its arguments come next."""
    if not (yield from text.accept("{")) or not (yield from text.accept('"name"')):
        return None
    if not (yield from text.accept(":")):
        return None
    yield from text.skip()
    begin = text.position
    if not (yield from text.string()):
        return None
    name = parsed(text.since(begin))
    if not (yield from text.accept(",")):
        return None
    for key in _ARGUMENTS_KEYS:
        if (yield from text.accept(f'"{key}"')):
            is_head = yield from text.accept(":")
            return name if is_head and isinstance(name, str) and is_sendable(name) else None
    return None


def _read_rest(text: Text) -> Reading[bool]:
    """Reads what may follow a call's arguments in its object; False if it does not end as an object does."""
    while not (yield from text.accept("}")):
        is_member = (yield from text.accept(",")) and (yield from text.string()) and (yield from text.accept(":"))
        if not is_member:
            return False
        yield from text.skip()
        if not (yield from text.value()):
            return False
    return True


def _arguments_text(raw: str) -> str:
    """The arguments as written, except null for no arguments, and an object in a string: models write both."""
    if raw == "null":
        return "{}"
    if raw.startswith('"'):
        inner = parsed(raw)
        if isinstance(inner, str) and is_sendable(inner) and isinstance(parsed(inner), dict):
            return inner
    return raw


# --- calls that are code

_IN_TAG = re.compile(r"[^<>\n]*")
_IN_LITERAL = re.compile(r"""[^"'(){}\[\],]*""")
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


class Qwen3Coder(CallFormat):
    opening = "<tool_call>"
    closing = "</tool_call>"
    other_openings = ("<function=",)
    has_types = False
    between = "\n"
    _ends = ("\n</parameter>", "</parameter>")

    def read_calls(self, text: Text, out: PieceBuffer, schemas: Schemas) -> Reading[bool]:
        name = yield from self._read_tag(text, "<function=")
        if not name:
            return False
        properties = schemas.get(name, {}).get("properties")
        schema_of = properties if isinstance(properties, dict) else {}
        num_read = 0
        while key := (yield from self._read_tag(text, "<parameter=")):
            _begin_argument(text, out, name, key, num_read)
            if not (yield from self._read_value(text, out, schema_of.get(key))):
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
        name = (yield from text.word(_IN_TAG)).strip()
        return name if (yield from text.accept(">")) else ""

    def _read_value(self, text: Text, out: PieceBuffer, schema: object) -> Reading[bool]:
        """Reads up to the end of an element; False if the answer ends before. One line break at each end does
        not belong to the value.
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
            yield from text.value()  # a mark in a JSON string does not end the value
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

    def read_calls(self, text: Text, out: PieceBuffer, schemas: Schemas) -> Reading[bool]:  # noqa: ARG002
        return (yield from text.accept("[")) and (yield from self.read_list(text, out, self._read_call))

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


def _begin_argument(text: Text, out: PieceBuffer, name: str, key: str, num_read: int) -> None:
    text.take()
    if num_read == 0:
        out.begin_call(name)
    out.arguments(("{" if num_read == 0 else ", ") + _quoted(key) + ": ")


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
    """Whether a value of this schema is text, which is written without quotes."""
    if not isinstance(schema, dict):
        return False
    values = schema.get("enum")
    is_list_of_texts = isinstance(values, list) and all(isinstance(value, str) for value in values)
    return schema.get("type") == "string" or ("type" not in schema and bool(values) and is_list_of_texts)


def _value_text(raw: str, schema: object) -> str:
    """JSON of a value that need not be text; what is not a literal, or not of an allowed type, becomes text."""
    written, allowed = json_of_literal(raw), _types_of(schema)
    if written is None:
        return _quoted(raw)
    value = json.loads(written)
    kind = "null" if value is None else _JSON_TYPES[type(value)]
    may_be = not allowed or kind in allowed or (kind == "integer" and "number" in allowed)
    return _quoted(raw) if "string" in allowed and not may_be else written


def _types_of(schema: object) -> set[str]:
    """The types that a schema names; the schema itself may be invalid."""
    if not isinstance(schema, dict):
        return set()
    kinds = schema.get("type")
    found = {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}
    for alternatives in (schema.get("anyOf"), schema.get("oneOf")):
        found.update(*map(_types_of, alternatives if isinstance(alternatives, list) else []))
    return found


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return _quoted(text)[1:-1]
