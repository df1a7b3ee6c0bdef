"""The application: its middlewares and endpoints, and the handlers of those that generate nothing."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeVar

from aiohttp import web
from pydantic import BaseModel

import chairlift
from chairlift.api import ServerConfig
from chairlift.api.errors import ENDPOINTS, Handler, error_middleware
from chairlift.api.http.access import Client, Cors, KeyLimits, KeyRing, gather_keys
from chairlift.api.http.bodies import BodyReader, CallThreads
from chairlift.api.http.connections import meet_expectation
from chairlift.api.http.unread import UNREAD, UnreadReplies
from chairlift.api.http.warning import warning_header
from chairlift.api.jobs import Job, JobMaker, Store, answer
from chairlift.api.pages import PAGE_PATHS, WATCH_PATH, SnapshotFeed, add_page_routes, docs_page, openapi_reply
from chairlift.api.replies.responses import NOT_STORED, ResponseStore, StoredResponse
from chairlift.api.routes import (
    ROUTES,
    DetokenizeReply,
    DetokenizeRequest,
    Health,
    ModelCard,
    ModelList,
    TokenizeReply,
    TokenizeRequest,
    TokenizerInfo,
    Version,
)
from chairlift.api.telemetry import OBSERVATION, Observer
from chairlift.api.telemetry.log import log_request
from chairlift.api.telemetry.metrics import SCRAPE_INTERVAL_S, Counts, Metrics
from chairlift.api.telemetry.pace import Paced
from chairlift.api.telemetry.traces import Tracing
from chairlift.api.wire.anthropic import CountTokensRequest
from chairlift.api.wire.response_object import DeletedResponse
from chairlift.engine.async_llm import AsyncLLM, OffLoop
from chairlift.engine.journal import EngineStats
from chairlift.errors import EngineClosed, ModelNotFound

_Body = TypeVar("_Body", bound=BaseModel)
_Made = TypeVar("_Made")

_OPEN_PATHS = PAGE_PATHS | {route.path for route in ROUTES if route.is_open}
_TOLD_PATHS = {route.path for route in ROUTES} | {"/", WATCH_PATH}  # named in metrics and the log
_STORED = web.ResponseKey("chairlift_stored", StoredResponse)
_READERS = "readers of the reference"  # all of them count as one client of the threads


@dataclass(frozen=True, slots=True)
class SharedState:
    """State that all servers of one engine share; there are several if it has API workers."""

    keys: Mapping[str, KeyLimits]
    store: Store
    read_books: Callable[[Counts], Awaitable[tuple[EngineStats, Counts]]]  # this server's counts -> those of all
    engine_pid: int

    @classmethod
    def alone(cls, llm: AsyncLLM, config: ServerConfig) -> Self:
        """For a server without API workers. `ConfigurationError` if keys are wrong."""

        async def read_books(counts: Counts) -> tuple[EngineStats, Counts]:
            return llm.read_stats(), counts

        return cls(gather_keys(config), ResponseStore(), read_books, os.getpid())


class Api:
    """The handlers. One model, one engine."""

    def __init__(
        self,
        llm: AsyncLLM,
        config: ServerConfig = ServerConfig(),  # noqa: B008 - frozen
        shared: SharedState | None = None,
    ) -> None:
        """`shared` None: it is the only server. `ConfigurationError` if keys or origins are wrong."""
        self._llm = llm
        root, max_len, created = llm.config.model, llm.config.max_seq_len, int(time.time())
        names = dict.fromkeys(config.served_model_name or [root])
        self._cards = {name: ModelCard(id=name, created=created, root=root, max_model_len=max_len) for name in names}
        self._model_name = next(iter(names))
        self._shared = shared or SharedState.alone(llm, config)
        self.keys = KeyRing(self._shared.keys, config.share_prefixes, _OPEN_PATHS)
        self.cors = Cors(config.allowed_origin, config.allowed_host)
        self._bodies = BodyReader(config.max_body_bytes, config.client_timeout)
        self._unread = UnreadReplies(config.max_unread_bytes, lambda request: self.keys.client_of(request).name)
        self._job_maker = JobMaker(llm, self._model_name, self._shared.store, config)
        # Slow calls must not delay quick ones, and work for a reply that exists is never refused.
        self._quick_threads = CallThreads(4, max_per_client=4096, max_waiting=16384)
        self._slow_threads = CallThreads(2, max_per_client=256, max_waiting=1024)
        self._reply_threads = CallThreads(1)
        self._all_threads = self._quick_threads, self._slow_threads, self._reply_threads
        self.counts = Counts()
        self._has_vllm_metrics = config.vllm_metrics
        self.take_metrics = Paced(self._take_metrics, SCRAPE_INTERVAL_S)
        self._turn = asyncio.Lock()  # one at a time of the replies that block the event loop for milliseconds
        self.is_leaving = self.is_draining = False  # /health says so; requests are refused
        self.num_active = 0  # requests between their headers and the last byte of their replies

    def make_app(self) -> web.Application:
        """The application, for a runner with `handler_cancellation=True`, which notices clients that leave."""
        middlewares = [error_middleware, self._unread.middleware, self.keys.middleware, self._count_active]
        app = web.Application(middlewares=middlewares)
        app[UNREAD] = self._unread
        app[ENDPOINTS] = ", ".join(f"{route.method} {route.path}" for route in ROUTES)
        app.on_response_prepare.append(self._bodies.release)
        app.cleanup_ctx.append(self._close_threads)
        for route in ROUTES:
            if route.body is not None and route.chunk is not None:
                handler: Handler = partial(self._generate, body_type=route.body)
            else:
                handler = getattr(self, route.name)
            methods = ("GET", "HEAD") if route.method == "GET" else (route.method,)
            for method in methods:
                # A model's name may hold slashes, as hub ids do.
                path = route.path.replace("{model}", "{model:.+}")
                app.router.add_route(method, path, handler, expect_handler=meet_expectation)
        add_page_routes(app, SnapshotFeed(self._llm))
        tracing = Tracing(self._model_name)
        note_end = [self.counts.note_request, log_request]
        Observer(_TOLD_PATHS, tracing.span, self.counts.note_response, note_end).install(app)
        self.cors.install(app)
        return app

    def drain(self) -> None:
        """Accepts no more requests, and drops those whose bodies are incomplete."""
        self.is_leaving = self.is_draining = True
        self._bodies.close()

    async def tokenize(self, request: web.Request) -> web.Response:
        return await self._answer_at_once(request, TokenizeRequest, partial(TokenizeReply.of, self._llm.inputs))

    async def detokenize(self, request: web.Request) -> web.Response:
        return await self._answer_at_once(
            request, DetokenizeRequest, lambda body: DetokenizeReply(prompt=self._llm.inputs.decode(body.tokens))
        )

    async def count_tokens(self, request: web.Request) -> web.Response:
        return await self._answer_at_once(request, CountTokensRequest, self._job_maker.count_tokens)

    async def tokenizer_info(self, _: web.Request) -> web.Response:
        return _json(TokenizerInfo.of(self._llm.inputs))

    async def reset_prefix_cache(self, _: web.Request) -> web.Response:
        if len(self.keys) > 1:  # no single key may slow down all others
            raise web.HTTPForbidden(text="several API keys share this server, so none of them may empty the cache")
        await self._llm.reset_prefix_cache()
        return _json(Health())

    async def stored_response(self, request: web.Request) -> web.Response:
        owner = self.keys.client_of(request).owner
        stored = await asyncio.to_thread(self._shared.store.find, owner, request.match_info["id"])
        if stored is None:
            raise web.HTTPNotFound(text=NOT_STORED)
        response = web.Response(body=stored.reply, content_type="application/json")
        response[_STORED] = stored  # so that others who ask for it meanwhile share it
        return response

    async def delete_response(self, request: web.Request) -> web.Response:
        response_id = request.match_info["id"]
        owner = self.keys.client_of(request).owner
        if not await asyncio.to_thread(self._shared.store.delete, owner, response_id):
            raise web.HTTPNotFound(text=NOT_STORED)
        return _json(DeletedResponse(id=response_id))

    async def models(self, _: web.Request) -> web.Response:
        return _json(ModelList(data=list(self._cards.values())))

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        self._check_model(name)
        return _json(self._cards[name])

    async def health(self, _: web.Request | None = None) -> web.Response:
        """200 while the engine's thread answers and new requests are served, else 503."""
        if self._llm.death is not None:
            raise EngineClosed(f"the engine died: {self._llm.death}")
        if self.is_leaving:
            raise EngineClosed("the server is shutting down")
        if not self._llm.is_healthy:
            raise EngineClosed("the engine does not respond")
        if any(workers.is_stuck for workers in self._all_threads):
            raise EngineClosed("checking a request takes too long; restart the server if this lasts")
        return _json(Health())

    async def metrics_text(self, request: web.Request) -> web.Response:
        metrics = await self.take_metrics()
        async with self._turn:
            body, content_type = metrics.render(request.headers.get("Accept", ""), self._shared.engine_pid)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _take_metrics(self) -> Metrics:
        stats, counts = await self._shared.read_books(self.counts)
        return Metrics(self._llm, self._model_name, stats, counts, self._has_vllm_metrics)

    async def version(self, _: web.Request) -> web.Response:
        return _json(Version(version=chairlift.__version__))

    async def openapi(self, _: web.Request) -> web.Response:
        async with self._turn:
            return await self._quick_threads.for_client(_READERS)(openapi_reply)

    async def docs(self, _: web.Request) -> web.Response:
        async with self._turn:
            return await self._quick_threads.for_client(_READERS)(docs_page)

    async def _generate(self, request: web.Request, body_type: type[BaseModel]) -> web.StreamResponse:
        """Split in two, so that neither the body nor what was parsed from it stays in memory while the request runs."""
        return await answer(self._llm, await self._make_job(request, body_type), request)

    async def _make_job(self, request: web.Request, body_type: type[BaseModel]) -> Job:
        client = self.keys.client_of(request)
        job, off_loop = await self._read(request, client, body_type, lambda body: self._job_maker.read(body, client))
        generations = await self._job_maker.prepare(job, off_loop)
        observation = request[OBSERVATION]
        observation.note_job(job.reply.id, generations, is_streamed=job.is_streamed, warnings=job.warnings)
        off_loop, headers = self._reply_threads.for_client(client.name), warning_header(job.warnings)
        return Job(generations, job.reply, observation, off_loop, self._shared.store.settled, headers)

    async def _answer_at_once(
        self, request: web.Request, body_type: type[_Body], make_reply: Callable[[_Body], BaseModel]
    ) -> web.Response:
        """Answers without the engine."""
        client = self.keys.client_of(request)
        text, _ = await self._read(request, client, body_type, lambda body: make_reply(body).model_dump_json())
        return web.Response(text=text, content_type="application/json")

    async def _read(
        self, request: web.Request, client: Client, body_type: type[_Body], make: Callable[[_Body], _Made]
    ) -> tuple[_Made, OffLoop]:
        """Parses the body and calls `make`, in a worker's thread. Returns the result, and where to run more."""
        raw = await self._bodies.read(request, client.name)
        off_loop = (self._slow_threads if raw.is_large else self._quick_threads).for_client(client.name)

        def parse() -> _Made:
            body = raw.parse(body_type)
            self._check_model(getattr(body, "model", None))
            return make(body)

        return await off_loop(parse), off_loop

    def _check_model(self, name: str | None) -> None:
        """`ModelNotFound` for another model's name. None stands for the served model."""
        if name is not None and name not in self._cards:
            known = " or ".join(map(repr, self._cards))
            raise ModelNotFound(f"there is no model {name!r} here, only {known}", "model")

    @web.middleware
    async def _count_active(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Counts POST requests, and refuses them when the engine is dead or the server shuts down."""
        if request.method != "POST":
            return await handler(request)
        if self._llm.death is not None:
            raise EngineClosed(f"the engine died: {self._llm.death}")
        if self.is_draining:
            raise EngineClosed("the server is shutting down; try again later, or another server")
        self.num_active += 1
        try:
            return await handler(request)
        finally:
            self.num_active -= 1
            await self._bodies.release(request)

    async def _close_threads(self, _: web.Application) -> AsyncIterator[None]:
        yield
        for workers in self._all_threads:
            workers.close()


def _json(reply: BaseModel) -> web.Response:
    return web.Response(text=reply.model_dump_json(), content_type="application/json")
