"""Replies of `/v1/responses` to answers with text and calls, however they are cut; no engine makes them here."""

import pytest

from chairlift.api.replies.responses import ResponsesReply
from chairlift.api.tools import AnswerReader, ToolFamily
from chairlift.api.wire.responses import ResponsesRequest
from chairlift.params import CompletionOutput, FinishReason, Logprob, RequestOutput, SamplingParams
from tests.api.conftest import Server
from tests.api.response_events import CALL_EVENTS, COMPLETED, MESSAGE_EVENTS, OPENING, Events, without_identity


def new_reader() -> AnswerReader:
    return AnswerReader(ToolFamily.HERMES)


LOGPROBS = ["message.output_text.logprobs"]
TWO_CALLS = (
    'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\nThat is all.'
)


def outputs_of(text: str, step: int, reason: FinishReason, is_scored: bool) -> list[RequestOutput]:
    """A growing answer of a token per byte, `step` characters at a time."""
    states = []
    for length in [*range(step, len(text), step), len(text)]:
        tokens = [ord(character) for character in text[:length]]
        is_last = length == len(text)
        choice = CompletionOutput(0, text[:length], tokens, reason if is_last else None)
        if is_scored:
            choice.logprobs = [{token: Logprob(-float(index), 1)} for index, token in enumerate(tokens)]
            choice.text_offsets = list(range(length))
        states.append(RequestOutput("r", None, [1, 2, 3], [choice]))
    return states


def reply_of(server: Server, is_scored: bool = False) -> ResponsesReply:
    include = LOGPROBS if is_scored else None
    body = ResponsesRequest.model_validate({"input": "hi", "include": include, "top_logprobs": 0})
    return ResponsesReply(body, SamplingParams(), "bundled", server.llm.inputs.vocabulary, new_reader)


def streamed(reply: ResponsesReply, states: list[RequestOutput]) -> Events:
    opening = reply.opening()
    news = [event for state in states for event in reply.news(0, state)]
    return Events.of("".join([*opening, *news, *reply.closing()]))


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
async def test_text_and_calls_are_items_in_the_order_of_the_text(server: Server, step: int) -> None:
    events = streamed(reply_of(server), outputs_of(TWO_CALLS, step, FinishReason.STOP, is_scored=False))
    assert events.types == [*OPENING, *MESSAGE_EVENTS, *CALL_EVENTS, *CALL_EVENTS, *MESSAGE_EVENTS, COMPLETED]
    first, f, g, last = events.last_response["output"]
    assert (first["content"][0]["text"], last["content"][0]["text"].strip()) == ("Let me see.", "That is all.")
    assert (f["name"], f["arguments"], g["name"], g["arguments"]) == ("f", '{"x": 1}', "g", "{}")
    assert len({item["id"] for item in (first, f, g, last)}) == 4
    assert f["call_id"] != g["call_id"]
    assert {item["status"] for item in (first, f, g, last)} == {"completed"}
    assert [each["item"] for each in events.of_type("response.output_item.done")] == [first, f, g, last]
    for index, item in enumerate((first, f, g, last)):
        kind = "output_text" if item["type"] == "message" else "function_call_arguments"
        told = item["content"][0]["text"] if item["type"] == "message" else item["arguments"]
        assert events.joined(f"response.{kind}.delta", index) == told


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
async def test_log_probabilities_stay_with_their_text_and_those_of_calls_are_left_out(
    server: Server, step: int
) -> None:
    states = outputs_of(TWO_CALLS, step, FinishReason.STOP, is_scored=True)
    events = streamed(reply_of(server, is_scored=True), states)
    whole = reply_of(server, is_scored=True).whole(states[-1:]).model_dump()
    assert without_identity(events.last_response) == without_identity(whole)
    first, _, _, last = events.last_response["output"]
    for message, begin in ((first, 0), (last, TWO_CALLS.index("That"))):
        (part,) = message["content"]
        text = part["text"].strip()
        scored = part["logprobs"][-len(text) :]
        assert [(each["token"], each["logprob"]) for each in scored] == [
            (character, -float(begin + index)) for index, character in enumerate(text)
        ]


async def test_an_answer_of_nothing_is_an_empty_message(server: Server) -> None:
    events = streamed(reply_of(server), outputs_of("", 1, FinishReason.STOP, is_scored=False))
    assert events.types == [*OPENING, *(kind for kind in MESSAGE_EVENTS if "delta" not in kind), COMPLETED]
    assert events.last_response["output"][0]["content"][0]["text"] == ""


async def test_a_call_that_was_cut_off_is_the_one_that_is_incomplete(server: Server) -> None:
    text = TWO_CALLS[: TWO_CALLS.index('"g"') + 20]
    events = streamed(reply_of(server), outputs_of(text, 5, FinishReason.LENGTH, is_scored=False))
    statuses = [item["status"] for item in events.last_response["output"]]
    assert statuses == ["completed", "completed", "incomplete"]
    assert (events.last_response["status"], events.types[-1]) == ("incomplete", "response.incomplete")
