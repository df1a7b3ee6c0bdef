"""Tool calls as text: how a model family writes them, reading them out of an answer, and grammars that force them.

Nothing here knows of HTTP or the engine: text and JSON schemas come in, pieces and grammars go out.
"""

from chairlift.api.tools.family import ToolFamily, family_of_template
from chairlift.api.tools.grammar import FunctionSpec, forced_calls_grammar, free_grammar
from chairlift.api.tools.parsers import make_parser
from chairlift.api.tools.pieces import CallPiece, ContentPiece, Piece, ToolCallParser

__all__ = [
    "CallPiece",
    "ContentPiece",
    "FunctionSpec",
    "Piece",
    "ToolCallParser",
    "ToolFamily",
    "family_of_template",
    "forced_calls_grammar",
    "free_grammar",
    "make_parser",
]
