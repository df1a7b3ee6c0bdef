"""The server's life: start, serve, drain on SIGTERM, tell clients when the engine dies, exit with a telling code."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterator
from pathlib import Path

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from chairlift.api.app import Api
from chairlift.api.keys import read_keys
from chairlift.engine.async_llm import AsyncLLM
from chairlift.errors import ConfigurationError

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_ENGINE_DIED = 1
_DEATH_NOTICE_S = 2.0  # how long a dead engine's server goes on to say so
_POLL_S = 0.02


class ServerConfig(BaseModel):
    """Where and how to listen. Field descriptions are the help texts of the command line's flags."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all, without any protection")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0: any free one")
    served_model_name: str | None = Field(None, description="the model's name for clients, if not that of --model")
    api_key: list[SecretStr] = Field([], description="a key that clients must send; may be given several times")
    api_key_file: Path | None = Field(None, description="file with such keys, one per line")
    drain_timeout: float = Field(30.0, ge=0.0, description="seconds that running requests get after SIGTERM")


class _Signals:
    """Counts SIGTERM and SIGINT: the first drains, the second stops at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def receive(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.receive)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


async def serve(llm: AsyncLLM, config: ServerConfig) -> int:
    """Serves until a signal or the engine's death; returns the process's exit code."""
    keys = [key.get_secret_value() for key in config.api_key]
    if config.api_key_file is not None:
        keys += read_keys(config.api_key_file)
    api = Api(llm, config.served_model_name or llm.config.model, keys)
    runner = make_runner(api)
    await runner.setup()
    signals = _Signals()
    try:
        with signals.installed():
            await _listen(runner, config)
            await _first_of(signals.first, llm.died)
            api.is_draining = True
            await _wind_down(llm, api, config, signals)
    finally:
        await llm.close()
        await runner.cleanup()
    return EXIT_ENGINE_DIED if llm.death is not None else EXIT_OK


def make_runner(api: Api) -> web.AppRunner:
    """The production runner. Handler cancellation is what turns a client that left into an abort."""
    return web.AppRunner(api.make_app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)


async def _listen(runner: web.AppRunner, config: ServerConfig) -> None:
    try:
        await web.TCPSite(runner, config.host, config.port).start()
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {config.host}:{config.port}: {error.strerror}") from error
    host, port = runner.addresses[0][:2]
    shown = f"[{host}]" if ":" in host else host
    logger.info("serving on http://%s:%d", shown, port)


async def _wind_down(llm: AsyncLLM, api: Api, config: ServerConfig, signals: _Signals) -> None:
    if llm.death is not None:
        await asyncio.sleep(_DEATH_NOTICE_S)
        return
    logger.info("going down: %d requests have %.0f s to finish", api.num_active, config.drain_timeout)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(_first_of(_Drained(api), signals.second, llm.died), config.drain_timeout)
    if api.num_active:
        logger.info("ending %d requests that still run", api.num_active)
        await llm.abort_all()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_Drained(api).wait(), _DEATH_NOTICE_S)


class _Drained:
    """Looks like an event that is set once nothing runs."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def wait(self) -> None:
        while self._api.num_active:
            await asyncio.sleep(_POLL_S)


async def _first_of(*events: asyncio.Event | _Drained) -> None:
    """Waits for any one of them."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
