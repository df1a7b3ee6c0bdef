"""Busy, going down, or out of time: what the server says, and that the official client's own two retries work out."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from chairlift.api import ServerConfig
from chairlift.api.errors import error_reply
from chairlift.api.replies.choices import CompletionReply
from chairlift.api.wire.completions import CompletionRequest
from chairlift.errors import QueueFull, QueueTimeout
from chairlift.params import CompletionOutput, FinishReason, Logprob, RequestOutput
from tests.api.conftest import Server
from tests.api.contract import CHAT, COMPLETIONS, chunks_of, client_of, post, user
from tests.api.fault_support import Clock, Gate, clock_of, held, serving, until_idle
from tests.api.fault_support import post as begin
from tests.api.response_events import Events
from tests.engine.async_support import wait_until

# --- busy, or going down


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
            async with await begin(server, {**BODY, "max_tokens": 100, "n": 1 + num_waiting, "ignore_eos": True}):
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


@pytest.mark.parametrize(("stream", "has_stood_for_s", "seconds"), [(False, 0.0, "1"), (True, 7.5, "8")])
async def test_a_full_queue_says_when_to_come_back_which_is_later_the_slower_it_is(
    stream: bool, has_stood_for_s: float, seconds: str
) -> None:
    async with busy(QUEUE_SIZE, has_stood_for_s) as (server, gate):
        status, headers, reply = await ask_while_busy(server, gate, {**BODY, "stream": stream})
        assert (status, headers["Retry-After"], reply) == (429, seconds, {"error": FULL})
        assert headers["Content-Type"] == "application/json; charset=utf-8"


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


# --- deadlines: steps are taken, and the scheduler's clock goes on, when a test says so


RESPONSES = "/v1/responses"
STORY = "Once upon a time"
LONG: dict[str, Any] = {"prompt": STORY, "max_tokens": 50, "temperature": 0, "ignore_eos": True}

ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": user(STORY), "max_tokens": 50, "ignore_eos": True},
    COMPLETIONS: LONG,
    RESPONSES: {"input": STORY, "max_output_tokens": 50},
}

TOO_LATE = {"type": "server_error", "param": None, "code": "queue_timeout"}
NUM_TOKENS = 4  # before the time is up


@dataclass(frozen=True)
class Held:
    """A server of one slot whose steps and whose clock are in the test's hands."""

    server: Server
    gate: Gate
    clock: Clock

    @property
    def num_waiting(self) -> int:
        return self.server.llm._core._scheduler.num_waiting

    async def occupied(self) -> "asyncio.Task[dict[str, Any]]":
        """Somebody has the slot."""
        running = asyncio.create_task(post(self.server, COMPLETIONS, LONG))
        await self.gate.entered()
        self.gate.allow()
        await self.gate.entered()
        return running

    async def until_waiting(self) -> None:
        """A step is let go, and before the next one the engine looks into its inbox."""
        await wait_until(lambda: self.server.llm.num_unfinished == 2, "it has come in")
        self.gate.allow()
        await wait_until(lambda: self.num_waiting == 1, "it waits")

    def end_time(self) -> None:
        """More of it passes than anybody has, and steps are taken again."""
        self.clock.now += 60.0
        self.gate.open()


@asynccontextmanager
async def holding(options: ServerConfig = ServerConfig(), **engine: Any) -> AsyncIterator[Held]:  # noqa: B008 - frozen
    async with serving(options, max_batch_size=1, max_steps_per_launch=1, **engine) as server:
        with clock_of(server.llm) as clock, held(server.llm._core, "step") as gate:
            yield Held(server, gate, clock)
        await until_idle(server, num_slots=1)


async def run_out_of_time(engine: Held, asking: "asyncio.Task[Any]") -> Any:
    """What comes of a request if its time is up after some tokens."""
    for _ in range(NUM_TOKENS):
        await engine.gate.entered()
        engine.gate.allow()
    await engine.gate.entered()
    engine.end_time()
    return await asking


# --- in the queue


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
async def test_who_waited_too_long_is_told_when_to_come_back(path: str, stream: bool) -> None:
    async with holding() as engine, aiohttp.ClientSession() as http:
        running = await engine.occupied()
        body = {**ASKED[path], "timeout": 5, "stream": stream}
        late = asyncio.create_task(http.post(engine.server.url + path, json=body))
        await engine.until_waiting()
        engine.end_time()
        async with await late as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            error = (await response.json())["error"]
        assert (await running)["choices"][0]["finish_reason"] == "length"
    assert "no slot was free within 60.0 s" in error.pop("message")
    assert error == TOO_LATE


async def test_a_prompt_that_waited_too_long_ends_the_others_of_its_request() -> None:
    body = {**LONG, "prompt": [STORY, "never"], "timeout": 5}
    async with holding() as engine:
        reply = await run_out_of_time(engine, asyncio.create_task(post(engine.server, COMPLETIONS, body, status=503)))
    assert reply["error"]["code"] == "queue_timeout"


async def test_the_servers_own_limit_holds_for_those_that_name_none() -> None:
    async with holding(queue_timeout=5.0) as engine, client_of(engine.server) as client:
        running = await engine.occupied()
        late = asyncio.create_task(client.completions.create(model="bundled", prompt=STORY))
        await engine.until_waiting()
        engine.end_time()
        with pytest.raises(openai.InternalServerError) as caught:
            await late
        assert (await running)["choices"][0]["finish_reason"] == "length"  # it has a slot: that limit is not its own
    assert (caught.value.status_code, caught.value.code) == (503, "queue_timeout")


async def test_a_stream_that_has_begun_with_comments_gets_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.api.replies.KEEP_ALIVE_S", 0.02)
    async with holding() as engine, client_of(engine.server) as client:
        running = await engine.occupied()
        late = await client.completions.create(
            model="bundled", prompt=STORY, stream=True, extra_body={"timeout": 5}
        )  # which returns with the first comment
        await engine.until_waiting()
        engine.end_time()
        with pytest.raises(openai.APIError) as caught:
            await anext(aiter(late))
        await running
    assert (caught.value.code, caught.value.type) == ("queue_timeout", "server_error")


# --- while it runs


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_what_there_is_when_time_is_up_is_the_answer(path: str) -> None:
    body = {**ASKED[path], "temperature": 0, "timeout": 5}
    async with holding() as engine:
        reply = await run_out_of_time(engine, asyncio.create_task(post(engine.server, path, body)))
        (choice,) = reply["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "timeout")
        assert reply["usage"]["completion_tokens"] == NUM_TOKENS
        whole = await post(engine.server, path, {**body, "timeout": None})
    text, all_of_it = (
        each["choices"][0].get("text") or each["choices"][0]["message"]["content"] for each in (reply, whole)
    )
    assert (len(text), text) == (NUM_TOKENS, all_of_it[:NUM_TOKENS])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_whose_time_is_up_ends_properly(path: str) -> None:
    body = {**ASKED[path], "temperature": 0, "timeout": 5}
    async with holding() as engine:
        chunks = await run_out_of_time(engine, asyncio.create_task(chunks_of(engine.server, path, body)))
    last = chunks[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("abort", "timeout")
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_whose_time_is_up_is_incomplete_without_a_reason(stream: bool) -> None:
    async def ask(server: Server) -> dict[str, Any]:
        body = {**ASKED[RESPONSES], "timeout": 5, "stream": stream}
        async with aiohttp.ClientSession() as http, http.post(server.url + RESPONSES, json=body) as response:
            assert response.status == 200
            if not stream:
                return dict(await response.json())
            events = Events.of(await response.text())
            assert events.types[-1] == "response.incomplete"
            return events.last_response

    async with holding() as engine:
        response = await run_out_of_time(engine, asyncio.create_task(ask(engine.server)))
    assert (response["status"], response["incomplete_details"], response["error"]) == ("incomplete", {}, None)
    assert response["output"][0]["status"] == "incomplete"
    assert response["usage"]["output_tokens"] == NUM_TOKENS


async def test_a_prompt_that_was_not_scored_to_its_end_is_there_as_far_as_it_was(server: Server) -> None:
    body = CompletionRequest.model_validate({"prompt": "abc", "echo": True, "logprobs": 0})
    reply = CompletionReply(body, "bundled", server.llm.inputs)
    running = CompletionOutput(0, logprobs=[], text_offsets=[])
    ended = CompletionOutput(0, "", [], FinishReason.ABORT, "timeout", logprobs=[], text_offsets=[])
    scores = [None, {ord("b"): Logprob(-1.5, 1)}]
    assert reply.news(0, RequestOutput("r", "abc", [*b"abc"], [running], prompt_logprobs=scores)) == []
    whole = reply.whole([RequestOutput("r", "abc", [*b"abc"], [ended], prompt_logprobs=scores)])
    (choice,) = whole.model_dump()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "abort", "timeout")
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5]
