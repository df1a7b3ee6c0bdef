"""Reading answers as response templates declare them, in every split, and transformers' own parser as the judge."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.chat_parsing import parse_response

from chairlift.api.answers import AnswerReader
from chairlift.api.answers.declared import Declared, ResponseTemplate
from chairlift.api.answers.formats import Schemas
from chairlift.api.answers.text import CallPiece, ContentPiece, Piece, ReasoningPiece

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "options": {"type": "object"}},
}
SCHEMAS: Schemas = {"weather": CITY, "time": {"type": "object", "properties": {}}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]


@dataclass
class Answer:
    """Holds what is read out of a text; a call is its name and its arguments as they were written."""

    content: str = ""
    thoughts: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def call(name: str, **arguments: Any) -> tuple[str, str]:
    """A call whose arguments are written as `json.dumps` does."""
    return name, json.dumps(arguments, ensure_ascii=False)


def declared(fields: dict[str, Any], start_anchor: str = "<assistant>") -> Declared:
    """The format that a template with these fields declares."""
    return Declared(ResponseTemplate.read({"start_anchor": start_anchor, "fields": fields}))


def pieces_of(form: Declared, texts: Iterable[str], max_calls: int | None = None) -> list[Piece]:
    reader = AnswerReader(form, max_calls, SCHEMAS)
    pieces = [piece for text in texts for piece in reader.push(text)]
    return [*pieces, *reader.push("", is_last=True)]


def joined(pieces: Sequence[Piece]) -> Answer:
    answer = Answer()
    for piece in pieces:
        match piece:
            case ContentPiece():
                answer.content += piece.text
            case ReasoningPiece():
                answer.thoughts += piece.text
            case CallPiece(name=None):
                name, arguments = answer.calls[-1]
                answer.calls[-1] = (name, arguments + piece.text)
            case CallPiece(name=str(name)):
                answer.calls.append((name, piece.text))
    return answer


def every_split(form: Declared, text: str, max_calls: int | None = None) -> Answer:
    """Returns what is read, whole or cut in two anywhere or in single characters: always the same."""
    ways = [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]
    first, *others = (joined(pieces_of(form, texts, max_calls)) for texts in ways)
    assert all(each == first for each in others)
    return first


def judged(form: Declared, text: str, prompt: str = "") -> Answer:
    """Returns what transformers reads out of the text with the same template."""
    template = form.template.model_dump(mode="json", by_alias=True, exclude_unset=True)
    message = parse_response(text, template, prefix=prompt, tools=TOOLS)
    functions = [each["function"] for each in message.get("tool_calls") or []]
    thoughts = next((message[name] for name in ("reasoning_content", "thinking") if name in message), "")
    calls = [(each["name"], json.dumps(each["arguments"], ensure_ascii=False)) for each in functions]
    return Answer(message.get("content") or "", thoughts, calls)
