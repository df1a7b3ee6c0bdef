"""Reading a whole text with a parser, and what its pieces come to when they are joined."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from chairlift.api.tools import AnswerReader, ToolFamily
from chairlift.api.tools.text import CallPiece, ContentPiece, Piece


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str


def read(family: ToolFamily, texts: Iterable[str], max_calls: int | None = None) -> list[Piece]:
    """All pieces, as they came."""
    parser = AnswerReader(family, max_calls)
    pieces = [piece for text in texts for piece in parser.push(text)]
    return pieces + parser.finish()


def assert_streams(reader: AnswerReader, *steps: tuple[str, list[Piece]]) -> None:
    """Each text brings just these pieces."""
    assert [(text, reader.push(text)) for text, _ in steps] == list(steps)


def joined(pieces: Sequence[Piece]) -> list[str | Call]:
    """Content as strings and calls as `Call`s, in order. Checks that pieces keep to their rules."""
    items: list[str | Call] = []
    num_calls = 0
    for piece in pieces:
        last = items[-1] if items else None
        match piece:
            case ContentPiece(text):
                assert text
                items[-1:] = [last + text] if isinstance(last, str) else [*items[-1:], text]
            case CallPiece(index, None, arguments):
                assert arguments
                assert index == num_calls - 1
                assert isinstance(last, Call)
                items[-1] = Call(last.name, last.arguments + arguments)
            case CallPiece(index, name, arguments):
                assert index == num_calls
                assert name
                num_calls += 1
                items.append(Call(name, arguments))
    return items


def read_whole(family: ToolFamily, text: str, max_calls: int | None = None) -> list[str | Call]:
    return joined(read(family, [text], max_calls))


def calls_of(items: Iterable[str | Call]) -> list[Call]:
    return [item for item in items if isinstance(item, Call)]
