"""Requests whose time is up, while they wait and while they run, whole and streamed, on every endpoint.

Steps are taken when the test says so, and the scheduler's clock goes on when it says so.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import pytest

from chairlift.api import ServerConfig
from chairlift.api.replies.choices import CompletionReply
from chairlift.api.wire.completions import CompletionRequest
from chairlift.params import CompletionOutput, FinishReason, Logprob, RequestOutput
from tests.api.conftest import Server
from tests.api.contract import CHAT, COMPLETIONS, chunks_of, client_of, post, user
from tests.api.fault_support import Clock, Gate, clock_of, held, serving, until_idle
from tests.api.response_events import Events
from tests.engine.async_support import wait_until

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
