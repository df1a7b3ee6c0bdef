"""Tests that a template makes of an event what pydantic would."""

from functools import partial
from typing import Any

import pytest

from chairlift.api.answers import AnswerReader
from chairlift.api.answers.text import CallPiece, ContentPiece, Piece, ReasoningPiece
from chairlift.api.replies.answer import Part
from chairlift.api.responses.reply import ResponsesReply
from chairlift.api.responses.request import ResponsesRequest
from chairlift.api.responses.response_object import Event
from chairlift.api.wire.events import event
from chairlift.params import SamplingParams
from tests.api.conftest import Server
from tests.api.test_streams import TEXTS

KINDS: list[tuple[type[Piece], str, dict[str, Any]]] = [  # what items call each kind of text
    (ContentPiece, "output_text", {"content_index": 0, "logprobs": []}),
    (ReasoningPiece, "reasoning_text", {"content_index": 0}),
    (CallPiece, "function_call_arguments", {}),
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("kind", "item", "fields"), KINDS)
def test_what_a_part_of_a_response_has_more(
    server: Server, kind: type[Piece], item: str, fields: dict[str, Any], text: str
) -> None:
    vocabulary, new_reader = server.llm.inputs.vocabulary, partial(AnswerReader, None)
    response = ResponsesReply(ResponsesRequest(input=""), SamplingParams(), "bundled", vocabulary, new_reader)
    part = Part(kind, 2, "add", "call_1")
    response._begin(part)
    response._grow(part, "before")
    name: Any = f"response.{item}.delta"
    numbered = Event(type=name, sequence_number=0, item_id=response._item_id, output_index=2, delta=text, **fields)
    assert response._numbered(response._grow(part, text)) == [event(numbered)]
