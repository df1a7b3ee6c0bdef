"""Readers of what a model wrote: thoughts and tool calls as text, the formats that are understood, the grammars that
enforce them, and which of all this the served model uses (`dialect`). Nothing here depends on HTTP or on a protocol.
"""

from chairlift.api.answers.families import FORMATS, ToolFamily, family_of_template
from chairlift.api.answers.reader import AnswerReader, CallCounter, NewReader
from chairlift.api.answers.thoughts import THOUGHT_MARKS, ReasoningFamily, Thoughts, reasoning_of_template

__all__ = [
    "FORMATS",
    "THOUGHT_MARKS",
    "AnswerReader",
    "CallCounter",
    "NewReader",
    "ReasoningFamily",
    "Thoughts",
    "ToolFamily",
    "family_of_template",
    "reasoning_of_template",
]
