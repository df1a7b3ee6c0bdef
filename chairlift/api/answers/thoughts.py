"""The marks around a model's thoughts: which a chat template knows, and where thoughts end in an answer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from chairlift.api.answers.text import PieceBuffer, Reading, Text

_LINE_BREAKS = re.compile(r"\n*")


class ReasoningFamily(StrEnum):
    """Names the way in which a model marks its thoughts, which come before its answer."""

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
