"""The server's life: start, serve, drain on SIGTERM, report the engine's death to clients, return the exit code."""

import asyncio
import contextlib
import gc
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial

from aiohttp import web

from chairlift.api import KEYS_VARIABLE, ServerConfig
from chairlift.api.app import Api
from chairlift.api.batches import executing_batches
from chairlift.api.http.connections import Connection, connections_of
from chairlift.api.http.listening import Listener
from chairlift.api.telemetry.log import log_activity
from chairlift.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_ENGINE_DIED = 1
EXIT_CUT_SHORT = 3  # requests still ran at the deadline; 2 is for wrong flags
_DEATH_NOTICE_S = 2.0  # how long the server of a dead engine still answers, to report that
_LAST_CHUNK_S = 2.0  # how long streams that were cut short have to report that
_POLL_S = 0.02
_SWITCH_INTERVAL_S = 0.001
_COLLECTOR_THRESHOLDS = (10_000, 10, 30)  # allocations per young collection; younger collections per older one


Handlers = Mapping[int, Callable[[], None]]
"""Signal handlers by signal number."""


async def serve(llm: AsyncLLM, config: ServerConfig, listener: Listener) -> int:
    """Serves from this process alone, until a signal or the engine's death; returns the process's exit code."""
    with reporting(llm, config.log_interval):
        api = Api(llm, config)
        note_start = partial(announce, listener, asks_for_key=len(api.keys) > 0)
        return await serve_api(api, llm, config, listener, catch_signals, note_start)


async def serve_api(
    api: Api,
    llm: AsyncLLM,
    config: ServerConfig,
    listener: Listener,
    catch: Callable[[Handlers], AbstractContextManager[None]],
    note_start: Callable[[], object],
    *,
    saves_prompts: bool = True,
) -> int:
    """As `serve`. `catch` installs signal handlers; `note_start` is called when requests are served.

    `saves_prompts`: at the end, if there is a `prefix_cache_dir`; false where others still use the engine.
    """
    runner = make_runner(api)
    stop, hurry = asyncio.Event(), asyncio.Event()
    was_cut_short = False
    try:
        with short_pauses(), catch(_handlers(listener, stop, hurry)), listener:
            make_protocol = await start(runner, config, listener)
            api.cors.is_strict = not api.keys and not listener.is_open_to_others
            note_start()
            async with executing_batches(api.service.batches, api.keys, llm.config.max_batch_size, make_protocol):
                await first_of(stop.wait(), llm.died.wait())
            api.leave()
            await _delay(llm, config.drain_delay, hurry)
            api.drain()
            begin = asyncio.get_running_loop().time()
            was_cut_short = await _wind_down(llm, api, config.drain_timeout, hurry)
            if saves_prompts:
                left_s = begin + config.drain_timeout - asyncio.get_running_loop().time()
                await save_prompts(llm, left_s, hurry)
    finally:
        await llm.close()
        await runner.cleanup()
    if llm.death is not None:
        return EXIT_ENGINE_DIED
    return EXIT_CUT_SHORT if was_cut_short else EXIT_OK


def announce(listener: Listener, *, asks_for_key: bool) -> None:
    """Logs the address, and warns if other machines can use the server without a key."""
    if not asks_for_key and listener.is_open_to_others:
        logger.warning(
            "the server is open to every machine that can reach it, and requires no API key; set --api-key,"
            " --api-key-file or %s, or listen on 127.0.0.1",
            KEYS_VARIABLE,
        )
    logger.info("serving on %s", listener.url)


def make_runner(api: Api) -> web.AppRunner:
    """The production runner. Handler cancellation aborts the requests of clients that leave."""
    return web.AppRunner(api.make_app(), handler_cancellation=True, shutdown_timeout=1.0, auto_decompress=False)


async def start(runner: web.AppRunner, config: ServerConfig, listener: Listener) -> Callable[[], Connection]:
    """Starts to accept connections. Returns what makes the protocol of each."""
    await runner.setup()
    assert runner.server is not None, "set up"
    make_protocol = connections_of(runner.server, config)
    listener.accept(make_protocol)
    return make_protocol


def _handlers(listener: Listener, stop: asyncio.Event, hurry: asyncio.Event) -> Handlers:
    """The first SIGTERM or SIGINT sets `stop`, the next one `hurry`. SIGHUP renews the certificate: sent to a server,
    it means that files have changed, not that a terminal was closed.
    """

    def end() -> None:
        (hurry if stop.is_set() else stop).set()

    return {signal.SIGTERM: end, signal.SIGINT: end, signal.SIGHUP: listener.renew_certificate}


@contextlib.contextmanager
def catch_signals(handlers: Handlers) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def short_pauses() -> Iterator[None]:
    """Shortens two pauses of every stream: while a large reply is made, the garbage collector would repeatedly walk
    through all objects (0.2 s), most of which were made at the start; and a thread that needs the interpreter's lock
    would wait for 5 ms before it requests it.
    """
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTOR_THRESHOLDS)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@contextlib.contextmanager
def reporting(llm: AsyncLLM, interval_s: float) -> Iterator[None]:
    """Logs a line about the batch every `interval_s` seconds; 0: never."""
    if not interval_s:
        yield
        return
    activity = log_activity(llm.read_stats, llm.config.num_slots, interval_s)
    task = asyncio.create_task(activity, name="chairlift-activity-log")
    try:
        yield
    finally:
        task.cancel()


async def _delay(llm: AsyncLLM, delay_s: float, hurry: asyncio.Event) -> None:
    """Gives routers time to see on /health that the server is shutting down."""
    if delay_s and llm.death is None:
        logger.info("/health returns 503; requests are served for another %.0f s", delay_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(first_of(hurry.wait(), llm.died.wait()), delay_s)


async def _wind_down(llm: AsyncLLM, api: Api, timeout_s: float, hurry: asyncio.Event) -> bool:
    """Lets running requests finish, and aborts the rest at the deadline; True if any was cut short."""
    if llm.death is not None:
        await asyncio.sleep(_DEATH_NOTICE_S)
        return True
    logger.info("shutting down: %d requests have %.0f s to finish", api.num_active, timeout_s)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(first_of(_idle(api), hurry.wait(), llm.died.wait()), timeout_s)
    if not api.num_active:
        return False
    logger.info("ending %d requests that still run", api.num_active)
    await llm.abort_all()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(_idle(api), _LAST_CHUNK_S)
    return True


async def save_prompts(llm: AsyncLLM, timeout_s: float, hurry: asyncio.Event) -> None:
    """Saves what is warm to disk, if the configuration says where, for so long at most."""
    if llm.config.prefix_cache_dir is None or llm.death is not None:
        return
    saving = asyncio.ensure_future(llm.until_saved())
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(first_of(asyncio.wait([saving]), hurry.wait(), llm.died.wait()), max(0.0, timeout_s))
    if not saving.done():
        logger.info("not all prompts were saved in time")
        saving.cancel()
    await asyncio.gather(saving, return_exceptions=True)


async def _idle(api: Api) -> None:
    while api.num_active:
        await asyncio.sleep(_POLL_S)


async def first_of(*waits: Coroutine[None, None, object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
