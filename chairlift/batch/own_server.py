"""A model in this process, behind the same server as everyone's, on a socket file that only this user can open."""

import contextlib
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from chairlift.api import ServerConfig
from chairlift.api.app import Api
from chairlift.api.http.access import gather_keys
from chairlift.api.http.listening import Listener
from chairlift.api.server import make_runner, reporting, start
from chairlift.config import EngineConfig
from chairlift.engine.async_llm import AsyncLLM

_MAX_BODY_BYTES = 2**30


@asynccontextmanager
async def own_server(
    engine: EngineConfig, names: list[str]
) -> AsyncIterator[tuple[aiohttp.ClientSession, str, AsyncLLM]]:
    """Serves the model, under these names, until the context is left: a session for it, its address, its engine."""
    with tempfile.TemporaryDirectory(prefix="chairlift-batch-") as directory:
        path = Path(directory) / "socket"
        config = ServerConfig(uds=path, served_model_name=names, max_body_bytes=_MAX_BODY_BYTES, log_interval=0.0)
        keys = list(gather_keys(config))
        headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        async with contextlib.AsyncExitStack() as stack:
            listener = stack.enter_context(Listener(config))
            llm = AsyncLLM(**engine.model_dump())
            stack.push_async_callback(llm.close)
            runner = make_runner(Api(llm, config))
            stack.push_async_callback(runner.cleanup)
            stack.enter_context(reporting(llm, config.log_interval))
            await start(runner, config, listener)
            session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(path), limit=0),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=None),
            )
            await stack.enter_async_context(session)
            yield session, "http://localhost", llm
