"""An OpenAI-style server without a model, and records and results to compute with where no server is needed.

Each test says what the server answers, and reads what it was asked. An answer gets the request and its decoded body.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import cycle
from typing import Any

import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from chairlift.loadtest import BenchConfig
from chairlift.loadtest.client import open_session
from chairlift.loadtest.records import RequestFailure, RequestRecord
from chairlift.loadtest.runner import Player
from chairlift.loadtest.summary import BenchResult, Sweep
from chairlift.loadtest.workload import build_workload

Body = dict[str, Any]
Answer = Callable[[web.Request, Body], Awaitable[web.StreamResponse]]

DONE = b"data: [DONE]\n\n"
TIMEOUT = RequestFailure("timeout", "no complete reply within 9 s")
BUSY = RequestFailure("HTTP 503", "queue is full")


def event(**chunk: object) -> bytes:
    """One chunk as a server-sent event."""
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def token(text: str = "x", finish_reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish_reason}], usage=None)


def chat_token(finish_reason: str | None = None, **delta: str) -> bytes:
    return event(choices=[{"index": 0, "delta": delta, "finish_reason": finish_reason}])


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens})


def stream(*pieces: bytes, pause: float = 0.0, end: str = "well") -> Answer:
    """An event stream of these pieces, each written on its own, that ends well, is "cut", or does not end ("never")."""

    async def answer(request: web.Request, _body: Body) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for index, piece in enumerate(pieces):
            await asyncio.sleep(pause if index else 0)
            await response.write(piece)
        if end == "never":
            await asyncio.Event().wait()
        if end == "cut":  # in the middle of the HTTP body
            assert request.transport is not None
            request.transport.close()
        return response

    return answer


def in_turn(*answers: Answer) -> Answer:
    """Each request has the next of these answers, over and over."""
    endless = cycle(answers)
    return lambda request, body: next(endless)(request, body)


def after(wait: Callable[[], Awaitable[object]]) -> Answer:
    """Waits, and answers in full."""

    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        await wait()
        return await answer_in_full(request, body)

    return answer


def status(code: int, text: str = "", content_type: str = "text/plain") -> Answer:
    async def answer(_request: web.Request, _body: Body) -> web.StreamResponse:
        return web.Response(status=code, text=text, content_type=content_type)

    return answer


async def answer_in_full(request: web.Request, body: Body) -> web.StreamResponse:
    """As many tokens as were asked for, then usage and [DONE]."""
    is_chat = request.path.endswith("/chat/completions")
    tokens = [chat_token(content="x") if is_chat else token()] * (body["max_tokens"] - 1)
    last = chat_token("length", content="x") if is_chat else token("x", "length")
    told = usage(999 if is_chat else len(body["prompt"]), body["max_tokens"])
    return await stream(*tokens, last + told + DONE)(request, body)


class NullServer:
    """A well-behaved server, until the test gives it another answer; remembers what it was asked."""

    def __init__(self) -> None:
        self.answer: Answer = answer_in_full
        self.models: Answer = status(200, '{"data": [{"id": "null"}]}', "application/json")
        self.bodies: list[Body] = []
        self.authorizations: list[str | None] = []
        self.num_in_flight = self.peak_in_flight = 0
        app = web.Application()
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        self.listener = TestServer(app)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.port}"

    async def _list(self, request: web.Request) -> web.StreamResponse:
        return await self.models(request, {})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.authorizations.append(request.headers.get("Authorization"))
        body = await request.json()
        self.bodies.append(body)
        self.num_in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.num_in_flight)
        try:
            return await self.answer(request, body)
        finally:
            self.num_in_flight -= 1


@pytest_asyncio.fixture
async def server() -> AsyncIterator[NullServer]:
    null_server = NullServer()
    async with null_server.listener:
        yield null_server


async def play_one(url: str, **settings: object) -> list[RequestRecord]:
    """Play one conversation as the settings say, its first turn meant for time 1.5."""
    lengths = {} if "conversations" in settings else {"prompt_tokens": 5}
    config = BenchConfig.model_validate({"url": url, "output_tokens": 4} | lengths | settings).resolved("null")
    records: list[RequestRecord] = []
    async with open_session(config) as session:
        await Player(session, config, build_workload(config).conversations, records.append).play(0, due_at=1.5)
    return records


def record(index: int) -> RequestRecord:
    """A reply of three tokens, a second for the first and half a second for each other."""
    start = 50.0 + index
    times: Any = {"intended_at": start, "sent_at": start, "ended_at": start + 2.0}
    asked: Any = {"asked_prompt_tokens": 12, "asked_output_tokens": 3}
    chunks = [start + 1.0, start + 1.5, start + 2.0]
    return RequestRecord(index, chunk_times=chunks, usage_prompt_tokens=10, usage_output_tokens=3, **times, **asked)


def failed(index: int, failure: RequestFailure) -> RequestRecord:
    """A request that failed after nine seconds."""
    start = 50.0 + index
    return RequestRecord(index=index, intended_at=start, sent_at=start, ended_at=start + 9.0, failure=failure)


def result(
    *records: RequestRecord, duration_s: float = 4.0, lag: float = 0.001, busy_share: float = 0.25, **settings: object
) -> BenchResult:
    """A test that began at time 50."""
    config = BenchConfig.model_validate({"url": "http://host:8000"} | settings)
    return BenchResult(config.resolved("tiny"), records, 50.0, duration_s, (lag, lag), busy_share)


def sweep(*tests: tuple[RequestRecord, ...]) -> Sweep:
    """Tests at the rates 1, 2, 4 and so on, with a limit of 1,000 ms on the first token."""
    rates = {2.0**n: result(*records, request_rate=2.0**n, goodput="ttft:1000") for n, records in enumerate(tests)}
    return Sweep(BenchConfig(sweep="rate=1", goodput="ttft:1000"), "rate", rates)
