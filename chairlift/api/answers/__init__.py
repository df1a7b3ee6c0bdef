"""Thoughts and tool calls as text: the formats that are understood, which of them a chat template uses, and how an
answer is parsed. Nothing in this package depends on HTTP or the engine.

HERMES       `<tool_call>{"name": "f", "arguments": {...}}</tool_call>` anywhere in a text (Hermes 2, 3; Qwen 2.5, 3)
LLAMA3_JSON  `{"name": "f", "parameters": {...}}` as the whole answer, or after `<|python_tag|>` (Llama 3.1, 3.2, 3.3)
MISTRAL      `[TOOL_CALLS]f[ARGS]{...}`, or `[TOOL_CALLS][{"name": "f", "arguments": {...}}]`
QWEN3_CODER  `<tool_call><function=f><parameter=a>text or JSON</parameter></function></tool_call>`
SEED_OSS     `<seed:tool_call><function=f><parameter=a>text or JSON</parameter></function></seed:tool_call>`
PYTHONIC     `[f(a=1, b="x"), g()]` as the whole answer, or after `<|python_start|>` (Llama 3.2, 4)
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from chairlift.api.answers.code_calls import Pythonic, Qwen3Coder, SeedOss
from chairlift.api.answers.custom import CustomInputs
from chairlift.api.answers.declared import Declared
from chairlift.api.answers.formats import CallFormat, Schemas
from chairlift.api.answers.json_calls import Hermes, Llama3Json, Mistral
from chairlift.api.answers.text import CallPiece, Piece, PieceBuffer, Reading, Text


class ToolFamily(StrEnum):
    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"
    QWEN3_CODER = "qwen3_coder"
    SEED_OSS = "seed_oss"
    PYTHONIC = "pythonic"


FORMATS: dict[ToolFamily, CallFormat] = {
    ToolFamily.HERMES: Hermes(),
    ToolFamily.LLAMA3_JSON: Llama3Json(),
    ToolFamily.MISTRAL: Mistral(),
    ToolFamily.QWEN3_CODER: Qwen3Coder(),
    ToolFamily.SEED_OSS: SeedOss(),
    ToolFamily.PYTHONIC: Pythonic(),
}

_SIGNS = (  # the first that occurs in a template
    (r"<arg_key>", None),  # GLM-4.5 writes something else between the marks of Hermes
    (r"<seed:tool_call>", ToolFamily.SEED_OSS),
    (r"(?s)<function=.*<parameter=", ToolFamily.QWEN3_CODER),
    (r"<function=", None),  # Functionary writes JSON there
    (r"<tool_calls>\[", None),  # Apriel speaks of <tool_call> and writes this
    (r"<tool_call>", ToolFamily.HERMES),
    (r"\[TOOL_CALLS\]", ToolFamily.MISTRAL),
    (r"\[\w+\(\w+=", ToolFamily.PYTHONIC),
    # "parameters" alone would not do: other families' templates describe their tools with that key.
    (r"(?s)<\|python_tag\|>|ipython.*\"parameters\":|\"parameters\":.*ipython", ToolFamily.LLAMA3_JSON),
)


def family_of_template(template: str) -> ToolFamily | None:
    """The family whose calls this chat template (Jinja source) writes; None if it is not understood here."""
    return next((family for sign, family in _SIGNS if re.search(sign, template)), None)


class ReasoningFamily(StrEnum):
    """How a model marks its thoughts, which come before its answer."""

    THINK = "think"
    MISTRAL = "mistral"
    SEED_OSS = "seed_oss"
    NONE = "none"

    @classmethod
    def _missing_(cls, value: object) -> "ReasoningFamily | None":
        """vLLM's names of parsers that read the same marks."""
        return cls.THINK if value in ("qwen3", "deepseek_r1") else None


THOUGHT_MARKS = {
    ReasoningFamily.THINK: ("<think>", "</think>"),
    ReasoningFamily.MISTRAL: ("[THINK]", "[/THINK]"),
    ReasoningFamily.SEED_OSS: ("<seed:think>", "</seed:think>"),
}


def reasoning_of_template(template: str) -> ReasoningFamily:
    """The marks that this chat template (Jinja source) knows."""
    known = (family for family, marks in THOUGHT_MARKS.items() if any(mark in template for mark in marks))
    return next(known, ReasoningFamily.NONE)


# --- reading an answer

_NO_SCHEMAS: Schemas = {}
_LINE_BREAKS = re.compile(r"\n*")


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The marks around an answer's thoughts; line breaks next to them are dropped."""

    begin: str
    end: str
    has_begun: bool  # in the prompt; if not, an answer that does not begin with the mark has no thoughts

    def read(self, text: Text, out: PieceBuffer, marks_of_calls: Sequence[str]) -> Reading[str]:
        """Reads up to the end of the thoughts. From a mark of calls on, they are held back until that comes.

        If it does not come, because the model made calls without closing its thoughts, returns what was held back.
        """
        if not (yield from text.accept(self.begin)):
            text.back_to(0)
            if not self.has_begun:
                return ""
        yield from text.skip(_LINE_BREAKS)
        text.take()
        if not (yield from text.pass_on_up_to([self.end, *marks_of_calls], out.reasoning, held="\n")):
            return ""
        if not (yield from text.accept(self.end)):
            held: list[str] = []
            if not (yield from text.pass_on_up_to([self.end], held.append, held="\n")):
                return "".join(held)
            out.reasoning("".join(held))
            yield from text.accept(self.end)
        yield from text.skip(_LINE_BREAKS)
        text.take()
        return ""


class AnswerReader:
    """Parses an answer. The joined pieces are the same however the text is split. Up to the last wanted call, nothing
    is lost but whitespace around thoughts and calls.
    """

    def __init__(
        self,
        family: ToolFamily | Declared | None,
        max_calls: int | None = None,
        schemas: Schemas = _NO_SCHEMAS,
        thoughts: Thoughts | None = None,
        custom: Collection[str] = (),
    ) -> None:
        """`family`: of calls; None: there are none. All text after `max_calls` calls (None: no limit) is dropped.
        `custom`: names of custom tools.
        """
        self._inputs = CustomInputs(custom)
        self._family = family
        self._format = FORMATS[family] if isinstance(family, ToolFamily) else family
        self._schemas = schemas
        self._thoughts = thoughts
        self._text = Text()
        self._pieces = PieceBuffer(max_calls)
        self._reading = self._read()

    @property
    def is_full(self) -> bool:
        """True once all wanted calls were read."""
        return self._pieces.is_full

    def push(self, text: str, is_last: bool = False, is_whole: bool = False) -> list[Piece]:
        """The pieces known from the text so far and not yet returned. `is_last`: no more text follows; `is_whole`: not
        because of a limit, so that a call which is still open has ended.
        """
        self._text.feed(text, is_last, is_whole)
        next(self._reading, None)
        if self._text.tap is not None:
            self._text.tap(self._text.take())
        return self._inputs.read(self._pieces.empty(), is_last)

    def _read(self) -> Reading[None]:
        if self._thoughts is not None:
            marks = () if self._format is None else self._format.opening_marks
            held = yield from self._thoughts.read(self._text, self._pieces, marks)
            self._add_end_of_thoughts(held)
        if self._format is not None:
            yield from self._format.read(self._text, self._pieces, self._schemas)
        else:
            yield from self._text.pass_on_up_to((), self._pieces.content)

    def _add_end_of_thoughts(self, held: str) -> None:
        """Adds what thoughts that the model did not close have from a mark of calls on: calls, if it made some there.

        In an answer that was cut off it is all thoughts.
        """
        reader = AnswerReader(self._family, self._pieces.max_calls, self._schemas)
        pieces = reader.push(held, is_last=True, is_whole=True) if self._text.is_whole else []
        first = next((i for i, piece in enumerate(pieces) if isinstance(piece, CallPiece)), None)
        self._pieces.reasoning(held if first is None else "".join(piece.text for piece in pieces[:first]))
        self._pieces.add([] if first is None else pieces[first:])
