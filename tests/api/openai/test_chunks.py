"""Tests that a template makes of a chunk what pydantic would."""

import pytest

from chairlift.api.openai.chat import ChatChunkChoice, ChatCompletionChunk, Delta
from chairlift.api.wire.events import BLANK, TextEvent, event
from tests.api.test_streams import TEXTS


@pytest.mark.parametrize("text", TEXTS)
def test_any_text(text: str) -> None:
    def chunk(content: str) -> ChatCompletionChunk:
        delta = Delta(reasoning=content, reasoning_content=content)
        return ChatCompletionChunk(id="a", created=1, model="b", choices=[ChatChunkChoice(index=0, delta=delta)])

    assert TextEvent(chunk(BLANK)).of(text) == event(chunk(text))
