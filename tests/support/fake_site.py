"""The page's site without an engine: answers are given by a test."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web

from chairlift.api.errors import error_middleware
from chairlift.api.pages import SnapshotFeed, add_page_routes
from tests.support.fake_batch import FakeBatch

T = TypeVar("T")


@dataclass
class FakeSite:
    """Lives in a thread of its own while it is `online`."""

    batch: FakeBatch
    pieces: list[str] = field(default_factory=lambda: ["Hello", " there."])
    thoughts: list[str] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)  # pieces of tool calls
    finish: str = "stop"
    requests: list[Any] = field(default_factory=list)
    is_held: bool = False  # answers do not end
    error: Exception | None = None  # the next request gets it instead of an answer
    path: str = "/"  # where a proxy shows the site
    was_left: threading.Event = field(default_factory=threading.Event)
    port: int = 0
    _loop: asyncio.AbstractEventLoop = field(init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.path}"

    def do(self, call: Callable[[], T]) -> T:
        """On the thread that the batch is looked at from."""

        async def run() -> T:
            return call()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    @contextmanager
    def online(self) -> Iterator[None]:
        """Served on the same port each time."""
        started, over = threading.Event(), asyncio.Event()

        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            runner = web.AppRunner(self._app(), handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True).start()
            self.port = runner.addresses[0][1]
            started.set()
            await over.wait()
            await runner.cleanup()

        thread = threading.Thread(target=asyncio.run, args=[serve()])
        thread.start()
        assert started.wait(10.0), "the site did not start"
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(over.set)
            thread.join()

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[error_middleware])
        add_page_routes(app, SnapshotFeed(self.batch, interval_s=0.02))
        app.router.add_get("/v1/models", _models)
        app.router.add_post("/v1/chat/completions", self._chat)
        if self.path == "/":
            return app
        proxy = web.Application()
        proxy.add_subapp(self.path, app)
        return proxy

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        thoughts = ({"reasoning_content": thought} for thought in self.thoughts)
        pieces = ({"content": piece} for piece in self.pieces)
        for delta in (*thoughts, *pieces, *({"tool_calls": [call]} for call in self.calls)):
            await response.write(_chunk([{"index": 0, "delta": delta, "finish_reason": None}]))
        try:
            if self.is_held:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_left.set()
            raise
        usage = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
        await response.write(_chunk([{"index": 0, "delta": {}, "finish_reason": self.finish}]))
        await response.write(_chunk([], usage=usage) + b"data: [DONE]\n\n")
        return response


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "fake-model"}]})


def _chunk(choices: list[Any], **others: Any) -> bytes:
    return f"data: {json.dumps({'id': '123456789-0', 'choices': choices, **others})}\n\n".encode()
