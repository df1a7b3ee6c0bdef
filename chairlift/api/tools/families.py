"""The ways of writing a tool call that are understood, and which of them a chat template teaches.

HERMES       `<tool_call>{"name": "f", "arguments": {...}}</tool_call>` anywhere in a text (Hermes 2, 3; Qwen 2.5, 3)
LLAMA3_JSON  `{"name": "f", "parameters": {...}}` as the whole answer, or after `<|python_tag|>` (Llama 3.1, 3.2, 3.3)
MISTRAL      `[TOOL_CALLS]f[ARGS]{...}`, or `[TOOL_CALLS][{"name": "f", "arguments": {...}}]`
QWEN3_CODER  `<tool_call><function=f><parameter=a>text or JSON</parameter></function></tool_call>`
PYTHONIC     `[f(a=1, b="x"), g()]` as the whole answer, or after `<|python_start|>` (Llama 3.2, 4)
"""

import re
from enum import StrEnum

from chairlift.api.tools.code_formats import Pythonic, Qwen3Coder
from chairlift.api.tools.formats import CallFormat, Hermes, Llama3Json, Mistral


class ToolFamily(StrEnum):
    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"
    QWEN3_CODER = "qwen3_coder"
    PYTHONIC = "pythonic"


FORMATS: dict[ToolFamily, CallFormat] = {
    ToolFamily.HERMES: Hermes(),
    ToolFamily.LLAMA3_JSON: Llama3Json(),
    ToolFamily.MISTRAL: Mistral(),
    ToolFamily.QWEN3_CODER: Qwen3Coder(),
    ToolFamily.PYTHONIC: Pythonic(),
}

_SIGNS = (  # the first that a template has
    (r"<arg_key>", None),  # GLM-4.5 writes something else between the marks of Hermes
    (r"<function=", ToolFamily.QWEN3_CODER),
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
