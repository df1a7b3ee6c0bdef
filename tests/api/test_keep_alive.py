"""Comments keep a silent stream alive; clients pass over them, and they never get between or after the events."""

import asyncio
import json
import time
from itertools import pairwise
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from chairlift.api import replies
from tests.api.contract import client_of
from tests.api.fault_support import forward_of, held, post, serving, until_idle
from tests.engine.async_support import wait_until

COMMENT = ": keep-alive\n\n"
BODY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0, "stream": True}


@pytest.fixture(autouse=True)
def brief_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "KEEP_ALIVE_S", 0.03)


async def comments(response: aiohttp.ClientResponse, num_comments: int) -> str:
    return (await response.content.readexactly(num_comments * len(COMMENT))).decode()


async def test_while_a_prompt_waits_there_are_comments_and_then_the_same_events() -> None:
    async with serving(max_batch_size=1) as server, aiohttp.ClientSession() as http:
        url = f"{server.url}/v1/completions"
        async with http.post(url, json=BODY) as response:
            alone = await response.text()
        with held(forward_of(server.llm), "hidden") as gate:
            first = asyncio.create_task(http.post(url, json={**BODY, "stream": False}))
            await gate.entered()
            async with http.post(url, json=BODY) as response:  # queued: the only slot is taken
                assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
                assert await comments(response, 3) == 3 * COMMENT
                gate.open()
                rest = await response.text()
        (await first).close()
    assert texts_of(rest) == texts_of(alone)
    assert rest.endswith("data: [DONE]\n\n")


def texts_of(stream: str) -> tuple[str, str]:
    """The text, and what follows it; how it is cut into events depends on the time that each step takes."""
    payloads = [event.removeprefix("data: ") for event in stream.split("\n\n") if event.startswith("data: ")]
    choices = [json.loads(payload)["choices"][0] for payload in payloads[:-1]]
    return "".join(choice["text"] for choice in choices), f"{choices[-1]['finish_reason']} {payloads[-1]}"


async def test_the_openai_client_passes_over_them() -> None:
    async with serving() as server, client_of(server) as client:
        with held(forward_of(server.llm), "hidden") as gate:
            stream = await client.chat.completions.create(
                model="bundled", messages=[{"role": "user", "content": "What is 17 + 25?"}], temperature=0, stream=True
            )  # which returns once the status is there: with the first comment
            gate.allow(4)
            await asyncio.sleep(0.1)  # a pause in the middle of the stream, for some more
            gate.open()
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "17 + 25 = 42."


async def test_an_error_after_a_comment_is_an_event_and_an_exception_of_the_client() -> None:
    async with (
        serving(max_batch_size=1, max_queue_size=0) as server,
        client_of(server) as client,
    ):
        with held(forward_of(server.llm), "hidden") as gate:
            async with await post(server, BODY) as running:
                await gate.entered()
                stream = await client.completions.create(model="bundled", prompt="hi", stream=True)
                gate.open()  # only now the engine sees that there is no room
                with pytest.raises(openai.APIError) as caught:
                    await anext(aiter(stream))
                await running.head()
                assert (await running.rest())[-1].endswith("data: [DONE]\n\n")
        assert (caught.value.code, caught.value.type) == ("queue_full", "rate_limit_error")


def assert_whole(stream: str) -> None:
    """Comments and events stand side by side, none within another."""
    blocks = stream.split("\n\n")
    assert blocks.pop() == ""
    for block in blocks:
        assert block in (": keep-alive", "data: [DONE]") or json.loads(block.removeprefix("data: "))


async def test_comments_come_only_after_a_whole_interval_of_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """However the pauses between tokens fall: most are shorter here, and together longer."""
    interval_s, writes = 0.05, list[tuple[float, bytes]]()
    monkeypatch.setattr(replies, "KEEP_ALIVE_S", interval_s)
    write = replies.EventStream._write

    async def note(self: replies.EventStream, data: bytes) -> None:
        writes.append((time.monotonic(), data))
        await write(self, data)

    monkeypatch.setattr(replies.EventStream, "_write", note)
    async with serving() as server, aiohttp.ClientSession() as http:
        with held(forward_of(server.llm), "hidden") as gate:
            body = {**BODY, "max_tokens": 9, "ignore_eos": True}
            asking = asyncio.create_task(http.post(f"{server.url}/v1/completions", json=body))
            for pause_s in (*[0.03] * 8, 0.15):
                await gate.entered()
                await asyncio.sleep(pause_s)
                gate.allow()
            async with await asking as response:
                stream = await response.text()
    silences = [at - before for (before, _), (at, data) in pairwise(writes) if data == COMMENT.encode()]
    assert silences
    assert min(silences) >= 0.9 * interval_s
    assert stream.endswith("data: [DONE]\n\n")
    assert_whole(stream)


async def test_nothing_comes_after_the_end_and_the_connection_serves_the_next_request() -> None:
    async with serving() as server:
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=connector) as http:
            for _ in range(3):
                async with http.post(f"{server.url}/v1/completions", json=BODY) as response:
                    assert (await response.text()).endswith("data: [DONE]\n\n")
                await asyncio.sleep(0.1)  # a comment now would be taken for the next reply
            assert len(connector._conns) == 1
        assert [task for task in asyncio.all_tasks() if "EventStream._keep_alive" in repr(task)] == []


async def test_a_client_that_leaves_while_it_only_gets_comments_frees_its_place() -> None:
    async with serving() as server:
        with held(forward_of(server.llm), "hidden") as gate:
            leaving = await post(server, BODY)
            assert (await leaving.head()).startswith("HTTP/1.1 200 OK\r\n")
            assert await leaving.chunk() == COMMENT
            leaving.reset()
            await wait_until(lambda: server.llm.num_unfinished == 0 and not server.api.num_active, "it has left")
            gate.open()
        await until_idle(server)
        assert [task for task in asyncio.all_tasks() if "EventStream._keep_alive" in repr(task)] == []


@pytest.fixture
def slow_writes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every write of a reply takes a while, as to a slow reader; what was written comes in order."""
    written: list[bytes] = []
    write = web.StreamResponse.write

    async def slow_write(self: web.StreamResponse, data: bytes) -> None:
        await write(self, data)
        written.append(data)
        await asyncio.sleep(0.05)

    monkeypatch.setattr(web.StreamResponse, "write", slow_write)
    return written


async def test_an_end_that_falls_into_a_comments_write_loses_nothing(slow_writes: list[bytes]) -> None:
    async with serving() as server:
        with held(forward_of(server.llm), "hidden") as gate:
            async with await post(server, BODY) as client:
                await wait_until(lambda: len(slow_writes) > 0, "a comment is being written")
                gate.open()
                assert (await client.head()).startswith("HTTP/1.1 200 OK\r\n")
                stream = "".join(await client.rest())
    assert stream.startswith(COMMENT)
    assert texts_of(stream)[-1] == "length [DONE]"
    assert_whole(stream)


async def test_an_error_that_falls_into_a_comments_write_is_told(slow_writes: list[bytes]) -> None:
    async with serving(max_batch_size=1, max_queue_size=0) as server:
        with held(forward_of(server.llm), "hidden") as gate:
            async with await post(server, {**BODY, "stream": False}):
                await gate.entered()
                async with await post(server, BODY) as client:
                    await wait_until(lambda: len(slow_writes) > 0, "a comment is being written")
                    gate.open()
                    await client.head()
                    stream = "".join(await client.rest())
    assert stream.startswith(COMMENT)
    assert '"code":"queue_full"' in stream
    assert_whole(stream)
