"""`/v1/messages` as the official client uses it: answers, streams, tools, thoughts, counts."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from anthropic import beta_async_tool
from anthropic.types import Message

from chairlift.api import ServerConfig
from chairlift.api.answers import ToolFamily
from chairlift.api.anthropic.request import MessagesRequest
from tests.api.anthropic.support import ANSWER, QUESTION, WEATHER, events_of, whole_of
from tests.api.conftest import MAX_SEQ_LEN, Server, serving
from tests.api.contract import COUNT_TOKENS, anthropic_client, posted
from tests.api.fault_support import forward_of, held, silent_for
from tests.support.scripted_model import END_TOKEN, HYBRID, Script, install, make_thinking_checkpoint

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return install(monkeypatch)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    """A server whose model thinks and calls as Qwen3 does, and writes what the test's script says."""
    async with serving(model=make_thinking_checkpoint(tmp_path_factory.mktemp("thinker"), HYBRID)) as server:
        yield server


def write(server: Server, script: Script, text: str) -> None:
    script.token_ids = [*tokens_of(server, text), END_TOKEN]


def tokens_of(server: Server, text: str) -> list[int]:
    token_ids: list[int] = server.llm.inputs.tokenizer.encode(text, add_special_tokens=False)
    return token_ids


def text_of(message: Any) -> str:
    """Returns what it says, and nothing else."""
    (block,) = message.content
    assert block.type == "text"
    return str(block.text)


async def test_a_question_is_answered_and_counted(server: Server) -> None:
    message = await whole_of(server, system=[{"type": "text", "text": "You are Chairlift."}])
    assert message.id.startswith("msg_")
    assert (message.role, message.model, text_of(message)) == ("assistant", "bundled", ANSWER)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
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
    types = ("message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop")
    assert tuple(each.type for each in (start, opening, closing, delta, stop)) == types
    assert (start.message.content, start.message.stop_reason) == ([], None)
    assert start.message.usage.cache_read_input_tokens == whole.usage.input_tokens - 1
    assert {each.type for each in deltas} == {"content_block_delta"}
    assert "".join(each.delta.text for each in deltas) == ANSWER
    assert (delta.delta.stop_reason, delta.usage.output_tokens) == ("end_turn", whole.usage.output_tokens)
    async with (
        anthropic_client(server) as client,
        client.messages.stream(model="bundled", max_tokens=100, messages=QUESTION) as stream,
    ):
        assert "".join([text async for text in stream.text_stream]) == ANSWER
        final = await stream.get_final_message()
    told = (text_of(final), final.stop_reason, final.usage.output_tokens)
    assert told == (ANSWER, "end_turn", whole.usage.output_tokens)


async def test_max_tokens_and_stop_sequences_end_an_answer_and_say_so(server: Server) -> None:
    short = await whole_of(server, max_tokens=2)
    assert (text_of(short), short.stop_reason, short.usage.output_tokens) == ("17", "max_tokens", 2)
    cut = await whole_of(server, stop_sequences=["never", " ="])
    assert (text_of(cut), cut.stop_reason, cut.stop_sequence) == ("17 + 25", "stop_sequence", " =")
    *_, delta, _ = await events_of(server, stop_sequences=["never", " ="])
    assert (delta.delta.stop_reason, delta.delta.stop_sequence) == ("stop_sequence", " =")


async def test_more_tokens_than_there_is_room_for_may_be_asked_for_and_none_at_all(server: Server) -> None:
    long = [{"role": "user", "content": "a" * 400}]
    reply = await whole_of(server, messages=long, max_tokens=32_000, ignore_eos=True)
    assert reply.stop_reason == "model_context_window_exceeded"
    assert reply.usage.input_tokens + reply.usage.output_tokens == MAX_SEQ_LEN
    await server.llm.reset_prefix_cache()
    nothing = await whole_of(server, max_tokens=0)  # which computes the prompt for the next request
    assert (nothing.content, nothing.stop_reason, nothing.usage.output_tokens) == ([], "max_tokens", 0)
    assert (await whole_of(server)).usage.cache_read_input_tokens == nothing.usage.input_tokens - 1


async def test_an_assistants_last_turn_is_continued_and_a_schema_is_enforced(server: Server) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": [{"type": "text", "text": "17 + 25 ="}]}]
    assert text_of(await whole_of(server, messages=begun)).strip() == "42."
    form = {"type": "json_schema", "schema": {"const": {"sum": 42}}}
    formed = await whole_of(server, output_config={"format": form, "effort": "high"})
    assert json.loads(text_of(formed)) == {"sum": 42}


async def test_forced_calls_fit_their_schema_whole_and_streamed() -> None:
    paint = {"name": "paint", "input_schema": {"const": {"colour": "red"}}}
    wanted: dict[str, dict[str, Any]] = {"any": {}, "tool": {"name": "paint"}}
    async with serving(ServerConfig(tool_call_parser=ToolFamily.HERMES)) as server:
        for kind, named in wanted.items():
            choice = {"type": kind, "disable_parallel_tool_use": True, **named}
            fields: Any = {"tools": [WEATHER, paint], "tool_choice": choice, "temperature": 0.0}
            whole, events = await whole_of(server, **fields), await events_of(server, **fields)
            (call,) = whole.content
            assert call.type == "tool_use"
            assert call.name in (["paint"] if named else ["get_weather", "paint"])
            assert call.input in ({"city": "Oslo"}, {"city": "Rome"}, {"colour": "red"})
            assert whole.stop_reason == "tool_use"
            opening = events[1].content_block
            assert (opening.type, opening.name, opening.input) == ("tool_use", call.name, {})
            assert opening.id.startswith("toolu_")
            pieces = [event.delta.partial_json for event in events if event.type == "content_block_delta"]
            assert len(pieces) > 1
            assert json.loads("".join(pieces)) == call.input


async def test_the_clients_tool_runner_calls_and_goes_on(thinker: Server, script: Script) -> None:
    asked: list[str] = []

    @beta_async_tool
    async def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        write(thinker, script, "It rains.")
        return "rain"

    write(thinker, script, f"<think>Hm.</think>Let me look.{CALL}")
    async with anthropic_client(thinker) as client:
        runner = client.beta.messages.tool_runner(
            model="bundled", max_tokens=200, messages=QUESTION, tools=[get_weather], max_iterations=3
        )
        calling, last = [message async for message in runner]
    assert asked == ["Oslo"]
    assert [block.type for block in calling.content] == ["thinking", "text", "tool_use"]
    assert (calling.stop_reason, last.stop_reason) == ("tool_use", "end_turn")
    assert text_of(last) == "It rains."


async def test_thoughts_are_blocks_with_a_stable_signature(thinker: Server, script: Script) -> None:
    write(thinker, script, "<think>\nHm.\n</think>\n\nFour.")
    whole, again = await whole_of(thinker), await whole_of(thinker, thinking={"type": "adaptive"})
    events = await events_of(thinker)
    omitted = await whole_of(thinker, thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"})
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
    assert (omitted.content[0].thinking, omitted.content[1]) == ("", text)


async def test_thinking_is_switched_off_where_the_template_can(thinker: Server, script: Script) -> None:
    write(thinker, script, "Four.")
    fields: list[dict[str, Any]] = [{}, {"thinking": {"type": "disabled"}}]
    free, off = [num_prompt_tokens(await whole_of(thinker, **each)) for each in fields]
    assert off == free + len(tokens_of(thinker, "<think>\n\n</think>\n\n"))


async def test_a_call_that_was_cut_short_tells_its_arguments_so_far(thinker: Server, script: Script) -> None:
    write(thinker, script, CALL)
    cut = await whole_of(thinker, tools=[WEATHER], max_tokens=len(tokens_of(thinker, CALL.partition("lo")[0])))
    (call,) = cut.content
    assert call.type == "tool_use"
    assert (call.input, cut.stop_reason) == ({"city": "Os"}, "max_tokens")


async def test_a_silent_stream_is_kept_alive_by_pings(server: Server) -> None:
    with silent_for(server, 0.01), held(forward_of(server.llm), "hidden") as gate:
        async with posted(server, {"max_tokens": 9, "messages": QUESTION, "stream": True}) as response:
            assert await response.content.readuntil(b"\n\n") == b'event: ping\ndata: {"type":"ping"}\n\n'
            gate.open()
            rest = (await response.read()).decode()
    assert "event: message_start\n" in rest
    assert rest.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')


async def test_counts_are_those_of_the_same_request_whatever_is_in_it(thinker: Server, script: Script) -> None:
    conversation: Any = [
        {"role": "user", "content": [_text("a"), _text("b")]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, _use("1")]},
        {"role": "user", "content": [_result("1", "rain"), _text("Well?")]},
    ]
    write(thinker, script, "Four.")
    for fields in ({"tools": [WEATHER]}, {"tools": [WEATHER], "tool_choice": {"type": "none"}}, {"system": "c"}):
        body: Any = {"messages": conversation, **fields}
        async with posted(thinker, body, COUNT_TOKENS) as response:
            assert await response.json() == {"input_tokens": num_prompt_tokens(await whole_of(thinker, **body))}


def num_prompt_tokens(message: Message) -> int:
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def _use(call_id: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "get_weather", "input": {"city": "Oslo"}}


def _result(call_id: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


def test_a_conversation_becomes_the_messages_that_templates_know() -> None:
    turns = [
        *({"role": "user", "content": content} for content in ("c", [_text("d")])),
        {"role": "assistant", "content": [_text("e"), _use("1"), _use("2")]},
        {"role": "user", "content": [_result("2", [_text("f"), _text("g")]), _result("1", "h", is_error=True)]},
        {"role": "system", "content": "i"},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, _text("j")]},
        {"role": "user", "content": "k"},
    ]
    system = [{**_text("a"), "cache_control": {"type": "ephemeral"}}, _text("b")]
    body = MessagesRequest.model_validate({"max_tokens": 1, "system": system, "messages": turns})
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
