"""The server's life: start, serve, drain on SIGTERM, tell clients when the engine dies, exit with a telling code."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterator

from aiohttp import web

from chairlift.api.app import Api, ApiOptions
from chairlift.api.config import KEYS_VARIABLE, ServerConfig
from chairlift.api.connections import BODY_TIMEOUT
from chairlift.api.cors import Cors
from chairlift.api.keys import gather_keys
from chairlift.api.listening import check_can_listen, is_open_to_others, listen, tls_context, url_of
from chairlift.api.request_log import log_activity
from chairlift.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_ENGINE_DIED = 1
EXIT_CUT_SHORT = 3  # requests still ran when their time was over; 2 is for wrong flags
_DEATH_NOTICE_S = 2.0  # how long a dead engine's server goes on to say so
_LAST_CHUNK_S = 2.0  # how long streams that were cut short have to say so
_POLL_S = 0.02


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


def check(config: ServerConfig) -> None:
    """Refuses with `ConfigurationError` what cannot work, before a model is loaded for it. Not from an event loop."""
    Cors(config.allowed_origin)
    gather_keys(config)
    tls_context(config)
    check_can_listen(config)


async def serve(llm: AsyncLLM, config: ServerConfig) -> int:
    """Serves until a signal or the engine's death; returns the process's exit code."""
    keys = gather_keys(config)
    options = ApiOptions(
        api_keys=keys,
        tool_call_parser=config.tool_call_parser,
        max_body_bytes=config.max_body_bytes,
        keep_alive_interval=config.keep_alive_interval,
    )
    api = Api(llm, config.served_model_name or llm.config.model, options)
    runner = make_runner(api, config)
    await runner.setup()
    assert runner.server is not None, "set up"
    signals = _Signals()
    try:
        with (
            signals.installed(),
            _reporting(llm, config.log_interval),
            contextlib.closing(await listen(runner.server, config)) as listening,
        ):
            if not keys and is_open_to_others(listening):
                logger.warning(
                    "anybody who reaches this machine can use the server: it asks for no key. Set --api-key,"
                    " --api-key-file or %s, or listen on 127.0.0.1",
                    KEYS_VARIABLE,
                )
            logger.info("serving on %s", url_of(listening, config))
            await _first_of(signals.first, llm.died)
            api.is_draining = True
            was_cut_short = await _wind_down(llm, api, config, signals)
    finally:
        await llm.close()
        await runner.cleanup()
    if llm.death is not None:
        return EXIT_ENGINE_DIED
    return EXIT_CUT_SHORT if was_cut_short else EXIT_OK


def make_runner(api: Api, config: ServerConfig = ServerConfig()) -> web.AppRunner:  # noqa: B008 - frozen
    """The production runner. Handler cancellation is what turns a client that left into an abort."""
    app = api.make_app()
    app[BODY_TIMEOUT] = config.body_timeout
    Cors(config.allowed_origin).install(app)
    return web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)


@contextlib.contextmanager
def _reporting(llm: AsyncLLM, interval_s: float) -> Iterator[None]:
    """Every so many seconds the log gets a line about the batch; 0: never."""
    if not interval_s:
        yield
        return
    activity = log_activity(llm.read_stats, llm.config.num_slots, interval_s)
    task = asyncio.create_task(activity, name="chairlift-activity-log")
    try:
        yield
    finally:
        task.cancel()


async def _wind_down(llm: AsyncLLM, api: Api, config: ServerConfig, signals: _Signals) -> bool:
    """Lets what runs come to its end, or ends it; True if something had to be cut short."""
    if llm.death is not None:
        await asyncio.sleep(_DEATH_NOTICE_S)
        return True
    logger.info("going down: %d requests have %.0f s to finish", api.num_active, config.drain_timeout)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(_first_of(_Drained(api), signals.second, llm.died), config.drain_timeout)
    if not api.num_active:
        return False
    logger.info("ending %d requests that still run", api.num_active)
    await llm.abort_all()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(_Drained(api).wait(), _LAST_CHUNK_S)
    return True


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
