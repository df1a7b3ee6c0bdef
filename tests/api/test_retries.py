"""Busy, or going down: what the server says, and that the official client's own two retries work out."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from chairlift.api.errors import error_reply
from chairlift.errors import QueueFull, QueueTimeout
from tests.api.conftest import Server
from tests.api.fault_support import Gate, clock_of, held, post, serving, until_idle
from tests.engine.async_support import wait_until

BODY: dict[str, Any] = {"model": "bundled", "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
QUEUE_SIZE = 2
NUM_STEPS_TO_REFUSE = 2  # the one that runs, and the one after which the engine reports what it found before
FULL = {
    "message": "the waiting queue is full (2 requests); try again later",
    "type": "rate_limit_error",
    "param": None,
    "code": "queue_full",
}
GOING_DOWN = {
    "message": "the server is shutting down; try again later, or another server",
    "type": "server_error",
    "param": None,
    "code": "unavailable",
}


@pytest.mark.parametrize(
    ("seconds", "header"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.01, "2"), (7.0, "7"), (59.5, "60")]
)
def test_estimates_are_rounded_up_to_whole_seconds(seconds: float, header: str) -> None:
    full = error_reply(QueueFull("full", retry_after=seconds)).response()
    late = error_reply(QueueTimeout("waited 5 s for a slot", retry_after=seconds)).response()
    assert (full.status, full.headers["Retry-After"]) == (429, header)
    assert (late.status, late.headers["Retry-After"]) == (503, header)


class Answers:
    """What every attempt of a client was answered with."""

    def __init__(self) -> None:
        self.statuses: list[int] = []

    async def note(self, response: Any) -> None:
        self.statuses.append(response.status_code)

    async def until(self, num_answers: int) -> None:
        await wait_until(lambda: len(self.statuses) >= num_answers, f"{num_answers} answers")


@asynccontextmanager
async def client_as_it_comes(server: Server) -> AsyncIterator[tuple[AsyncOpenAI, Answers]]:
    """The official client with its two retries."""
    answers = Answers()
    http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [answers.note]})
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http) as client:
        yield client, answers


@asynccontextmanager
async def busy(num_waiting: int, has_stood_for_s: float = 0.0) -> AsyncIterator[tuple[Server, Gate]]:
    """One slot, taken since that time, and so many in the queue of two. Each permit of the gate is a step."""
    async with serving(max_batch_size=1, max_queue_size=QUEUE_SIZE) as server:
        with clock_of(server.llm) as clock, held(server.llm._core, "step") as gate:
            async with await post(server, {**BODY, "max_tokens": 100, "n": 1 + num_waiting, "ignore_eos": True}):
                await gate.entered()
                gate.allow()
                await gate.entered()
                assert server.num_free_slots == 0
                clock.now += has_stood_for_s
                yield server, gate
                gate.open()


async def ask_while_busy(server: Server, gate: Gate, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body of the answer."""
    async with aiohttp.ClientSession() as http:
        asking = asyncio.create_task(http.post(f"{server.url}/v1/completions", json=body))
        await wait_until(lambda: server.llm.num_unfinished > 1, "it has come in")
        gate.allow(NUM_STEPS_TO_REFUSE)
        async with await asking as response:
            return response.status, dict(response.headers), await response.json()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_says_when_to_come_back(stream: bool) -> None:
    async with busy(num_waiting=QUEUE_SIZE) as (server, gate):
        status, headers, reply = await ask_while_busy(server, gate, {**BODY, "stream": stream})
        assert (status, headers["Retry-After"], reply) == (429, "1", {"error": FULL})
        assert headers["Content-Type"] == "application/json; charset=utf-8"


async def test_the_slower_the_queue_the_later_a_client_is_to_come_back() -> None:
    async with busy(num_waiting=QUEUE_SIZE, has_stood_for_s=7.5) as (server, gate):
        status, headers, _ = await ask_while_busy(server, gate, BODY)
        assert (status, headers["Retry-After"]) == (429, "8")


@pytest.mark.parametrize("extra", [{"n": 2}, {"prompt": ["one", "two"]}, {"prompt": ["one"], "n": 2, "stream": True}])
async def test_choices_and_prompts_are_taken_all_or_none(extra: dict[str, Any]) -> None:
    async with busy(num_waiting=1) as (server, gate):
        status, _, reply = await ask_while_busy(server, gate, {**BODY, **extra})
        assert (status, reply) == (429, {"error": FULL})
        assert server.llm._core._scheduler.num_waiting == 1
        gate.open()
        async with aiohttp.ClientSession() as http, http.post(f"{server.url}/v1/completions", json=BODY) as response:
            assert response.status == 200  # there is one place


@pytest.mark.parametrize("stream", [False, True])
async def test_the_clients_retry_is_answered_once_the_server_is_free_again(stream: bool) -> None:
    async with busy(num_waiting=QUEUE_SIZE) as (server, gate), client_as_it_comes(server) as (client, answers):
        asking = asyncio.create_task(client.completions.create(**BODY, stream=stream))
        await wait_until(lambda: server.llm.num_unfinished > 1, "it has come in")
        gate.allow(NUM_STEPS_TO_REFUSE)
        await answers.until(1)
        gate.open()
        reply: Any = await asking
        last = [chunk async for chunk in reply][-1] if stream else reply
        assert last.choices[0].finish_reason == "length"
        assert answers.statuses == [429, 200]
        await until_idle(server, num_slots=1)


async def test_a_server_that_stays_full_is_a_rate_limit_error_after_three_attempts() -> None:
    async with busy(num_waiting=QUEUE_SIZE) as (server, gate), client_as_it_comes(server) as (client, answers):
        asking = asyncio.create_task(client.completions.create(**BODY))
        for attempt in range(3):
            await wait_until(lambda: server.llm.num_unfinished > 1, "it has come in")
            gate.allow(NUM_STEPS_TO_REFUSE)
            await answers.until(attempt + 1)
        with pytest.raises(openai.RateLimitError) as caught:
            await asking
        assert answers.statuses == [429, 429, 429]
        assert (caught.value.body, caught.value.code) == (FULL, "queue_full")
        assert caught.value.response.headers["Retry-After"] == "1"


async def test_a_server_that_goes_down_is_asked_again_and_its_successor_answers(server: Server) -> None:
    async with client_as_it_comes(server) as (client, answers):
        server.api.is_draining = True
        asking = asyncio.create_task(client.completions.create(**BODY))
        await answers.until(1)
        server.api.is_draining = False  # as if another one had taken its place
        assert (await asking).choices[0].finish_reason == "length"
        assert answers.statuses == [503, 200]


async def test_a_server_that_goes_down_says_so(server: Server) -> None:
    async with aiohttp.ClientSession() as http:
        server.api.drain()
        async with http.post(f"{server.url}/v1/completions", json=BODY) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
            assert await response.json() == {"error": GOING_DOWN}
        async with http.get(f"{server.url}/health") as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")


async def test_what_no_retry_can_mend_is_not_retried(server: Server) -> None:
    async with client_as_it_comes(server) as (client, answers):
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(**{**BODY, "max_tokens": 10_000})
        with pytest.raises(openai.BadRequestError):  # more than ever fit: told at once, not as "try again later"
            await client.completions.create(**{**BODY, "n": 7})
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(**{**BODY, "prompt": ["a"] * 7})
        assert answers.statuses == [400, 400, 400]
