"""Busy, going down, or out of time: what the server says, and that the official client's own two retries work out."""

import asyncio
import json
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
from chairlift.api.openai.completions import CompletionRequest
from chairlift.api.openai.replies import CompletionReply
from chairlift.engine.text.deltas import CompletionDelta, RequestDelta
from chairlift.errors import QueueFull, QueueTimeout
from chairlift.params import FinishReason, Logprob
from chairlift.prompt_work import PromptScores
from tests.api.conftest import Server
from tests.api.contract import CHAT, COMPLETIONS, Events, chunks_of, client_of, parts_of, post, user
from tests.api.fault_support import Clock, Gate, clock_of, held, serving, until_idle
from tests.api.fault_support import post as begin
from tests.engine.async_support import wait_until
from tests.support.engines import core_of

STORY = "Once upon a time"
BODY: dict[str, Any] = {"model": "bundled", "prompt": STORY, "max_tokens": 4, "temperature": 0}


QUEUE_SIZE = 2
FULL_TEXT = "the waiting queue is full (2 requests); try again later"
FULL = {"message": FULL_TEXT, "type": "rate_limit_error", "param": None, "code": "queue_full"}
GOING_DOWN_TEXT = "the server is shutting down; try again later, or another server"
GOING_DOWN = {"message": GOING_DOWN_TEXT, "type": "server_error", "param": None, "code": "unavailable"}


@pytest.mark.parametrize(
    ("seconds", "header"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.01, "2"), (7.0, "7"), (59.5, "60")]
)
def test_estimates_are_rounded_up_to_whole_seconds(seconds: float, header: str) -> None:
    full = error_reply(QueueFull("full", retry_after=seconds)).response()
    late = error_reply(QueueTimeout("waited 5 s for a slot", retry_after=seconds)).response()
    assert (full.status, full.headers["Retry-After"]) == (429, header)
    assert (late.status, late.headers["Retry-After"]) == (503, header)


@asynccontextmanager
async def client_as_it_comes(server: Server) -> AsyncIterator[tuple[AsyncOpenAI, list[int]]]:
    """The official client with its two retries, and the status of every answer to it."""
    statuses: list[int] = []

    async def note(response: Any) -> None:
        statuses.append(response.status_code)

    http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [note]})
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http) as client:
        yield client, statuses


@asynccontextmanager
async def busy(num_waiting: int, has_stood_for_s: float = 0.0) -> AsyncIterator[tuple[Server, Gate]]:
    """One slot, taken since that time, and so many in the queue of two. Each permit of the gate is a step."""
    async with serving(max_batch_size=1, max_queue_size=QUEUE_SIZE) as server:
        with clock_of(server.llm) as clock, held(core_of(server.llm), "step") as gate:
            async with await begin(server, {**BODY, "max_tokens": 100, "n": 1 + num_waiting, "ignore_eos": True}):
                await gate.entered()
                gate.allow()
                await gate.entered()
                assert server.num_free_slots == 0
                clock.advance(has_stood_for_s)
                yield server, gate
                gate.open()


async def refuse(server: Server, gate: Gate) -> None:
    await wait_until(lambda: server.llm.num_unfinished > 1, "it has come in")
    gate.allow(2)  # the step that runs, and the one after which the engine reports what it found before


@pytest.mark.parametrize(
    ("num_waiting", "has_stood_for_s", "fields", "seconds"),
    [
        (2, 0.0, {"stream": False}, "1"),
        (2, 7.5, {"stream": True}, "8"),  # the slower it is, the later
        (1, 0.0, {"n": 2}, "1"),
        (1, 0.0, {"prompt": ["one", "two"]}, "1"),
        (1, 0.0, {"prompt": ["one"], "n": 2, "stream": True}, "1"),
    ],
)
async def test_a_queue_takes_all_choices_and_prompts_or_says_when_to_come_back(
    num_waiting: int, has_stood_for_s: float, fields: dict[str, Any], seconds: str
) -> None:
    async with busy(num_waiting, has_stood_for_s) as (server, gate), aiohttp.ClientSession(server.url) as http:
        asking = asyncio.create_task(http.post(COMPLETIONS, json={**BODY, **fields}))
        await refuse(server, gate)
        async with await asking as response:
            assert (response.status, response.headers["Retry-After"]) == (429, seconds)
            assert response.headers["Content-Type"] == "application/json; charset=utf-8"
            assert await response.json() == {"error": FULL}
        assert core_of(server.llm).scheduler.num_waiting == num_waiting
        if num_waiting < QUEUE_SIZE:
            gate.open()
            await post(server, COMPLETIONS, BODY)  # there is one place


async def test_the_clients_retry_is_answered_once_the_server_is_free_again() -> None:
    async with busy(num_waiting=QUEUE_SIZE) as (server, gate), client_as_it_comes(server) as (client, statuses):
        asking = asyncio.create_task(client.completions.create(**BODY))
        await refuse(server, gate)
        await wait_until(lambda: statuses == [429], "an answer")
        gate.open()
        assert (await asking).choices[0].finish_reason == "length"
        assert statuses == [429, 200]
        await until_idle(server, num_slots=1)


async def test_a_server_that_goes_down_says_so_and_its_successor_answers_who_asks_again(server: Server) -> None:
    async with aiohttp.ClientSession(server.url) as http, client_as_it_comes(server) as (client, statuses):
        server.api.drain()
        async with http.post(COMPLETIONS, json=BODY) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
            assert await response.json() == {"error": GOING_DOWN}
        async with http.get("/health") as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
        asking = asyncio.create_task(client.completions.create(**BODY))
        await wait_until(lambda: statuses == [503], "an answer")
        server.api.is_draining = False  # as if another one had taken its place
        assert (await asking).choices[0].finish_reason == "length"
        assert statuses == [503, 200]
        server.api.is_draining = True  # so that nobody is lent it again


@pytest.mark.parametrize("fields", [{"max_tokens": 10_000}, {"n": 7}, {"prompt": ["a"] * 7}])
async def test_what_never_fits_is_told_for_good_and_not_to_try_again_later(
    server: Server, fields: dict[str, Any]
) -> None:
    await post(server, COMPLETIONS, {**BODY, **fields}, status=400)


RESPONSES = "/v1/responses"
LONG: dict[str, Any] = {"prompt": STORY, "max_tokens": 50, "temperature": 0, "ignore_eos": True}
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": user(STORY), "max_tokens": 50, "ignore_eos": True},
    COMPLETIONS: LONG,
    RESPONSES: {"input": STORY, "max_output_tokens": 50},
}
NUM_TOKENS = 4  # before the time is up


@dataclass(frozen=True)
class Held:
    """A server of one slot whose steps and whose clock are in the test's hands."""

    server: Server
    gate: Gate
    clock: Clock

    async def occupied(self) -> "asyncio.Task[dict[str, Any]]":
        """Somebody has the slot."""
        running = asyncio.create_task(post(self.server, COMPLETIONS, LONG))
        await self.gate.entered()
        self.gate.allow()
        await self.gate.entered()
        return running

    async def let_wait_too_long(self) -> None:
        """A step is let go, before the next one the engine looks into its inbox, and then time ends."""
        await wait_until(lambda: self.server.llm.num_unfinished == 2, "it has come in")
        self.gate.allow()
        await wait_until(lambda: core_of(self.server.llm).scheduler.num_waiting == 1, "it waits")
        self.end_time()

    async def let_run_out_of_time(self, asking: Any) -> Any:
        """Returns what comes of a request if its time is up after some tokens."""
        task = asyncio.ensure_future(asking)
        for _ in range(NUM_TOKENS):
            await self.gate.entered()
            self.gate.allow()
        await self.gate.entered()
        self.end_time()
        return await task

    def end_time(self) -> None:
        """More of it passes than anybody has, and steps are taken again."""
        self.clock.advance(60.0)
        self.gate.open()


@asynccontextmanager
async def holding(options: ServerConfig = ServerConfig(), **engine: Any) -> AsyncIterator[Held]:  # noqa: B008 - frozen
    async with serving(options, max_batch_size=1, max_steps_per_launch=1, **engine) as server:
        with clock_of(server.llm) as clock, held(core_of(server.llm), "step") as gate:
            yield Held(server, gate, clock)
        await until_idle(server, num_slots=1)


@pytest.mark.parametrize(
    ("path", "fields", "engine"),
    [
        *((path, {"timeout": 5, "stream": stream}, {}) for path in ASKED for stream in (False, True)),
        (COMPLETIONS, {}, {"queue_timeout": 5.0}),  # the server's own limit, for those that name none
    ],
)
async def test_who_waited_too_long_is_told_when_to_come_back(
    path: str, fields: dict[str, Any], engine: dict[str, Any]
) -> None:
    async with holding(**engine) as held_back, aiohttp.ClientSession(held_back.server.url) as http:
        running = await held_back.occupied()
        late = asyncio.create_task(http.post(path, json={**ASKED[path], **fields}))
        await held_back.let_wait_too_long()
        async with await late as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            error = (await response.json())["error"]
        assert (await running)["choices"][0]["finish_reason"] == "length"  # who has a slot has no such limit
    assert "no slot was free within 60.0 s" in error.pop("message")
    assert error == {"type": "server_error", "param": None, "code": "queue_timeout"}


async def test_a_prompt_that_waited_too_long_ends_the_others_of_its_request() -> None:
    body = {**LONG, "prompt": [STORY, "never"], "timeout": 5}
    async with holding() as engine:
        reply = await engine.let_run_out_of_time(post(engine.server, COMPLETIONS, body, status=503))
    assert reply["error"]["code"] == "queue_timeout"


async def test_a_stream_that_has_begun_with_comments_gets_an_event() -> None:
    async with holding() as engine, client_of(engine.server) as client:
        engine.server.api.pulse.interval_s = 0.02
        running = await engine.occupied()
        asked: Any = {"model": "bundled", "prompt": STORY, "stream": True, "extra_body": {"timeout": 5}}
        late: Any = await client.completions.create(**asked)  # which returns with the first comment
        await engine.let_wait_too_long()
        with pytest.raises(openai.APIError) as caught:
            await anext(aiter(late))
        await running
    assert (caught.value.code, caught.value.type) == ("queue_timeout", "server_error")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_what_there_is_when_time_is_up_is_the_answer(path: str, stream: bool) -> None:
    body = {**ASKED[path], "temperature": 0, "timeout": 5}
    async with holding() as engine:
        reply = await engine.let_run_out_of_time((chunks_of if stream else post)(engine.server, path, body))
        whole = await post(engine.server, path, {**body, "timeout": None})
    choices = [choice for part in (reply if stream else [reply]) for choice in part["choices"]]
    ended, free = parts_of(choices)[0], parts_of(whole["choices"])[0]  # in which nothing follows a finish reason
    assert ended.pop("end") == ("abort", "timeout")
    assert ended == {name: text[:NUM_TOKENS] for name, text in free.items() if name != "end"}
    assert stream or reply["usage"]["completion_tokens"] == NUM_TOKENS


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
        response = await engine.let_run_out_of_time(ask(engine.server))
    assert (response["status"], response["incomplete_details"], response["error"]) == ("incomplete", {}, None)
    assert response["output"][0]["status"] == "incomplete"
    assert response["usage"]["output_tokens"] == NUM_TOKENS


async def test_what_a_choice_says_before_the_prompt_is_scored_is_told_after_it(server: Server) -> None:
    body = CompletionRequest.model_validate({"prompt": "ab", "echo": True, "logprobs": 0, "n": 2, "stream": True})
    reply, score = CompletionReply(body, "bundled", server.llm.inputs), {ord("b"): Logprob(-1.5, 1)}

    def delta(text: str, *scores: Any) -> RequestDelta:
        said = [{ord(each): Logprob(-1.0, 1)} for each in text]
        offsets = [*range(text == "d", 1 + (text == "d"))] if text else []
        choices = [CompletionDelta(0, text, [*text.encode()], said, offsets, 1), CompletionDelta(1, "", [], [], [], 0)]
        return RequestDelta("r", "ab", [*b"ab"], choices, PromptScores(scores) if scores else None)

    assert [reply.news(0, each) for each in (delta("c", None), delta("d"))] == [[], []]
    first, second = (
        json.loads(event.removeprefix("data: "))["choices"][0] for event in reply.news(0, delta("", score))
    )
    assert (first["text"], first["logprobs"]["tokens"]) == ("abcd", ["a", "b", "c", "d"])
    assert (second["text"], second["logprobs"]["tokens"]) == ("ab", ["a", "b"])


async def test_a_prompt_that_was_not_scored_to_its_end_is_there_as_far_as_it_was(server: Server) -> None:
    body = CompletionRequest.model_validate({"prompt": "abc", "echo": True, "logprobs": 0})
    reply = CompletionReply(body, "bundled", server.llm.inputs)
    running = CompletionDelta(0, "", [], [], [], 0)
    ended = CompletionDelta(0, "", [], [], [], 0, FinishReason.ABORT, "timeout")
    scores = PromptScores([None, {ord("b"): Logprob(-1.5, 1)}])
    assert reply.news(0, RequestDelta("r", "abc", [*b"abc"], [running], scores)) == []
    whole = CompletionReply(body, "bundled", server.llm.inputs)
    (choice,) = whole.whole([RequestDelta("r", "abc", [*b"abc"], [ended], scores)]).choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("abc", "abort", "timeout")
    assert choice.logprobs
    assert (choice.logprobs.tokens, choice.logprobs.token_logprobs) == (["a", "b"], [None, -1.5])
