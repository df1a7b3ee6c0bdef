"""An OpenAI-style server without a model: each test says what it answers, and reads what it was asked.

An answer gets the request and its decoded body. Below are the well-behaved one and the pieces for others.
"""

import json
from collections.abc import Awaitable, Callable
from itertools import cycle
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from chairlift.loadtest import BenchConfig
from chairlift.loadtest.client import open_session
from chairlift.loadtest.runner import Player
from chairlift.loadtest.summary import RequestRecord
from chairlift.loadtest.workload import build_workload

Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]

MODEL = "null"


def event(**chunk: object) -> bytes:
    """One chunk as a server-sent event."""
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def token(text: str = "x", finish_reason: str | None = None) -> bytes:
    """A completions chunk."""
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish_reason}], usage=None)


def chat_token(finish_reason: str | None = None, **delta: str) -> bytes:
    """A chat chunk."""
    return event(choices=[{"index": 0, "delta": delta, "finish_reason": finish_reason}])


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    """The final usage chunk."""
    return event(choices=[], usage={"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens})


DONE = b"data: [DONE]\n\n"


async def open_stream(request: web.Request) -> web.StreamResponse:
    """An event stream ready to be written to."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


def stream(*pieces: bytes) -> Answer:
    """Answer with these pieces, each written on its own, and end well."""

    async def answer(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        response = await open_stream(request)
        for piece in pieces:
            await response.write(piece)
        return response

    return answer


def cut_stream(*pieces: bytes) -> Answer:
    """Answer with these pieces and hang up in the middle of the HTTP body."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await stream(*pieces)(request, body)
        assert request.transport is not None
        request.transport.close()
        return response

    return answer


def in_turn(*answers: Answer) -> Answer:
    """Each request has the next of these answers, over and over."""
    endless = cycle(answers)

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await next(endless)(request, body)

    return answer


def status(code: int, text: str = "", content_type: str = "text/plain") -> Answer:
    """Answer with a plain HTTP response."""

    async def answer(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=code, text=text, content_type=content_type)

    return answer


async def answer_in_full(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """As many tokens as were asked for, then usage and [DONE]."""
    is_chat = request.path.endswith("/chat/completions")
    response = await open_stream(request)
    for _ in range(body["max_tokens"] - 1):
        await response.write(chat_token(content="x") if is_chat else token())
    last = chat_token("length", content="x") if is_chat else token("x", "length")
    prompt_tokens = 999 if is_chat else len(body["prompt"])
    await response.write(last + usage(prompt_tokens, body["max_tokens"]) + DONE)
    return response


class NullServer:
    """Listens on a free port of 127.0.0.1 between `start` and `stop`, and remembers what it was asked."""

    def __init__(self) -> None:
        self.answer: Answer = answer_in_full
        self.models: Answer = status(200, json.dumps({"data": [{"id": MODEL}]}), "application/json")
        self.bodies: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.num_in_flight = 0
        self.peak_in_flight = 0
        app = web.Application()
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._server = TestServer(app)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.port}"

    async def start(self) -> None:
        await self._server.start_server()

    async def stop(self) -> None:
        await self._server.close()

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
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


async def send_one(url: str, **settings: object) -> RequestRecord:
    """Send one request as the settings say, meant for time 1.5."""
    [record] = await play_one(url, num_requests=1, **settings)
    return record


async def play_one(url: str, **settings: object) -> list[RequestRecord]:
    """Play one conversation as the settings say, its first turn meant for time 1.5."""
    lengths = {} if "conversations" in settings else {"prompt_tokens": 5}
    config = BenchConfig.model_validate({"url": url, "output_tokens": 4} | lengths | settings)
    resolved = config.resolved("null")
    records: list[RequestRecord] = []
    async with open_session(resolved) as session:
        player = Player(session, resolved, build_workload(config).conversations, records.append)
        await player.play(0, due_at=1.5)
    return records
