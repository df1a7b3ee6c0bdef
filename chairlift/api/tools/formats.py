"""How calls are read: what all formats have in common, and those whose calls are JSON.

With the name first and the arguments second, as models are taught, arguments are passed on while they are written; the
rest of a call that breaks then goes into its arguments. Any other JSON object is held until it is complete, and is a
call if it has what a call needs; if not, it is content with its marks. Content is passed on verbatim, but for
whitespace before a call that needs its marks, and whitespace between calls.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from chairlift.api.tools.text import WHITESPACE, Pieces, Reading, Text, is_sendable, parsed

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
    other_openings: ClassVar[tuple[str, ...]] = ()  # how a call begins whose opening was forgotten
    brackets: ClassVar[tuple[str, str]] = ("", "")  # around all calls behind an opening, where there are any
    between: ClassVar[str]  # two calls, as chat templates write them
    has_types: ClassVar[bool] = True  # what is written shows the types of values, without a look at the schemas
    is_bare: ClassVar[bool] = False  # a call needs no opening where an answer begins and after another call

    @property
    def marks(self) -> tuple[str, ...]:
        """What marks a call: often a special token of the vocabulary, which is otherwise no part of a text."""
        return tuple(mark for mark in (self.opening, self.closing, *self.other_marks) if mark)

    def read(self, text: Text, out: Pieces, schemas: Schemas) -> Reading[None]:
        """Reads an answer, or the rest of one behind its thoughts. All text after the last wanted call is dropped."""
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

    def read_calls(self, text: Text, out: Pieces, schemas: Schemas) -> Reading[bool]:  # noqa: ARG002
        """Reads what stands between the marks. False if it is no call: what was read is held then, and is content."""
        return self.read_object(text, out)

    def read_list(self, text: Text, out: Pieces, read_one: Callable[[Text, Pieces], Reading[bool]]) -> Reading[bool]:
        """Reads calls up to the closing bracket. False if the first is none."""
        if not (yield from read_one(text, out)):
            return False
        while not out.is_full and (yield from text.accept(",")):
            if not (yield from read_one(text, out)):
                return True
        if (yield from text.accept("]")):
            text.take()
        return True

    def _read_closing(self, text: Text) -> Reading[None]:
        """Reads what closes a call, and what stands between it and the next call or the end of the answer."""
        if self.closing and (yield from text.accept(self.closing)):
            text.take()
        if not self.brackets[0]:
            yield from text.accept(self.between.strip())
        yield from text.skip()
        text.take_tail_of(self.closing)
        if not self.is_bare:
            text.back_to(0)

    def read_object(self, text: Text, out: Pieces) -> Reading[bool]:
        """Reads a call that is a JSON object. False: what was read, up to what is wrong, is held.

        Without marks an object with a name, but without arguments, is no call.
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
                text.back_to(0)  # the arguments are complete; what is wrong after them is no part of the call
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

    def read_arguments(self, text: Text, out: Pieces) -> Reading[bool]:
        """Reads the arguments of the call that has begun. False if they are not JSON, and go up to a mark."""
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

    def read_calls(self, text: Text, out: Pieces, schemas: Schemas) -> Reading[bool]:  # noqa: ARG002
        if not (yield from text.accept("[")):
            return (yield from self._read_named(text, out))
        return (yield from self.read_list(text, out, self.read_object))

    def _read_named(self, text: Text, out: Pieces) -> Reading[bool]:
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
    """As written, but for two habits of models: null for no arguments, and the object inside a string."""
    if raw == "null":
        return "{}"
    if raw.startswith('"'):
        inner = parsed(raw)
        if isinstance(inner, str) and is_sendable(inner) and isinstance(parsed(inner), dict):
            return inner
    return raw
