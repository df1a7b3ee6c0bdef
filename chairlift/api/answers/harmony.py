"""Reads answers in harmony, the format of gpt-oss: messages on channels, with a head before each body.

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>text<|return|>

The recipient may stand before the channel as well. What is on `analysis` is reasoning; what is sent to a recipient is a
call; all else is content. Models forget the end of a message before the next one begins.
"""

import re
from collections.abc import Callable

from chairlift.api.answers.formats import Schemas
from chairlift.api.answers.json_calls import JsonCallFormat
from chairlift.api.answers.text import PieceBuffer, Reading, Text, is_sendable

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN)
NEEDED = (START, CHANNEL, MESSAGE, END, CALL)
"""The marks without which a model cannot write harmony."""

_BEGINNINGS = (START, CHANNEL, MESSAGE, "to=")
_AFTER_BODY = (*ENDS, START, CHANNEL)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([A-Za-z0-9_.-]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")
_NAME_OF_CHANNEL = re.compile(r"(?s).*<\|channel\|>\s*\w*\s*")
_SELF = ("assistant", "user", "all")
_JOIN = "\n\n"  # between messages of a kind


class Harmony(JsonCallFormat):
    """The format of an answer whose first message may have begun in the prompt."""

    opening = CALL  # what nothing in arguments can be
    closing = END
    other_marks = (START, CHANNEL, MESSAGE, CONSTRAIN, RETURN)
    between = ""

    def __init__(self, begun: str = "", *, has_calls: bool = True) -> None:
        """`begun`: the head of the first message, as far as the prompt has it, without `<|start|>`.

        `has_calls`: there are tools; if not, what is sent to one is content.
        """
        self._begun, self._has_calls = begun, has_calls

    @property
    def closings(self) -> tuple[str, ...]:
        """Lists the marks at which arguments end, however incomplete."""
        return _AFTER_BODY

    def read(self, text: Text, out: PieceBuffer, schemas: Schemas) -> Reading[None]:  # noqa: ARG002
        """Reads an answer. All text after the last wanted call is dropped."""
        content, reasoning = _Bodies(out.content), _Bodies(out.reasoning)
        head = self._begun
        while not out.is_full and not text.is_at_end:
            if MESSAGE not in head:
                head += yield from self._read_head(text)
            recipient = _RECIPIENT.search(head)
            name = recipient[1] if recipient is not None else ""
            if self._has_calls and name and name not in _SELF and is_sendable(name):
                if MESSAGE in head:
                    yield from self._read_call(name, text, out, content)
            else:
                bodies = reasoning if _ANALYSIS.search(head) else content
                bodies.begin()
                if CHANNEL in head and MESSAGE not in head:
                    bodies.add(_NAME_OF_CHANNEL.sub("", head))  # a body without the mark before it
                yield from text.pass_on_up_to(_AFTER_BODY, bodies.add)
            while (yield from text.accept_one_of(ENDS)):
                pass
            text.take()
            head = ""

    def _read_head(self, text: Text) -> Reading[str]:
        """Reads up to the body, and returns what it read; empty where there is no head, but text."""
        is_head = yield from text.accept_one_of(_BEGINNINGS)
        text.back_to(0)
        if not is_head:
            return ""
        parts: list[str] = []
        if (yield from text.pass_on_up_to([MESSAGE, *ENDS], parts.append)):
            yield from text.accept(MESSAGE)
            parts.append(text.take())
        return "".join(parts)

    def _read_call(self, name: str, text: Text, out: PieceBuffer, content: "_Bodies") -> Reading[None]:
        """Reads the arguments. What is wrong behind them is content."""
        out.begin_call(name)
        is_empty = (yield from text.accept_one_of(_AFTER_BODY)) or (text.is_at_end and text.is_whole)
        text.back_to(0)
        if is_empty:
            out.arguments("{}")
        else:
            yield from self.read_arguments(text, out)
        out.end_call()
        if not out.is_full:
            yield from self._skip_excess(text)
            content.begin()
            yield from text.pass_on_up_to(_AFTER_BODY, content.add)


class _Bodies:
    """Passes on the bodies of messages of a kind, with a blank line between two."""

    def __init__(self, add: Callable[[str], None]) -> None:
        self._add, self._join, self._is_any = add, "", False

    def begin(self) -> None:
        """Begins another message."""
        self._join = _JOIN if self._is_any else ""

    def add(self, body: str) -> None:
        """Passes on a part of the message's body."""
        if body:
            self._add(self._join + body)
            self._join, self._is_any = "", True
