"""The ways of writing a tool call that are understood here, and which of them a chat template teaches.

HERMES       `<tool_call>{"name": "f", "arguments": {...}}</tool_call>` after optional text (Hermes 2, 3; Qwen 2.5, 3)
LLAMA3_JSON  `{"name": "f", "parameters": {...}}` as the whole answer (Llama 3.1, 3.2, 3.3)
"""

from enum import StrEnum

PYTHON_TAG = "<|python_tag|>"
"""What Llama 3 may write before a call."""

CALL_OPENING = "<tool_call>"
CALL_CLOSING = "</tool_call>"
"""What stands around a Hermes call."""

# Qwen3-Coder and GLM-4.5 write something else than JSON between the same markers.
_NOT_JSON_INSIDE = ("<function=", "<arg_key>")


class ToolFamily(StrEnum):
    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"


def family_of_template(template: str) -> ToolFamily | None:
    """The family whose calls this chat template (Jinja source) writes. None if it is none that is understood here."""
    if CALL_OPENING in template:
        is_json = not any(mark in template for mark in _NOT_JSON_INSIDE)
        return ToolFamily.HERMES if is_json else None
    # "parameters" alone would not do: other families' templates describe their tools with that key.
    if PYTHON_TAG in template or ("ipython" in template and '"parameters":' in template):
        return ToolFamily.LLAMA3_JSON
    return None
