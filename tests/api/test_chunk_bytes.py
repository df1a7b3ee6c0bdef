"""The very bytes of streams whose chunks tell nothing but text: what a template makes of it is what pydantic would."""

import asyncio
import gc
import itertools
import re
from typing import Any

import aiohttp
import pytest

from chairlift.api.replies import BLANK, EventStream, TextEvent, anthropic, event, responses
from chairlift.api.replies.answer import Call
from chairlift.api.wire.anthropic_message import ContentBlockDelta, InputJsonDelta, TextDelta, ThinkingDelta
from chairlift.api.wire.completions import ChatChunkChoice, ChatCompletionChunk, Delta
from chairlift.api.wire.response_object import Event, EventType
from tests.api.conftest import Server

HEAD = '"created":1,"model":"bundled","system_fingerprint":"fp"'
CHAT = f'data: {{"id":"ID",{HEAD},"object":"chat.completion.chunk","choices":[{{"index":0,"stop_reason":null,"delta":'
TEXT = f'data: {{"id":"ID",{HEAD},"object":"text_completion","choices":[{{"index":0,"stop_reason":null,'
ASKED = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "stream": True, "logit_bias": {"90": 100}}


async def events_of(server: Server, path: str, body: dict[str, object]) -> list[str]:
    """With what differs from reply to reply replaced; how many tokens share a chunk does as well."""
    async with aiohttp.ClientSession(server.url) as http, http.post(f"/v1/{path}", json={**ASKED, **body}) as response:
        text = (await response.read()).decode()
    head = text[len('data: {"id":') : text.index(',"object"')]
    events = re.sub("Z+", "Z", text.replace(head, f'"ID",{HEAD}')).split("\n\n")
    return [each for each, _ in itertools.groupby(events)]


async def test_a_chat(server: Server) -> None:
    assert await events_of(server, "chat/completions", {"messages": [{"role": "user", "content": "hi"}]}) == [
        CHAT + '{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}',
        CHAT + '{"content":"Z"},"logprobs":null,"finish_reason":null}]}',
        CHAT + '{},"logprobs":null,"finish_reason":"length"}]}',
        "data: [DONE]",
        "",
    ]


async def test_a_completion(server: Server) -> None:
    assert await events_of(server, "completions", {"prompt": "hi"}) == [
        TEXT + '"text":"Z","logprobs":null,"finish_reason":null}]}',
        TEXT + '"text":"Z","logprobs":null,"finish_reason":"length"}]}',
        "data: [DONE]",
        "",
    ]


TEXTS = ['"', "\\", "\0", "\x1f\x7f", "é日😀\u2028", "</script>", "%s {} \\u0000", '"sequence_number":0', ""]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text(text: str) -> None:
    def chunk(content: str) -> ChatCompletionChunk:
        delta = Delta(reasoning=content, reasoning_content=content)
        return ChatCompletionChunk(id="a", created=1, model="b", choices=[ChatChunkChoice(index=0, delta=delta)])

    assert TextEvent(chunk(BLANK)).of(text) == event(chunk(text))


@pytest.mark.parametrize("text", TEXTS)
def test_what_a_block_of_a_message_has_more(text: str) -> None:
    told: dict[anthropic._Kind, TextDelta | ThinkingDelta | InputJsonDelta] = {
        "text": TextDelta(text=text),
        "thinking": ThinkingDelta(thinking=text),
        "tool_use": InputJsonDelta(partial_json=text),
    }
    for kind, delta in told.items():
        block = anthropic._OpenBlock(3, kind, Call("add") if kind == "tool_use" else None)
        block.add("before")
        expected = event(ContentBlockDelta(index=3, delta=delta), "content_block_delta")
        assert anthropic._send(block.add(text)) == [expected]


@pytest.mark.parametrize("text", TEXTS)
def test_what_an_item_of_a_response_has_more(text: str) -> None:
    more: dict[responses._Kind, tuple[EventType, dict[str, Any]]] = {
        "message": ("response.output_text.delta", {"content_index": 0, "logprobs": []}),
        "reasoning": ("response.reasoning_text.delta", {"content_index": 0}),
        "function_call": ("response.function_call_arguments.delta", {}),
    }
    for kind, (name, fields) in more.items():
        item = responses._OpenItem(2, kind, Call("add") if kind == "function_call" else None)
        item.add("before", [])
        expected = Event(type=name, sequence_number=7, item_id=item.id, output_index=2, delta=text, **fields)
        assert responses._numbered(item.add(text, []), 7) == event(expected, name)


async def test_a_stream_leaves_nothing_to_the_garbage_collector(server: Server) -> None:
    """With thousands of streams a minute its rounds would stop all of them, the longer the more there is."""
    gc.collect()
    gc.disable()
    try:
        await events_of(server, "completions", {"prompt": "hi"})
        async with asyncio.timeout(20):
            while any(isinstance(each, EventStream) for each in gc.get_objects()):  # its handler may not be over yet
                await asyncio.sleep(0.01)
    finally:
        gc.enable()
