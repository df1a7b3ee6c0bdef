"""Half surrogate pairs and control characters in calls are sent as JSON."""

from functools import partial
from typing import Any

from chairlift.api.answers import AnswerReader, ToolFamily
from chairlift.api.responses.reply import ResponsesReply
from chairlift.api.responses.request import ResponsesRequest
from chairlift.params import SamplingParams
from tests.api.conftest import Server
from tests.api.odd_calls import TOOL, check


def test_what_a_model_writes_of_them_is_sent_as_json(server: Server) -> None:
    """Whole, and in a stream of single characters."""
    body = ResponsesRequest.model_validate({"input": "a", "tools": [{"type": "function", **TOOL}]})
    vocabulary, new_reader = server.llm.inputs.vocabulary, partial(AnswerReader, ToolFamily.HERMES)
    check(
        lambda: ResponsesReply(body, SamplingParams(), "m", vocabulary, new_reader),
        lambda told: told["output"][0]["arguments"],
        piece,
    )


def piece(payload: Any) -> str | None:
    return payload["delta"] if payload["type"] == "response.function_call_arguments.delta" else None
