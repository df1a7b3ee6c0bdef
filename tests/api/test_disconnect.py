"""A client that goes away is an abort: its slot comes back within a step, and the others go on."""

import asyncio
import time
from typing import Any

import aiohttp
import pytest

from tests.api.conftest import SLOTS, Server

LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 450, "ignore_eos": True}


async def until_idle(server: Server, seconds: float = 10.0) -> None:
    """Waits until nothing runs; fails after that many seconds."""
    deadline = time.monotonic() + seconds
    while server.num_free_slots != SLOTS or server.llm.num_unfinished:
        assert time.monotonic() < deadline, f"{SLOTS - server.num_free_slots} slots are still taken"
        await asyncio.sleep(0.005)


async def until_running(server: Server, num_requests: int = 1) -> None:
    deadline = time.monotonic() + 10
    while server.llm.num_unfinished < num_requests:
        assert time.monotonic() < deadline, "the request did not arrive"
        await asyncio.sleep(0.001)


@pytest.mark.asyncio
async def test_leaving_in_the_middle_of_a_stream_frees_the_slot(server: Server) -> None:
    async with aiohttp.ClientSession() as http:
        response = await http.post(f"{server.url}/v1/completions", json={**LONG, "stream": True})
        await response.content.readline()
        assert server.num_free_slots == SLOTS - 1
        response.close()
    await until_idle(server)


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_answer_frees_the_slot(server: Server, stream: bool) -> None:
    async with aiohttp.ClientSession() as http:
        asking = asyncio.create_task(http.post(f"{server.url}/v1/completions", json={**LONG, "stream": stream}))
        await until_running(server)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await until_idle(server)


@pytest.mark.asyncio
async def test_leaving_while_queued_takes_the_request_out_of_the_queue(server: Server) -> None:
    async with aiohttp.ClientSession() as http:
        asking = [asyncio.create_task(http.post(f"{server.url}/v1/completions", json=LONG)) for _ in range(SLOTS + 2)]
        await until_running(server, SLOTS + 2)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    await until_idle(server)


@pytest.mark.asyncio
async def test_leaving_a_request_of_many_choices_and_prompts_frees_all_slots(server: Server) -> None:
    body = {**LONG, "prompt": ["Once", "Twice"], "n": 2, "stream": True}
    async with aiohttp.ClientSession() as http:
        response = await http.post(f"{server.url}/v1/completions", json=body)
        await response.content.readline()
        response.close()
    await until_idle(server)


@pytest.mark.asyncio
async def test_one_that_stays_is_answered_as_if_alone(server: Server) -> None:
    async with aiohttp.ClientSession() as http:

        async def ask() -> str:
            body = {**LONG, "max_tokens": 120, "temperature": 0}
            async with http.post(f"{server.url}/v1/completions", json=body) as response:
                return str((await response.json())["choices"][0]["text"])

        alone = await ask()
        staying = asyncio.create_task(ask())
        leaving = [asyncio.create_task(http.post(f"{server.url}/v1/completions", json=LONG)) for _ in range(3)]
        await until_running(server, 4)
        for task in leaving:
            task.cancel()
        assert await staying == alone
    await until_idle(server)
