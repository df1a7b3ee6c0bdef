"""Tests that a template makes of an event what pydantic would."""

from functools import partial
from typing import Any

import pytest

from chairlift.api.answers import AnswerReader
from chairlift.api.answers.text import CallPiece, ContentPiece, Piece, ReasoningPiece
from chairlift.api.anthropic.events import ContentBlockDelta, InputJsonDelta, TextDelta, ThinkingDelta
from chairlift.api.anthropic.reply import MessagesReply
from chairlift.api.anthropic.request import MessagesRequest
from chairlift.api.replies.answer import Part
from chairlift.api.wire.events import event
from tests.api.conftest import Server
from tests.api.test_streams import TEXTS

KINDS: list[tuple[type[Piece], Any, str]] = [  # what blocks call each kind of text
    (ContentPiece, TextDelta, "text"),
    (ReasoningPiece, ThinkingDelta, "thinking"),
    (CallPiece, InputJsonDelta, "partial_json"),
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("kind", "block", "name"), KINDS)
def test_what_a_part_of_a_message_has_more(server: Server, kind: type[Piece], block: Any, name: str, text: str) -> None:
    asked = MessagesRequest.model_validate({"max_tokens": 1, "messages": []})
    message = MessagesReply(asked, "bundled", server.llm.inputs.vocabulary, partial(AnswerReader, None))
    part = Part(kind, 2, "add", "call_1")
    message._begin(part)
    message._grow(part, "before")
    assert message._grow(part, text) == [event(ContentBlockDelta(index=2, delta=block(**{name: text})))]
