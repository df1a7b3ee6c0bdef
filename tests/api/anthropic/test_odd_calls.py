"""Half surrogate pairs and control characters in calls are sent as JSON."""

import json
from functools import partial
from typing import Any

from chairlift.api.answers import AnswerReader, ToolFamily
from chairlift.api.anthropic.reply import MessagesReply
from chairlift.api.anthropic.request import MessagesRequest
from tests.api.conftest import Server
from tests.api.odd_calls import check


def test_what_a_model_writes_of_them_is_sent_as_json(server: Server) -> None:
    """Whole, and in a stream of single characters."""
    body = MessagesRequest.model_validate(
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f", "input_schema": {}}], "max_tokens": 9}
    )
    vocabulary, new_reader = server.llm.inputs.vocabulary, partial(AnswerReader, ToolFamily.HERMES)
    check(
        lambda: MessagesReply(body, "m", vocabulary, new_reader),
        lambda told: json.dumps(told["content"][0]["input"]),
        piece,
    )


def piece(payload: Any) -> str | None:
    return payload["delta"]["partial_json"] if payload["type"] == "content_block_delta" else None
