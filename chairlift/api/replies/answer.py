"""A choice's text taken apart: content and tool calls, for every endpoint that knows tools."""

from dataclasses import dataclass, field
from uuid import uuid4

from chairlift.api.tools import ContentPiece, Piece, ToolCallParser, ToolFamily, make_parser
from chairlift.api.wire.chat import WireFinishReason
from chairlift.params import FinishReason


@dataclass(frozen=True, slots=True)
class ToolCalling:
    """How calls are written in this answer, and how many of them count."""

    family: ToolFamily
    max_calls: int | None

    def new_parser(self) -> ToolCallParser:
        return make_parser(self.family, self.max_calls)


@dataclass(slots=True)
class Call:
    """One call as far as it was read."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: f"call_{uuid4().hex[:24]}")


class Answer:
    """Reads one choice's text, in whatever pieces it comes; without tools all of it is content."""

    def __init__(self, calling: ToolCalling | None) -> None:
        self._parser = None if calling is None else calling.new_parser()
        self.content = ""
        self.calls: list[Call] = []

    def read(self, text: str, is_last: bool) -> list[Piece]:
        """What the new text brings; it is added to `content` and `calls` as well."""
        pieces: list[Piece] = []
        if self._parser is None:
            pieces += [ContentPiece(text)] if text else []
        else:
            pieces += self._parser.push(text)
            pieces += self._parser.finish() if is_last else []
        for piece in pieces:
            self._add(piece)
        return pieces

    def finish_reason(self, reason: FinishReason | None) -> WireFinishReason | None:
        """Of an answer that called something and came to its end: "tool_calls"."""
        return "tool_calls" if reason is FinishReason.STOP and self.calls else reason

    def _add(self, piece: Piece) -> None:
        if isinstance(piece, ContentPiece):
            self.content += piece.text
            return
        if piece.name is not None:
            self.calls.append(Call(piece.name))
        self.calls[piece.index].arguments += piece.arguments
