"""The things that handlers of requests share: the model and its names, clients and their bodies, jobs, and threads for
all that is slow.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Self, TypeVar

from aiohttp import web
from pydantic import BaseModel

from chairlift.api import ServerConfig
from chairlift.api.answering import Answering
from chairlift.api.batches.directory import BatchDirectory
from chairlift.api.http.access import Client, KeyLimits, KeyRing, gather_keys
from chairlift.api.http.bodies import BodyReader
from chairlift.api.http.threads import CallThreads
from chairlift.api.jobs import Job, JobMaker
from chairlift.api.store import ReplyStore, Store
from chairlift.api.telemetry.metrics import SCRAPE_INTERVAL_S, Counts, Metrics
from chairlift.api.telemetry.observation import OBSERVATION
from chairlift.api.telemetry.pace import Paced
from chairlift.api.wire.body import ModelBody
from chairlift.engine.async_llm import AsyncLLM, OffLoop, compile_grammar
from chairlift.engine.journal import EngineStats
from chairlift.errors import EngineClosed, InvalidGrammar, ModelNotFound

_Body = TypeVar("_Body", bound=ModelBody)
_Made = TypeVar("_Made")

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

        return cls(gather_keys(config), ReplyStore(), read_books, os.getpid())


class Service:
    """One model and one engine, for the handlers of all endpoints."""

    def __init__(
        self, llm: AsyncLLM, config: ServerConfig, shared: SharedState, open_paths: Collection[str] = ()
    ) -> None:
        """`open_paths` need no key. `ConfigurationError` if keys are wrong, or the model lacks the configured marks."""
        self.llm = llm
        self.created = int(time.time())
        self.names = list(dict.fromkeys(config.served_model_name or [llm.config.model]))  # the first is in replies
        self.store = shared.store
        self.engine_pid = shared.engine_pid
        self.keys = KeyRing(shared.keys, config.share_prefixes, open_paths)
        self.root_path = config.root_path
        self.client_timeout = config.client_timeout
        self.batches: BatchDirectory | None = None
        if config.batch_dir is not None and config.max_batch_bytes:
            share = config.max_batch_bytes // 2 if len(self.keys) > 1 else None  # no key takes all the room
            self.batches = BatchDirectory(config.batch_dir, config.max_batch_bytes, share)
        self.bodies = BodyReader(config.max_body_bytes, config.client_timeout)
        self.job_maker = JobMaker(llm.inputs, llm.config, self.names[0], shared.store, config)
        # Slow calls must not delay quick ones, and work for a reply that exists is never refused.
        self._quick_threads = CallThreads(4, max_per_client=4096, max_waiting=16384)
        self._slow_threads = CallThreads(2, max_per_client=256, max_waiting=1024)
        self._reply_threads = CallThreads(1)
        self._all_threads = self._quick_threads, self._slow_threads, self._reply_threads
        self.counts = Counts()
        self._read_books = shared.read_books
        self._has_vllm_metrics = config.vllm_metrics
        self.read_metrics = Paced(self._read_metrics, SCRAPE_INTERVAL_S)
        self.is_leaving = False  # /health says so
        self.turn = asyncio.Lock()  # one at a time of the replies that block the event loop for milliseconds

    async def generate(
        self, request: web.Request, body_type: type[_Body], read: Callable[[JobMaker, _Body, Client], Job]
    ) -> web.StreamResponse:
        """Answers a request by the engine. `read` makes a job of its body, in a worker's thread.

        Split in two, so that neither the body nor what was parsed from it stays in memory while the request runs.
        """
        job = await self._make_job(request, body_type, read)
        off_loop = self._reply_threads.for_client(self.keys.client_of(request).name)
        return await Answering(request, job, self.llm, off_loop, self.store.settled).answer()

    async def answer_at_once(
        self, request: web.Request, body_type: type[_Body], make_reply: Callable[[JobMaker, _Body], BaseModel]
    ) -> web.Response:
        """Answers without the engine. `make_reply` is called in a worker's thread."""
        client = self.keys.client_of(request)
        text, _ = await self._read(
            request, client, body_type, lambda body: make_reply(self.job_maker, body).model_dump_json()
        )
        return web.Response(text=text, content_type="application/json")

    async def read_body(self, request: web.Request, body_type: type[_Body]) -> _Body:
        """Reads and checks a body, for an endpoint that does without the engine."""
        body, _ = await self._read(request, self.keys.client_of(request), body_type, lambda body: body)
        return body

    async def render(self, make_page: Callable[[], web.Response]) -> web.Response:
        """Calls what makes a page of the reference, in a worker's thread."""
        async with self.turn:
            return await self._quick_threads.for_client(_READERS)(make_page)

    def check_model(self, name: str | None) -> None:
        """`ModelNotFound` for another model's name. None stands for the served model."""
        if name is not None and name not in self.names:
            known = " or ".join(map(repr, self.names))
            raise ModelNotFound(f"there is no model {name!r} here, only {known}", "model")

    def check_health(self) -> None:
        """`EngineClosed` unless the engine's thread answers and new requests are served."""
        if self.llm.death is not None:
            raise EngineClosed(f"the engine died: {self.llm.death}")
        if self.is_leaving:
            raise EngineClosed("the server is shutting down")
        if not self.llm.is_healthy:
            raise EngineClosed("the engine does not respond")
        if any(threads.is_stuck for threads in self._all_threads):
            raise EngineClosed("checking a request takes too long; restart the server if this lasts")

    def close(self) -> None:
        """Ends the threads."""
        for threads in self._all_threads:
            threads.close()

    async def _make_job(
        self, request: web.Request, body_type: type[_Body], read: Callable[[JobMaker, _Body, Client], Job]
    ) -> Job:
        """The job of a request, all of whose prompts are checked."""
        client, inputs = self.keys.client_of(request), self.llm.inputs

        def make(body: _Body) -> Job:
            job = read(self.job_maker, body, client)
            if job.structure is None:  # otherwise the prompts wait for the grammar
                job.check_next(inputs)
            return job

        job, off_loop = await self._read(request, client, body_type, make)
        structure, job.structure = job.structure, None
        compiled = None
        if structure is not None:
            try:
                compiled = await compile_grammar(inputs.grammars, structure.outputs, job.text_options.thinking)
            except InvalidGrammar as error:
                raise structure.refusal(error) from error
        while job.prompts:  # one at a time, so that other clients' turns come in between
            await off_loop(job.check_next, inputs, compiled)
        request[OBSERVATION].note_job(job.reply.id, job.generations, is_streamed=job.is_streamed, warnings=job.warnings)
        return job

    async def _read(
        self, request: web.Request, client: Client, body_type: type[_Body], make: Callable[[_Body], _Made]
    ) -> tuple[_Made, OffLoop]:
        """Parses the body and calls `make`, in a worker's thread. Returns the result, and where to run more."""
        raw = await self.bodies.read(request, client.name)
        off_loop = (self._slow_threads if raw.is_large else self._quick_threads).for_client(client.name)

        def parse() -> _Made:
            body = raw.parse(body_type)
            self.check_model(body.model)
            return make(body)

        return await off_loop(parse), off_loop

    async def _read_metrics(self) -> Metrics:
        stats, counts = await self._read_books(self.counts)
        return Metrics(self.llm, self.names[0], stats, counts, self._has_vllm_metrics)
