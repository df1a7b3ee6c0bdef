"""Calls that are JSON: Hermes', Llama 3's and Mistral's.

If the name comes first and the arguments second, as models are taught, arguments are passed on while they are written,
as JSON whatever the model writes; if such a call is malformed, its rest goes into its arguments. Any other JSON object
is held until it is complete: it is a call if it has what a call needs, else it is content, with its marks.
"""

import json
import re

from chairlift.api.answers.formats import NAME, CallFormat, Schemas
from chairlift.api.answers.mending import JsonMender, mended
from chairlift.api.answers.text import PieceBuffer, Reading, Text, is_sendable, parsed

_BETWEEN_OBJECTS = re.compile(r"[ \t\n\r}\]),;]*")
_ARGUMENTS_KEYS = ("arguments", "parameters")


class JsonCallFormat(CallFormat):
    """Calls that are JSON objects, with the function's name and its arguments."""

    def read_calls(self, text: Text, out: PieceBuffer, schemas: Schemas) -> Reading[bool]:  # noqa: ARG002
        return self.read_object(text, out)

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
            yield from self.read_arguments(text, out)
            out.end_call()
            if not (yield from _read_remaining(text)) and not text.is_at_end:
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

    def read_arguments(self, text: Text, out: PieceBuffer) -> Reading[None]:
        """Reads the arguments of the current call, up to their end or a mark."""
        yield from text.skip()
        text.take()
        if (yield from text.peek()) == '"':
            is_whole = yield from text.string()
            raw = text.take()
            out.arguments(_arguments_text(raw) if is_whole else raw)
        elif (yield from text.accept("null")):
            text.take()
            out.arguments("{}")
        else:
            marks = [mark for mark in (*self.closings, self.opening) if mark]
            yield from JsonMender(text, out.arguments, marks).read()


class Hermes(JsonCallFormat):
    opening = "<tool_call>"
    closing = "</tool_call>"
    between = "\n"

    def read_calls(self, text: Text, out: PieceBuffer, schemas: Schemas) -> Reading[bool]:  # noqa: ARG002
        """Reads an object, as models are taught, or several, or a list, perhaps in a fence of Markdown."""
        yield from text.accept_one_of(("```json", "```"))
        is_list = yield from text.accept("[")
        is_call = yield from (self.read_list(text, out, self.read_object) if is_list else self.read_object(text, out))
        while is_call and not out.is_full:
            yield from text.skip(_BETWEEN_OBJECTS)
            has_more = (yield from text.peek()) == "{" and (yield from self.read_object(text, out))
            if not has_more:
                text.back_to(0)
                break
        return is_call


class Llama3Json(JsonCallFormat):
    opening = "<|python_tag|>"
    between = "; "
    bare_opening = "{"

    def read_head(self, text: Text) -> Reading[str | None]:
        return (yield from _read_head(text))


class Mistral(JsonCallFormat):
    opening = "[TOOL_CALLS]"
    other_marks = ("[ARGS]", "[CALL_ID]")
    brackets = ("[", "]")
    between = ", "

    def read_calls(self, text: Text, out: PieceBuffer, schemas: Schemas) -> Reading[bool]:  # noqa: ARG002
        if (yield from text.accept("[")):
            return (yield from self.read_list(text, out, self.read_object))
        is_object = (yield from text.peek()) == "{"
        return (yield from (self.read_object(text, out) if is_object else self._read_named(text, out)))

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


def _read_remaining(text: Text) -> Reading[bool]:
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
    """The arguments as JSON: as written, except null for no arguments, and an object in a string: models write both."""
    if raw == "null":
        return "{}"
    inner = parsed(raw) if raw.startswith('"') else None
    return mended(inner if isinstance(inner, str) and isinstance(parsed(inner), dict) else raw)
