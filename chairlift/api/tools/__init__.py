"""Tool calls as text: how a model family writes them, reading them out of an answer, and grammars that force them.

Nothing here knows of HTTP or the engine: text and JSON schemas come in, pieces and grammars go out.
"""

from chairlift.api.tools.formats import (
    FORMATS,
    FunctionSpec,
    ToolFamily,
    family_of_template,
    forced_calls_grammar,
    free_grammar,
    schema_lines,
)
from chairlift.api.tools.parser import CallPiece, ContentPiece, Piece, ToolCallParser

__all__ = [
    "FORMATS",
    "CallPiece",
    "ContentPiece",
    "FunctionSpec",
    "Piece",
    "ToolCallParser",
    "ToolFamily",
    "family_of_template",
    "forced_calls_grammar",
    "free_grammar",
    "schema_lines",
]
