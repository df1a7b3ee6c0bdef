"""A server on the production runner, in the test's own event loop, and clients for it."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from aiohttp import web, web_app
from openai import AsyncOpenAI

from chairlift.api.app import Api
from chairlift.api.config import ServerConfig
from chairlift.api.http.listening import Listener
from chairlift.api.server import make_runner, start
from chairlift.engine.async_llm import AsyncLLM

SLOTS = 4
MAX_SEQ_LEN = 512
ENGINE: dict[str, Any] = {"max_batch_size": SLOTS, "max_seq_len": MAX_SEQ_LEN, "dtype": "float32", "num_threads": 1}


@dataclass(frozen=True)
class Server:
    """A running server: its address, and the engine behind it to look at."""

    url: str
    llm: AsyncLLM
    api: Api

    @property
    def num_free_slots(self) -> int:
        return self.llm._core.cache.slots_remaining


@asynccontextmanager
async def serving(config: ServerConfig = ServerConfig(), **engine: Any) -> AsyncIterator[Server]:  # noqa: B008 - frozen
    """The production server in this event loop, on the bundled model with four slots unless told otherwise."""
    llm = AsyncLLM(**{**ENGINE, **engine})
    config = config.model_copy(update={"port": 0, "served_model_name": "bundled"})
    api = Api(llm, config)
    runner = make_runner(api)
    with Listener(config) as listener:
        try:
            await start(runner, config, listener)
            yield Server(listener.url, llm, api)
        finally:
            await llm.close()
            await runner.cleanup()


@asynccontextmanager
async def serving_app(app: web.Application, **settings: Any) -> AsyncIterator[str]:
    """An application without an engine on the production's connections; its address."""
    config = ServerConfig(port=0, **settings)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    with Listener(config) as listener:
        await start(runner, config, listener)
        yield listener.url
    await runner.cleanup()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """A server with room for two in the queue."""
    async with serving(max_queue_size=2) as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncOpenAI]:
    """The official client, without retries of its own."""
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A plain HTTP client, for what the official one would not send."""
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture(autouse=True)
def _no_applications_kept() -> Iterator[None]:
    """aiohttp caches the middlewares of the last 1,024 applications, and with each its engine."""
    yield
    web_app._cached_build_middleware.cache_clear()
