"""`/v1/messages` as the official client uses it: answers, streams, tools, thoughts, counts."""

import asyncio
import json
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from anthropic import beta_async_tool
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_create_params

from chairlift.api import ServerConfig
from chairlift.api.pages import fields_of
from chairlift.api.tools import ToolFamily
from chairlift.api.wire import Fate
from chairlift.api.wire.anthropic import CountTokensRequest, MessagesRequest
from tests.api.anthropic_support import (
    ANSWER,
    COUNT_TOKENS,
    QUESTION,
    WEATHER,
    anthropic_client,
    events_of,
    posted,
    whole_of,
)
from tests.api.conftest import MAX_SEQ_LEN, Server, serving
from tests.support.scripted_model import END_TOKEN, HYBRID, Script, install, make_thinking_checkpoint

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return install(monkeypatch)


def serving_script(directory: Path, **config: Any) -> Any:
    """A server whose model thinks and calls as Qwen3 does, and writes what the script says."""
    return serving(ServerConfig(**config), model=make_thinking_checkpoint(directory, HYBRID))


def write(server: Server, script: Script, text: str) -> None:
    script.token_ids = [*server.llm.inputs.tokenizer.encode(text, add_special_tokens=False), END_TOKEN]


async def test_a_question_is_answered_and_counted(server: Server) -> None:
    message = await whole_of(server, system=[{"type": "text", "text": "You are Chairlift."}])
    assert message.id.startswith("msg_")
    assert (message.role, message.model, message.stop_reason, message.stop_sequence) == (
        *("assistant", "bundled"),
        *("end_turn", None),
    )
    (block,) = message.content
    assert block.type == "text"
    assert block.text == ANSWER
    assert message.usage.output_tokens == len(ANSWER) + 1  # a byte is a token, and the end is one more
    again = (await whole_of(server, system="You are Chairlift.")).usage
    num_prompt = message.usage.input_tokens
    assert message.usage.cache_read_input_tokens == 0
    assert (again.input_tokens, again.cache_read_input_tokens) == (1, num_prompt - 1)
    async with anthropic_client(server) as client:
        counted = await client.messages.count_tokens(model="bundled", system="You are Chairlift.", messages=QUESTION)
    assert counted.input_tokens == num_prompt


async def test_a_streams_events_are_those_of_the_specification_and_add_up_to_the_whole(server: Server) -> None:
    whole = await whole_of(server)
    start, opening, *deltas, closing, delta, stop = await events_of(server)
    assert [each.type for each in (start, opening, closing, delta, stop)] == [
        *("message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop")
    ]
    assert (start.message.content, start.message.stop_reason) == ([], None)
    assert start.message.usage.cache_read_input_tokens == whole.usage.input_tokens - 1
    assert {each.type for each in deltas} == {"content_block_delta"}
    assert "".join(each.delta.text for each in deltas) == ANSWER
    assert (delta.delta.stop_reason, delta.usage.output_tokens) == ("end_turn", whole.usage.output_tokens)


async def test_the_clients_stream_helpers_tell_the_text_and_the_final_message(server: Server) -> None:
    async with (
        anthropic_client(server) as client,
        client.messages.stream(model="bundled", max_tokens=100, messages=QUESTION) as stream,
    ):
        assert "".join([text async for text in stream.text_stream]) == ANSWER
        final = await stream.get_final_message()
        assert await stream.get_final_text() == ANSWER
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", len(ANSWER) + 1)


async def test_max_tokens_and_stop_sequences_end_an_answer_and_say_so(server: Server) -> None:
    short = await whole_of(server, max_tokens=2)
    assert (short.content[0].type, short.stop_reason, short.usage.output_tokens) == ("text", "max_tokens", 2)
    cut = await whole_of(server, stop_sequences=["never", " ="])
    assert cut.content[0].type == "text"
    assert (cut.content[0].text, cut.stop_reason, cut.stop_sequence) == ("17 + 25", "stop_sequence", " =")
    *_, delta, _ = await events_of(server, stop_sequences=["never", " ="])
    assert (delta.delta.stop_reason, delta.delta.stop_sequence) == ("stop_sequence", " =")


async def test_more_tokens_than_there_is_room_for_may_be_asked_for(server: Server) -> None:
    reply = await whole_of(server, max_tokens=32_000, ignore_eos=True)
    assert reply.stop_reason == "model_context_window_exceeded"
    assert reply.usage.input_tokens + reply.usage.output_tokens == MAX_SEQ_LEN


async def test_no_tokens_at_all_compute_the_prompt_for_the_next_request(server: Server) -> None:
    nothing = await whole_of(server, max_tokens=0)
    assert (nothing.content, nothing.stop_reason, nothing.usage.output_tokens) == ([], "max_tokens", 0)
    assert (await whole_of(server)).usage.cache_read_input_tokens == nothing.usage.input_tokens - 1


async def test_an_assistants_last_turn_is_continued(server: Server) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": [{"type": "text", "text": "17 + 25 ="}]}]
    (block,) = (await whole_of(server, messages=begun)).content
    assert block.type == "text"
    assert block.text.strip() == "42."


async def test_a_schema_is_enforced(server: Server) -> None:
    form = {"type": "json_schema", "schema": {"const": {"sum": 42}}}
    (block,) = (await whole_of(server, output_config={"format": form, "effort": "high"})).content
    assert block.type == "text"
    assert json.loads(block.text) == {"sum": 42}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "any", "disable_parallel_tool_use": True}, {"get_weather", "paint"}),
        ({"type": "tool", "name": "paint", "disable_parallel_tool_use": True}, {"paint"}),
    ],
)
async def test_forced_calls_fit_their_schema_whole_and_streamed(choice: Any, names: set[str]) -> None:
    paint = {"name": "paint", "input_schema": {"const": {"colour": "red"}}}
    fields: Any = {"tools": [WEATHER, paint], "tool_choice": choice, "temperature": 0.0}
    async with serving(ServerConfig(tool_call_parser=ToolFamily.HERMES)) as server:
        whole = await whole_of(server, **fields)
        events = await events_of(server, **fields)
    (call,) = whole.content
    assert call.type == "tool_use"
    assert call.name in names
    assert call.input in ({"city": "Oslo"}, {"city": "Rome"}, {"colour": "red"})
    assert whole.stop_reason == "tool_use"
    opening = events[1].content_block
    assert (opening.type, opening.name, opening.input) == ("tool_use", call.name, {})
    assert opening.id.startswith("toolu_")
    pieces = [event.delta.partial_json for event in events if event.type == "content_block_delta"]
    assert len(pieces) > 1
    assert json.loads("".join(pieces)) == call.input


async def test_the_clients_tool_runner_calls_and_goes_on(tmp_path: Path, script: Script) -> None:
    asked: list[str] = []
    async with serving_script(tmp_path) as server, anthropic_client(server) as client:

        @beta_async_tool
        async def get_weather(city: str) -> str:
            """The weather of a city."""
            asked.append(city)
            write(server, script, "It rains.")
            return "rain"

        write(server, script, f"<think>Hm.</think>Let me look.{CALL}")
        runner = client.beta.messages.tool_runner(
            model="bundled", max_tokens=200, messages=QUESTION, tools=[get_weather], max_iterations=3
        )
        replies = [message async for message in runner]
    assert asked == ["Oslo"]
    assert [[block.type for block in reply.content] for reply in replies] == [
        ["thinking", "text", "tool_use"],
        ["text"],
    ]
    assert [reply.stop_reason for reply in replies] == ["tool_use", "end_turn"]
    assert replies[1].content[0].type == "text"
    assert replies[1].content[0].text == "It rains."


async def test_thoughts_are_blocks_with_a_stable_signature(tmp_path: Path, script: Script) -> None:
    async with serving_script(tmp_path) as server:
        write(server, script, "<think>\nHm.\n</think>\n\nFour.")
        whole, again = await whole_of(server), await whole_of(server, thinking={"type": "adaptive"})
        events = await events_of(server)
        omitted = await whole_of(server, thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"})
    thoughts, text = whole.content
    assert thoughts.type == "thinking"
    assert text.type == "text"
    assert (thoughts.thinking, text.text) == ("Hm.", "Four.")
    assert thoughts.signature
    assert again.content[0] == thoughts
    assert whole.usage.output_tokens_details is not None
    assert whole.usage.output_tokens_details.thinking_tokens == len("\nHm.\n")
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert "".join(each.thinking for each in deltas if each.type == "thinking_delta") == "Hm."
    assert [each.signature for each in deltas if each.type == "signature_delta"] == [thoughts.signature]
    assert omitted.content[0].type == "thinking"
    assert omitted.content[0].thinking == ""
    assert omitted.content[1] == text


async def test_thinking_is_switched_off_where_the_template_can(tmp_path: Path, script: Script) -> None:
    async with serving_script(tmp_path) as server:
        write(server, script, "Four.")
        free = await whole_of(server)
        off = await whole_of(server, thinking={"type": "disabled"})
        closed = server.llm.inputs.tokenizer.encode("<think>\n\n</think>\n\n", add_special_tokens=False)
    assert off.usage.input_tokens + (off.usage.cache_read_input_tokens or 0) == free.usage.input_tokens + len(closed)


async def test_a_call_that_max_tokens_cut_short_tells_the_arguments_as_far_as_they_go(
    tmp_path: Path, script: Script
) -> None:
    async with serving_script(tmp_path) as server:
        write(server, script, CALL)
        num_tokens = len(server.llm.inputs.tokenizer.encode(CALL.partition("lo")[0], add_special_tokens=False))
        cut = await whole_of(server, tools=[WEATHER], max_tokens=num_tokens)
    (call,) = cut.content
    assert call.type == "tool_use"
    assert (call.input, cut.stop_reason) == ({"city": "Os"}, "max_tokens")


async def test_a_silent_stream_is_kept_alive_by_pings(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.api.replies.KEEP_ALIVE_S", 0.01)
    gate = asyncio.Event()
    run_all = server.llm.run_all

    async def wait_first(generations: Any, **wishes: Any) -> Any:
        await gate.wait()
        async for each in run_all(generations, **wishes):
            yield each

    monkeypatch.setattr(server.llm, "run_all", wait_first)
    async with posted(server, {"max_tokens": 9, "messages": QUESTION, "stream": True}) as response:
        assert await response.content.readuntil(b"\n\n") == b'event: ping\ndata: {"type":"ping"}\n\n'
        gate.set()
        rest = (await response.read()).decode()
    assert "event: message_start\n" in rest
    assert rest.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')


async def test_counts_are_those_of_the_same_request_whatever_is_in_it(tmp_path: Path, script: Script) -> None:
    conversation: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, _use("1")]},
        {"role": "user", "content": [_result("1", "rain"), {"type": "text", "text": "Well?"}]},
    ]
    async with serving_script(tmp_path) as server, anthropic_client(server) as client:
        write(server, script, "Four.")
        for fields in ({"tools": [WEATHER]}, {"tools": [WEATHER], "tool_choice": {"type": "none"}}, {"system": "c"}):
            body: Any = {"model": "bundled", "messages": conversation, **fields}
            counted = await client.messages.count_tokens(**body)
            usage = (await whole_of(server, **body)).usage
            assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        async with posted(server, {"messages": conversation, "system": "c"}, COUNT_TOKENS) as response:
            assert await response.json() == {"input_tokens": counted.input_tokens}


def _use(call_id: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "get_weather", "input": {"city": "Oslo"}}


def _result(call_id: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


def test_a_conversation_becomes_the_messages_that_templates_know() -> None:
    body = MessagesRequest.model_validate(
        {
            "max_tokens": 1,
            "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, _text("b")],
            "messages": [
                {"role": "user", "content": "c"},
                {"role": "user", "content": [_text("d")]},
                {"role": "assistant", "content": [_text("e"), _use("1"), _use("2")]},
                {"role": "user", "content": [_result("2", [_text("f"), _text("g")]), _result("1", "h", is_error=True)]},
                {"role": "system", "content": "i"},
                {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, _text("j")]},
                {"role": "user", "content": "k"},
            ],
        }
    )
    function = {"name": "get_weather", "arguments": {"city": "Oslo"}}
    calls = [{"id": call_id, "type": "function", "function": function} for call_id in ("1", "2")]
    assert body.template_messages() == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "c\nd"},
        {"role": "assistant", "content": "e", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "2", "content": "f\ng"},
        {"role": "tool", "tool_call_id": "1", "content": "Error: h"},
        {"role": "system", "content": "i"},
        {"role": "assistant", "content": "j"},
        {"role": "user", "content": "k"},
    ]


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


HEADERS = {"betas", "workspace_id"}  # which the client writes into headers
BY_THE_CLIENT = {"output_format"}  # which it turns into another field


@pytest.mark.parametrize(
    ("body", "params"),
    [
        (MessagesRequest, message_create_params.MessageCreateParamsStreaming),
        (MessagesRequest, beta_create_params.MessageCreateParamsStreaming),
        (CountTokensRequest, message_count_tokens_params.MessageCountTokensParams),
        (CountTokensRequest, beta_count_params.MessageCountTokensParams),
    ],
)
def test_every_field_that_the_client_can_send_is_known(body: Any, params: type) -> None:
    assert set(get_type_hints(params)) - HEADERS - BY_THE_CLIENT - {row.name for row in fields_of(body)} == set()


def test_a_field_changes_its_fate_only_where_somebody_decides_it() -> None:
    rows = fields_of(MessagesRequest)
    assert {row.name for row in rows if row.fate is Fate.IGNORED} == {
        *("cache_control", "context_management", "speed", "user_profile_id", "workspace_id", "billing_policy"),
        *("service_tier", "inference_geo", "diagnostics"),
    }
    assert {row.name for row in rows if row.fate is Fate.REFUSED} == {
        *("mcp_servers", "container", "compaction", "fallbacks", "fallback_credit_token", "thread")
    }
