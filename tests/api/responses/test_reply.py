"""Replies of `/v1/responses`: the events of streams, what they add up to, how they end early; items however cut."""

import asyncio
import itertools
import json
from functools import partial
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from chairlift.api.answers import AnswerReader, ToolFamily
from chairlift.api.responses.reply import ResponsesReply
from chairlift.api.responses.request import ResponsesRequest
from chairlift.engine.text.deltas import CompletionDelta, RequestDelta
from chairlift.params import FinishReason, Logprob, SamplingParams
from tests.api.conftest import Server
from tests.api.contract import CALL_EVENTS, COMPLETED, MESSAGE_EVENTS, OPENING, Events, post, serving, without_identity
from tests.api.responses.test_responses import ANSWER, LOGPROBS, NAMED, QUESTION, RESPONSES, TOOL, Trip, check
from tests.engine.async_support import hold_back


async def stream(server: Server, **body: Any) -> Events:
    asked = {"input": QUESTION, "stream": True, **body}
    async with aiohttp.ClientSession(server.url) as http, http.post(RESPONSES, json=asked) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        return Events.of((await response.read()).decode())


async def test_a_message_is_told_in_this_order(server: Server) -> None:
    events = await stream(server)
    assert events.types == [*OPENING, *MESSAGE_EVENTS, COMPLETED]
    created, in_progress, added, part_added = events.all[:4]
    for opening in (created, in_progress):
        assert (opening["response"]["status"], opening["response"]["output"]) == ("in_progress", [])
        assert opening["response"]["usage"] is None
    assert (added["item"]["status"], added["item"]["content"], added["output_index"]) == ("in_progress", [], 0)
    assert part_added["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    text_done, part_done, item_done, completed = events.all[-4:]
    assert text_done["text"] == part_done["part"]["text"] == ANSWER
    assert item_done["item"] == completed["response"]["output"][0]
    assert len({each["response"]["id"] for each in (created, in_progress, completed)}) == 1
    item_id = added["item"]["id"]
    assert {each["item_id"] for each in events.all if "item_id" in each} == {item_id} == {item_done["item"]["id"]}
    assert {each["content_index"] for each in events.all if "content_index" in each} == {0}


async def test_a_stream_adds_up_to_the_whole_reply(server: Server) -> None:
    body = {"input": QUESTION, "include": LOGPROBS, "top_logprobs": 1}
    events = await stream(server, **body)
    whole = await post(server, RESPONSES, body)
    assert events.joined("response.output_text.delta") == ANSWER
    assert without_identity(events.last_response) == without_identity(whole)
    check(events.last_response)
    logprobs = whole["output"][0]["content"][0]["logprobs"]
    deltas = events.of_type("response.output_text.delta")
    assert [scored for delta in deltas for scored in delta["logprobs"]] == logprobs
    *told, end = ("".join(scored["token"] for scored in delta["logprobs"]) for delta in deltas)
    assert told == [delta["delta"] for delta in deltas[:-1]]
    assert (deltas[-1]["delta"], end) == ("", "<|im_end|>")


async def test_the_clients_events_hold_the_text_so_far_and_its_end_is_parsed(client: AsyncOpenAI) -> None:
    async with client.responses.stream(model="bundled", input="Where to?", text_format=Trip) as events:
        deltas = [each async for each in events if each.type == "response.output_text.delta"]
        final = await events.get_final_response()
    assert [each.snapshot for each in deltas] == [*itertools.accumulate(each.delta for each in deltas)]
    assert deltas[-1].snapshot == final.output_text
    assert isinstance(final.output_parsed, Trip)


async def test_max_output_tokens_end_the_stream_incomplete(server: Server) -> None:
    events = await stream(server, max_output_tokens=4)
    assert events.types == [*OPENING, *MESSAGE_EVENTS, "response.incomplete"]
    assert events.last_response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events.last_response["completed_at"] is None
    assert events.last_response["usage"]["output_tokens"] == 4
    assert events.all[-2]["item"]["status"] == "incomplete"
    assert events.joined("response.output_text.delta") == ANSWER[:4]


async def test_a_call_is_told_in_this_order(hermes: AsyncOpenAI) -> None:
    create: Any = hermes.responses.with_raw_response.create
    raw = await create(model="bundled", input=QUESTION, tools=[TOOL], tool_choice=NAMED, stream=True)
    events = Events.of((await raw.http_response.aread()).decode())
    assert events.types == [*OPENING, *CALL_EVENTS, COMPLETED]
    (item,) = events.last_response["output"]
    added, *_, arguments_done, item_done, _ = events.all[2:]
    assert added["item"] == {**item, "status": "in_progress", "arguments": ""}
    assert item_done["item"] == item
    assert (arguments_done["name"], arguments_done["arguments"]) == ("get_weather", item["arguments"])
    assert json.loads(events.joined("response.function_call_arguments.delta"))["city"] in ("Oslo", "Rome")
    assert {each["item_id"] for each in events.all if "item_id" in each} == {item["id"]}


async def test_the_client_parses_a_streamed_calls_arguments(hermes: AsyncOpenAI) -> None:
    tools: Any = [{"type": "function", **openai.pydantic_function_tool(Trip)["function"]}]
    fields: Any = {"model": "bundled", "input": QUESTION, "tools": tools, "parallel_tool_calls": False}
    async with hermes.responses.stream(**fields, tool_choice="required") as events:
        (call,) = (await events.get_final_response()).output
    assert call.type == "function_call"
    assert isinstance(Trip.model_validate(call.parsed_arguments), Trip)


async def test_what_goes_wrong_in_a_stream_is_a_failed_response_and_raises(server: Server, client: AsyncOpenAI) -> None:
    seen: list[Any] = []
    boom = pytest.raises(openai.APIError, match="a step failed: RuntimeError: boom")
    with hold_back(server.llm) as gate, boom as caught:
        gate.allow(1)
        async for each in await client.responses.create(model="bundled", input=QUESTION, stream=True):
            seen.append(each)
            if each.type == "response.output_text.delta":
                gate.fail(RuntimeError("boom"))
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["code"] == "engine_dead"
    failed = seen[-1]
    assert failed.type == "response.failed"
    assert (failed.response.status, failed.response.error.code) == ("failed", "server_error")
    assert "boom" in failed.response.error.message
    assert [item.status for item in failed.response.output] == ["incomplete"]
    assert [each.sequence_number for each in seen] == list(range(len(seen)))


async def test_a_failure_before_the_first_token_is_still_a_well_formed_stream() -> None:
    async with serving() as server, aiohttp.ClientSession() as http:
        server.api.pulse.interval_s = 0.01
        with hold_back(server.llm) as gate:
            async with http.post(f"{server.url}{RESPONSES}", json={"input": QUESTION, "stream": True}) as response:
                comment = (await response.content.readuntil(b"\n\n")).decode()
                gate.fail(RuntimeError("boom"))
                events = Events.of(comment + (await response.read()).decode())
    assert comment == ": keep-alive\n\n"
    assert events.types == [*OPENING, "response.failed", "error"]
    boom = {"message": "a step failed: RuntimeError: boom", "param": None, "code": "engine_dead"}
    error = events.all[-1]
    assert error["error"] == {**boom, "type": "server_error"}
    assert {name: error[name] for name in boom} == boom
    assert events.last_response["output"] == []


async def test_a_stream_that_the_server_ends_is_incomplete_without_a_reason(server: Server) -> None:
    with hold_back(server.llm) as gate:
        asking = asyncio.create_task(stream(server))
        gate.allow(1)
        await gate.entered()
        await gate.entered()
        await server.llm.abort_all()
        gate.open()
        events = await asking
    assert events.types == [*OPENING, *MESSAGE_EVENTS, "response.incomplete"]
    assert events.last_response["incomplete_details"] == {}
    assert events.last_response["output"][0]["status"] == "incomplete"
    assert ANSWER.startswith(events.joined("response.output_text.delta"))


TWO_CALLS = (
    'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\nThat is all.'
)


def deltas_of(text: str, step: int, reason: FinishReason) -> list[RequestDelta]:
    """An answer of a scored token per byte, `step` characters at a time."""
    deltas = []
    for begin in range(0, max(len(text), 1), step):
        offsets = range(begin, min(begin + step, len(text)))
        said = text[begin : begin + step]
        scores = [{ord(text[offset]): Logprob(-float(offset), 1)} for offset in offsets]
        finish_reason = reason if begin + step >= len(text) else None
        choice = CompletionDelta(0, said, [*said.encode()], scores, offsets, begin + len(said), finish_reason)
        deltas.append(RequestDelta("r", None, [1, 2, 3], [choice]))
    return deltas


def reply_of(server: Server) -> ResponsesReply:
    body = ResponsesRequest.model_validate({"input": "hi", "include": LOGPROBS, "top_logprobs": 0})
    reader = partial(AnswerReader, ToolFamily.HERMES)
    return ResponsesReply(body, SamplingParams(), "bundled", server.llm.inputs.vocabulary, reader)


def streamed(reply: ResponsesReply, deltas: list[RequestDelta]) -> Events:
    opening = reply.opening()
    news = [event for delta in deltas for event in reply.news(0, delta)]
    return Events.of("".join([*opening, *news, *reply.closing()]))


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
async def test_text_and_calls_are_items_in_the_order_of_the_text_and_scores_stay_with_their_text(
    server: Server, step: int
) -> None:
    events = streamed(reply_of(server), deltas_of(TWO_CALLS, step, FinishReason.STOP))
    assert events.types == [*OPENING, *MESSAGE_EVENTS, *CALL_EVENTS, *CALL_EVENTS, *MESSAGE_EVENTS, COMPLETED]
    first, f, g, last = items = events.last_response["output"]
    assert (first["content"][0]["text"], last["content"][0]["text"].strip()) == ("Let me see.", "That is all.")
    assert (f["name"], f["arguments"], g["name"], g["arguments"]) == ("f", '{"x": 1}', "g", "{}")
    assert len({item["id"] for item in items}) == 4
    assert f["call_id"] != g["call_id"]
    assert {item["status"] for item in items} == {"completed"}
    assert [each["item"] for each in events.of_type("response.output_item.done")] == items
    for index, item in enumerate(items):
        kind = "output_text" if item["type"] == "message" else "function_call_arguments"
        told = item["content"][0]["text"] if item["type"] == "message" else item["arguments"]
        assert events.joined(f"response.{kind}.delta", index) == told
    whole = reply_of(server).whole(deltas_of(TWO_CALLS, len(TWO_CALLS), FinishReason.STOP)).model_dump()
    assert without_identity(events.last_response) == without_identity(whole)
    for message, begin in ((first, 0), (last, TWO_CALLS.index("That"))):
        text = message["content"][0]["text"].strip()
        scored = [(each["token"], each["logprob"]) for each in message["content"][0]["logprobs"][-len(text) :]]
        assert scored == [(character, -float(begin + index)) for index, character in enumerate(text)]


async def test_an_answer_of_nothing_is_an_empty_message(server: Server) -> None:
    events = streamed(reply_of(server), deltas_of("", 1, FinishReason.STOP))
    assert events.types == [*OPENING, *(kind for kind in MESSAGE_EVENTS if "delta" not in kind), COMPLETED]
    assert events.last_response["output"][0]["content"][0]["text"] == ""


async def test_a_call_that_was_cut_off_is_the_one_that_is_incomplete(server: Server) -> None:
    text = TWO_CALLS[: TWO_CALLS.index('"g"') + 20]
    events = streamed(reply_of(server), deltas_of(text, 5, FinishReason.LENGTH))
    statuses = [item["status"] for item in events.last_response["output"]]
    assert statuses == ["completed", "completed", "incomplete"]
    assert (events.last_response["status"], events.types[-1]) == ("incomplete", "response.incomplete")


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # of the client
async def test_tools_that_no_model_sees_are_limited_because_they_are_repeated(server: Server) -> None:
    tools = [{**TOOL, "description": "x" * 2**20}]
    refused = await post(server, RESPONSES, {"input": QUESTION, "tools": tools, "tool_choice": "none"}, status=400)
    assert refused["error"]["param"] == "tools"
    assert "at most 1048576 are possible" in refused["error"]["message"]


async def test_large_tools_are_repeated_in_the_first_and_the_last_event(server: Server) -> None:
    tools = [{**TOOL, "description": "x" * 10**6}]
    events = await stream(server, tools=tools, tool_choice="none", max_output_tokens=2)
    whole = [each["response"] for each in events.all if "response" in each]
    assert [len(each["tools"][0]["description"]) for each in whole] == [10**6] * 3
