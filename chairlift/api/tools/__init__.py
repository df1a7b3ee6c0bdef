"""Thoughts and tool calls as text: how a model family writes them, reading them out of an answer, and grammars.

Nothing here knows of HTTP or the engine: text and JSON schemas come in, pieces and grammars go out.
"""

from chairlift.api.tools.families import (
    FORMATS,
    THOUGHT_MARKS,
    AnswerReader,
    ReasoningFamily,
    Thoughts,
    ToolFamily,
    family_of_template,
    reasoning_of_template,
)
from chairlift.api.tools.grammars import FunctionSpec, MarkTokens, forced_calls_grammar, free_grammar, schema_lines
from chairlift.api.tools.text import CallPiece, ContentPiece, Piece, ReasoningPiece

__all__ = [
    "FORMATS",
    "THOUGHT_MARKS",
    "AnswerReader",
    "CallPiece",
    "ContentPiece",
    "FunctionSpec",
    "MarkTokens",
    "Piece",
    "ReasoningFamily",
    "ReasoningPiece",
    "Thoughts",
    "ToolFamily",
    "family_of_template",
    "forced_calls_grammar",
    "free_grammar",
    "reasoning_of_template",
    "schema_lines",
]
