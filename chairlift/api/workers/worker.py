"""A worker: a server whose engine, stored responses and signals come over a socket."""

import asyncio
import contextlib
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from chairlift.api import ServerConfig
from chairlift.api.app import Api
from chairlift.api.http.access import KeyLimits
from chairlift.api.http.listening import Listener
from chairlift.api.server import EXIT_ENGINE_DIED, Handlers, serve_api
from chairlift.api.service import SharedState
from chairlift.api.store import StoredReply
from chairlift.api.telemetry.log import set_up_logging
from chairlift.api.telemetry.metrics import Counts
from chairlift.config import ResolvedConfig
from chairlift.engine.async_llm import AsyncLLM
from chairlift.engine.journal import EngineStats
from chairlift.engine.process import RemoteEngine, read_message
from chairlift.errors import ConfigurationError, EngineClosed

logger = logging.getLogger(__name__)

_BOOKS_S = 3.0  # how long a scrape waits for the engine's process


@dataclass(frozen=True, slots=True)
class Welcome:
    """Carries what a worker needs to know."""

    config: ServerConfig  # with the port that was taken
    keys: dict[str, KeyLimits]
    engine: ResolvedConfig
    vocab_size: int
    stats: EngineStats
    engine_pid: int
    number: int  # counts all workers started so far


class _Store:
    """The responses that the engine's process keeps; see `store.Store`."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._unsettled: set[Future[Any]] = set()
        self._found: weakref.WeakValueDictionary[tuple[str, str], StoredReply] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def keep(self, owner: str, reply_id: str, reply: StoredReply) -> None:
        kept = self._begin("keep", owner, reply_id, reply)
        self._unsettled.add(kept)
        kept.add_done_callback(self._unsettled.discard)

    async def settled(self) -> None:
        unsettled = [asyncio.shield(asyncio.wrap_future(kept)) for kept in tuple(self._unsettled)]
        await asyncio.gather(*unsettled, return_exceptions=True)

    def find(self, owner: str, reply_id: str) -> StoredReply | None:
        """See `store.Store`. All who read a response at the same time share one copy."""
        found: StoredReply | None = self._ask("find", owner, reply_id)
        if found is None:
            return None
        with self._lock:
            return self._found.setdefault((owner, reply_id), found)

    def delete(self, owner: str, reply_id: str) -> bool:
        return bool(self._ask("delete", owner, reply_id))

    def _ask(self, *args: str) -> Any:
        """Blocks, so it must not be called in the event loop's thread."""
        return self._begin(*args).result()

    def _begin(self, name: str, *args: Any) -> "Future[Any]":
        async def ask() -> Any:
            return await self._engine.ask(name, *args)

        return asyncio.run_coroutine_threadsafe(ask(), self._loop)


class _Signals:
    """Signals that the parent forwards; they are kept until handlers are installed."""

    def __init__(self) -> None:
        self._handlers: Handlers = {}
        self._pending: list[int] = []

    def hand_on(self, number: int) -> None:
        if number in self._handlers:
            self._handlers[number]()
        else:
            self._pending.append(number)

    @contextlib.contextmanager
    def catch(self, handlers: Handlers) -> Iterator[None]:
        """See `server.catch_signals`."""
        self._handlers = handlers
        while self._pending:
            self.hand_on(self._pending.pop(0))
        yield
        self._handlers = {}


def work(parent: socket.socket, run: Callable[[Coroutine[Any, Any, int]], int]) -> NoReturn:
    """Serves as a worker of the process at the other end of the socket, then ends this process."""
    code = EXIT_ENGINE_DIED
    try:
        welcome = read_message(parent)
        assert isinstance(welcome, Welcome), "the first message"
        set_up_logging(welcome.config.log_format, welcome.config.log_file)
        code = run(_serve(parent, welcome))
    except ConfigurationError as error:
        logger.error("an API worker cannot start: %s", error)
    except BaseException as error:
        logger.critical("an API worker failed", exc_info=error)
    finally:
        logging.shutdown()
        os._exit(code)


async def _serve(parent: socket.socket, welcome: Welcome) -> int:
    signals = _Signals()
    engine = RemoteEngine(welcome.engine, welcome.vocab_size, welcome.stats, {"signal": signals.hand_on})
    await asyncio.get_running_loop().create_unix_connection(lambda: engine, sock=parent)
    llm = AsyncLLM.of(engine, engine.grammars, welcome.number)
    llm.usable_engine()  # it may die before the first request

    async def read_books(own: Counts) -> tuple[EngineStats, Counts]:
        with contextlib.suppress(TimeoutError, EngineClosed):  # it may be stopped
            engine.stats, counts = await asyncio.wait_for(engine.ask("read_books"), _BOOKS_S)
            return engine.stats, counts
        return engine.stats, own

    api = Api(llm, welcome.config, SharedState(welcome.keys, _Store(engine), read_books, welcome.engine_pid))
    engine.offer("counts", lambda: api.service.counts)
    watching = asyncio.create_task(engine.watch(welcome.config.worker_timeout), name="chairlift-engine-watch")
    with Listener(welcome.config, is_shared=True) as listener:
        note_start = partial(engine.ask, "ready")
        code = await serve_api(api, llm, welcome.config, listener, signals.catch, note_start, saves_prompts=False)
    watching.cancel()
    with contextlib.suppress(EngineClosed):
        await engine.ask("bye", code)
    return code
