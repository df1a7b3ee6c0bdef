"""The formats of calls that are written by hand, and which of them a chat template uses.

HERMES       `<tool_call>{"name": "f", "arguments": {...}}</tool_call>` anywhere in a text (Hermes 2, 3; Qwen 2.5, 3)
LLAMA3_JSON  `{"name": "f", "parameters": {...}}` as the whole answer, or after `<|python_tag|>` (Llama 3.1, 3.2, 3.3)
MISTRAL      `[TOOL_CALLS]f[ARGS]{...}`, or `[TOOL_CALLS][{"name": "f", "arguments": {...}}]`
QWEN3_CODER  `<tool_call><function=f><parameter=a>text or JSON</parameter></function></tool_call>`
SEED_OSS     `<seed:tool_call><function=f><parameter=a>text or JSON</parameter></function></seed:tool_call>`
PYTHONIC     `[f(a=1, b="x"), g()]` as the whole answer, or after `<|python_start|>` (Llama 3.2, 4)
HARMONY      `<|channel|>commentary to=functions.f<|message|>{...}<|call|>`, among messages on channels (gpt-oss)
"""

import re
from enum import StrEnum

from chairlift.api.answers.code_calls import Pythonic, Qwen3Coder, SeedOss
from chairlift.api.answers.formats import CallFormat
from chairlift.api.answers.harmony import Harmony
from chairlift.api.answers.json_calls import Hermes, Llama3Json, Mistral


class ToolFamily(StrEnum):
    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"
    QWEN3_CODER = "qwen3_coder"
    SEED_OSS = "seed_oss"
    PYTHONIC = "pythonic"
    HARMONY = "harmony"

    @classmethod
    def _missing_(cls, value: object) -> "ToolFamily | None":
        """vLLM's name of a parser that reads the same calls."""
        return cls.HARMONY if value == "openai" else None


FORMATS: dict[ToolFamily, CallFormat] = {
    ToolFamily.HERMES: Hermes(),
    ToolFamily.LLAMA3_JSON: Llama3Json(),
    ToolFamily.MISTRAL: Mistral(),
    ToolFamily.QWEN3_CODER: Qwen3Coder(),
    ToolFamily.SEED_OSS: SeedOss(),
    ToolFamily.PYTHONIC: Pythonic(),
    ToolFamily.HARMONY: Harmony(),
}

_SIGNS = (  # the first that occurs in a template
    (r"<\|channel\|>analysis<\|message\|>", ToolFamily.HARMONY),
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
