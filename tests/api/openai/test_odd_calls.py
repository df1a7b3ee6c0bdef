"""Half surrogate pairs and control characters in calls are sent as JSON."""

from functools import partial
from typing import Any

from chairlift.api.answers import AnswerReader, ToolFamily
from chairlift.api.openai.chat import ChatCompletionRequest
from chairlift.api.openai.replies import ChatReply
from tests.api.conftest import Server
from tests.api.odd_calls import TOOL, check


def test_what_a_model_writes_of_them_is_sent_as_json(server: Server) -> None:
    """Whole, and in a stream of single characters."""
    body = ChatCompletionRequest.model_validate(
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": TOOL}]}
    )
    vocabulary, new_reader = server.llm.inputs.vocabulary, partial(AnswerReader, ToolFamily.HERMES)
    check(
        lambda: ChatReply(body, "m", vocabulary, new_reader),
        lambda told: told["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"],
        piece,
    )


def piece(payload: Any) -> str | None:
    calls = payload["choices"][0]["delta"].get("tool_calls")
    arguments: str | None = calls[0]["function"]["arguments"] if calls else None
    return arguments
