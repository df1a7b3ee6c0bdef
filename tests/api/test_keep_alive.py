"""Comments keep a silent stream alive; clients pass over them, and they never get between or after the events."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from chairlift.api.http import event_stream
from tests.api.conftest import Server, in_loop
from tests.api.contract import client_of
from tests.api.fault_support import Gate, forward_of, held, post, serving, silent_for, until_idle
from tests.engine.async_support import wait_until

COMMENT = ": keep-alive\n\n"
BODY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0, "stream": True}


SILENCE_S = 0.03


@pytest.fixture(autouse=True)
def brief_silence(server: Server) -> Iterator[None]:
    with silent_for(server, SILENCE_S):
        yield


@in_loop
async def gate(server: Server) -> AsyncIterator[Gate]:
    """Steps wait at it."""
    with held(forward_of(server.llm), "hidden") as gate:
        yield gate


def assert_whole(stream: str) -> None:
    """Comments and events stand side by side, none within another."""
    *blocks, end = stream.split("\n\n")
    assert end == ""
    assert all(each in (": keep-alive", "data: [DONE]") or json.loads(each.removeprefix("data: ")) for each in blocks)


def texts_of(stream: str) -> tuple[str, str]:
    """The text, and what follows it; how it is cut into events depends on the time that each step takes."""
    assert_whole(stream)
    payloads = [event.removeprefix("data: ") for event in stream.split("\n\n") if event.startswith("data: ")]
    choices = [json.loads(payload)["choices"][0] for payload in payloads[:-1]]
    return "".join(choice["text"] for choice in choices), f"{choices[-1]['finish_reason']} {payloads[-1]}"


async def test_while_a_prompt_waits_there_are_comments_and_then_the_same_events() -> None:
    async with serving(max_batch_size=1) as server, aiohttp.ClientSession() as http:
        server.api.pulse.interval_s = SILENCE_S
        url = f"{server.url}/v1/completions"
        async with http.post(url, json=BODY) as response:
            alone = await response.text()
        with held(forward_of(server.llm), "hidden") as gate:
            async with await post(server, {**BODY, "stream": False}):
                await gate.entered()
                async with http.post(url, json=BODY) as response:  # queued: the only slot is taken
                    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
                    assert await response.content.readexactly(3 * len(COMMENT)) == 3 * COMMENT.encode()
                    gate.open()
                    rest = await response.text()
    assert texts_of(rest) == texts_of(alone)
    assert rest.endswith("data: [DONE]\n\n")


async def test_the_openai_client_passes_over_them(server: Server, gate: Gate) -> None:
    question: Any = [{"role": "user", "content": "What is 17 + 25?"}]
    async with client_of(server) as client:
        stream = await client.chat.completions.create(model="bundled", messages=question, temperature=0, stream=True)
        gate.allow(4)  # it returned once the status was there: with the first comment
        await asyncio.sleep(0.1)  # a pause in the middle of the stream, for some more
        gate.open()
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "17 + 25 = 42."


async def test_comments_come_after_a_whole_silence(server: Server, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the pauses between tokens fall: most are shorter here, and together longer."""
    interval_s, writes = 0.05, list[tuple[float, bytes]]()
    server.api.pulse.interval_s = interval_s
    write = event_stream.EventStream._write

    async def note(self: event_stream.EventStream, data: bytes) -> None:
        writes.append((time.monotonic(), data))
        await write(self, data)

    monkeypatch.setattr(event_stream.EventStream, "_write", note)
    async with await post(server, {**BODY, "max_tokens": 9, "ignore_eos": True}) as client:
        for pause_s in (*[0.03] * 8, 0.15):
            await gate.entered()
            await asyncio.sleep(pause_s)
            gate.allow()
        await client.head()
        stream = "".join(await client.read_all())
    silences = [at - before for (before, _), (at, data) in pairwise(writes) if data == COMMENT.encode()]
    assert silences
    assert min(silences) >= 0.9 * interval_s
    assert stream.endswith("data: [DONE]\n\n")
    assert_whole(stream)


async def test_nothing_comes_after_the_end_and_the_connection_serves_the_next_request(server: Server) -> None:
    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(connector=connector) as http:
        for _ in range(3):
            async with http.post(f"{server.url}/v1/completions", json=BODY) as response:
                assert (await response.text()).endswith("data: [DONE]\n\n")
            await asyncio.sleep(0.1)  # a comment now would be taken for the next reply
        assert len(connector._conns) == 1
    assert not is_kept_alive()


async def test_a_client_that_leaves_while_it_only_gets_comments_frees_its_place(server: Server, gate: Gate) -> None:
    leaving = await post(server, BODY)
    assert (await leaving.head()).startswith("HTTP/1.1 200 OK\r\n")
    assert await leaving.chunk() == COMMENT
    leaving.reset()
    await wait_until(lambda: server.llm.num_unfinished == 0 and not server.api.num_active, "it has left")
    gate.open()
    await until_idle(server)
    assert not is_kept_alive()


def is_kept_alive() -> bool:
    return any("EventStream._keep_alive" in repr(task) for task in asyncio.all_tasks())


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


async def test_an_end_amid_a_comment_loses_nothing(server: Server, gate: Gate, slow_writes: list[bytes]) -> None:
    async with await post(server, BODY) as client:
        await wait_until(lambda: len(slow_writes) > 0, "a comment is being written")
        gate.open()
        assert (await client.head()).startswith("HTTP/1.1 200 OK\r\n")
        stream = "".join(await client.read_all())
    assert stream.startswith(COMMENT)
    assert texts_of(stream)[-1] == "length [DONE]"


async def test_an_error_amid_a_comment_is_told(slow_writes: list[bytes]) -> None:
    async with serving(max_batch_size=1, max_queue_size=0) as server:
        server.api.pulse.interval_s = SILENCE_S
        with held(forward_of(server.llm), "hidden") as gate:
            async with await post(server, {**BODY, "stream": False}):
                await gate.entered()
                async with await post(server, BODY) as client:  # only after a comment the engine sees it
                    await wait_until(lambda: len(slow_writes) > 0, "a comment is being written")
                    gate.open()
                    await client.head()
                    stream = "".join(await client.read_all())
    assert stream.startswith(COMMENT)
    assert '"code":"queue_full"' in stream
    assert_whole(stream)
