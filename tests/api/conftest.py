"""A server on the production runner, in the test's own event loop, and clients for it."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
import pytest_asyncio
from openai import AsyncOpenAI

from chairlift.api.app import Api
from chairlift.api.config import ServerConfig
from chairlift.api.listening import listen, url_of
from chairlift.api.server import make_runner
from chairlift.engine.async_llm import AsyncLLM

SLOTS = 4
MAX_SEQ_LEN = 512


@dataclass(frozen=True)
class Server:
    """A running server: its address, and the engine behind it to look at."""

    url: str
    llm: AsyncLLM
    api: Api

    @property
    def num_free_slots(self) -> int:
        return self.llm._core.cache.slots_remaining


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    """The bundled model with four slots and room for two in the queue."""
    llm = AsyncLLM(max_batch_size=SLOTS, max_seq_len=MAX_SEQ_LEN, max_queue_size=2, dtype="float32")
    api = Api(llm, "bundled")
    runner = make_runner(api)
    await runner.setup()
    assert runner.server is not None, "set up"
    config = ServerConfig(port=0)
    with contextlib.closing(await listen(runner.server, config)) as listening:
        yield Server(url_of(listening, config), llm, api)
        await llm.close()
        await runner.cleanup()


@pytest_asyncio.fixture
async def client(server: Server) -> AsyncIterator[AsyncOpenAI]:
    """The official client, without retries of its own."""
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest_asyncio.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A plain HTTP client, for what the official one would not send."""
    async with aiohttp.ClientSession() as session:
        yield session
