"""A server on the production runner, in an event loop that the tests of a module share, and clients for it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web, web_app
from openai import AsyncOpenAI

from chairlift.api import ServerConfig
from chairlift.api.answers import ToolFamily
from chairlift.api.app import Api
from chairlift.api.http.connections import Connection
from chairlift.api.http.listening import Listener
from chairlift.api.server import make_runner, start
from chairlift.engine.async_llm import AsyncLLM
from chairlift.engine.thread import LocalEngine
from tests.engine.async_support import Clock, wait_until
from tests.support.engines import HOOKED, core_of, make_core

SLOTS = 4
MAX_SEQ_LEN = 512
SOCKET_BYTES = 4096
ENGINE: dict[str, Any] = {"max_batch_size": SLOTS, "max_seq_len": MAX_SEQ_LEN, "dtype": "float32", "num_threads": 1}
in_loop = pytest_asyncio.fixture(loop_scope="module")
"""Makes a fixture of a coroutine or a generator, in the loop in which the tests run."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


@dataclass(frozen=True)
class Server:
    """A running server: its address, and the engine behind it to look at."""

    url: str
    llm: AsyncLLM
    api: Api

    @property
    def num_free_slots(self) -> int:
        return core_of(self.llm).cache.slots_remaining

    @property
    def is_idle(self) -> bool:
        """Nothing runs or waits, and no slot is taken."""
        is_waited_for = self.llm.num_unfinished or self.api.num_active
        return not is_waited_for and self.num_free_slots == self.llm.config.num_slots


Served = TypeVar("Served", bound=AsyncLLM)


def make_served(kind: type[Served] = AsyncLLM, **engine: Any) -> Served:  # type: ignore[assignment]
    """The bundled model with four slots unless told otherwise."""
    parts = replace(HOOKED, clock=Clock())
    return kind.of(LocalEngine(make_core(parts=parts, **{"model": "bundled", **ENGINE, **engine})))


@asynccontextmanager
async def serving(
    config: ServerConfig = ServerConfig(),  # noqa: B008 - frozen
    llm: AsyncLLM | None = None,
    **engine: Any,
) -> AsyncIterator[Server]:
    """The production server in this event loop, on that engine, or else on one of `make_served`. Closes it."""
    llm = llm or make_served(**engine)
    names = config.served_model_name or ["bundled"]
    config = config.model_copy(update={"port": 0, "served_model_name": names})
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


@dataclass
class SharedServer:
    """A server that the tests of a module use one after the other. One that cannot go on after a test is replaced."""

    config: ServerConfig
    engine: dict[str, Any] = field(default_factory=dict)
    _server: Server | None = None
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[Server]:
        """For one test, after which nothing of it may go on. To the next one it is new, but for what it has counted."""
        if self._server is None:
            self._server = await self._stack.enter_async_context(serving(self.config, **self.engine))
        server = self._server
        try:
            yield server
        except BaseException:  # what the test has left is not known
            await self.close()
            raise
        if not server.llm.is_healthy or server.api.is_draining:
            await self.close()
            return
        await wait_until(lambda: server.is_idle, "nothing of the test goes on")
        await server.llm.reset_prefix_cache()

    async def close(self) -> None:
        self._server = None
        await self._stack.aclose()


def shared(config: ServerConfig, **engine: Any) -> Any:
    """A fixture for a module."""

    @pytest_asyncio.fixture(scope="module", loop_scope="module")
    async def server_of_module() -> AsyncIterator[SharedServer]:
        server = SharedServer(config, engine)
        yield server
        await server.close()

    return server_of_module


shared_server = shared(ServerConfig(), max_queue_size=2)
# It reads Hermes calls out of answers, whatever the template teaches.
shared_hermes = shared(ServerConfig(tool_call_parser=ToolFamily.HERMES))


@pytest.fixture
def transports(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.Transport]:
    """Connections of the server, whose sockets hold little."""
    seen: list[asyncio.Transport] = []
    connection_made = Connection.connection_made

    def shrink(self: Connection, transport: asyncio.BaseTransport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        assert isinstance(transport, asyncio.Transport)
        seen.append(transport)
        connection_made(self, transport)

    monkeypatch.setattr(Connection, "connection_made", shrink)
    return seen


@in_loop
async def server(shared_server: SharedServer) -> AsyncIterator[Server]:
    async with shared_server.lent() as server:
        yield server


@in_loop
async def client(server: Server) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(server) as client:
        yield client


@in_loop
async def hermes(shared_hermes: SharedServer) -> AsyncIterator[AsyncOpenAI]:
    async with shared_hermes.lent() as server, client_of(server) as client:
        yield client


def client_of(server: Server, key: str = "none") -> AsyncOpenAI:
    """The official client, without retries of its own."""
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@in_loop
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A plain HTTP client, for what the official one would not send."""
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture(autouse=True)
def _no_applications_kept() -> Iterator[None]:
    """aiohttp caches the middlewares of the last 1,024 applications, and with each its engine."""
    yield
    web_app._cached_build_middleware.cache_clear()
