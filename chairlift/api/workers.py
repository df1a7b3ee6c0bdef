"""API workers: processes that share the server's address and do all text work, beside the engine's process.

The process that the user starts owns the engine and the address. It forwards signals, keeps the state that workers
share, and replaces workers that die. Forking the engine's process would not be safe, so a nursery forks the workers: a
process that has imported what they need and runs no thread. They share its memory and start at once.

    parent: engine, Crew --- nursery
      |  one socket each        | forks
      +------ worker, worker ---+
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Self

from chairlift.api import ServerConfig
from chairlift.api.app import Api, SharedState
from chairlift.api.http.access import KeyLimits, gather_keys
from chairlift.api.http.listening import Listener
from chairlift.api.replies.responses import ResponseStore, StoredResponse
from chairlift.api.server import (
    EXIT_CUT_SHORT,
    EXIT_ENGINE_DIED,
    EXIT_OK,
    Handlers,
    announce,
    catch_signals,
    first_of,
    reporting,
    serve_api,
    short_pauses,
)
from chairlift.api.telemetry.log import set_up_logging
from chairlift.api.telemetry.metrics import Counts
from chairlift.config import ResolvedConfig
from chairlift.engine.async_llm import AsyncLLM
from chairlift.engine.journal import EngineStats
from chairlift.engine.parallel import start_interpreter
from chairlift.engine.process import Line, Link, read_message
from chairlift.errors import ConfigurationError, EngineClosed
from chairlift.models.families import preload

logger = logging.getLogger(__name__)

ROWS_PER_WORKER = 256
"""Rows of a GPU's batch whose tokens one event loop streams."""

IS_POSSIBLE = hasattr(os, "fork") and hasattr(socket, "SO_REUSEPORT")

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_MAX_STARTS, _STARTS_WITHIN_S = 3, 60.0  # limits replacements of workers
_COUNTS_S = 1.0  # how long a scrape waits for a worker


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a worker needs to know."""

    config: ServerConfig  # with the port that was taken
    keys: dict[str, KeyLimits]
    engine: ResolvedConfig
    vocab_size: int
    stats: EngineStats
    engine_pid: int
    number: int  # counts all workers started so far


def choose_size(config: ServerConfig, engine: ResolvedConfig) -> int:
    """The number of workers; 1: none, because the engine's process serves requests itself."""
    if config.api_workers != "auto":
        return config.api_workers
    is_worth_it = engine.device != "cpu" and IS_POSSIBLE
    return -(-engine.max_batch_size // ROWS_PER_WORKER) if is_worth_it else 1


# --- the parent


class Nursery:
    """The process that forks workers. It ends when its socket closes, so also if this process is killed."""

    def __init__(self, program: str) -> None:
        """`program`: Python that calls `nurse`, with `{}` in place of the number of its socket.

        `ConfigurationError` if this system has no fork.
        """
        if not IS_POSSIBLE:
            raise ConfigurationError("api_workers: this system has no fork; leave it out, or set it to 1")
        self._program = program
        self._start()

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = start_interpreter(self._program.format(theirs.fileno()), theirs.fileno())

    def bear(self) -> socket.socket:
        """Starts a worker and returns its socket, which closes when the worker ends or cannot be started."""
        if self._process.poll() is not None:  # it was killed
            self._socket.close()
            self._start()
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [b"\0"], [theirs.fileno()])
        return ours

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()


class _Worker:
    """One worker, as the parent sees it."""

    def __init__(self, llm: AsyncLLM, crew: "Crew") -> None:
        self.is_ready = asyncio.Event()
        self.exit_code: int | None = None
        self.counts = Counts()  # the newest known
        store = crew.store
        self.line = Line(
            llm,
            {
                "ready": self.is_ready.set,
                "bye": partial(setattr, self, "exit_code"),
                "read_books": crew.read_books,
                "keep": store.keep,
                "find": store.find,
                "delete": store.delete,
            },
        )

    async def read_counts(self) -> Counts:
        with contextlib.suppress(TimeoutError, EngineClosed):
            self.counts = await asyncio.wait_for(self.line.ask("counts"), _COUNTS_S)
        return self.counts


class Crew:
    """All workers of an engine."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig, listener: Listener, nursery: Nursery, size: int) -> None:
        self._llm = llm
        self._config = config
        self._listener = listener
        self._nursery = nursery
        self._size = size
        self._keys = gather_keys(config)
        self.store = ResponseStore()
        self._workers: set[_Worker] = set()
        self._num_started = 0
        self._starts: deque[float] = deque(maxlen=_MAX_STARTS)
        self._past = Counts()  # of workers that have ended
        self._num_ready = 0
        self._is_leaving = asyncio.Event()

    async def serve(self) -> int:
        self._listener.let_share()
        with short_pauses(), catch_signals(self._handlers()), reporting(self._llm, self._config.log_interval):
            telling = asyncio.create_task(self._tell_death(), name="chairlift-death")
            try:
                codes = await asyncio.gather(*(self._keep_one() for _ in range(self._size)))
            finally:
                telling.cancel()
                await self._llm.close()
        if self._llm.death is not None:
            return EXIT_ENGINE_DIED
        return EXIT_OK if set(codes) == {EXIT_OK} else EXIT_CUT_SHORT

    async def read_books(self) -> tuple[EngineStats, Counts]:
        """What the engine and all workers have counted."""
        total = Counts()
        total += self._past  # first, or a worker that ends meanwhile would count twice
        for counts in await asyncio.gather(*(worker.read_counts() for worker in self._workers)):
            total += counts
        return self._llm.read_stats(), total

    async def _keep_one(self) -> int:
        """Keeps one worker running until the server leaves; returns the last one's exit code."""
        while True:
            worker = await self._start()
            await first_of(worker.is_ready.wait(), worker.line.lost.wait())
            self._note_start(worker)
            await worker.line.lost.wait()
            self._workers.discard(worker)
            self._past += worker.counts
            if not self._is_over:
                logger.error("an API worker has ended, and with it the requests that it served; another one is started")
                await self._pause()
            if self._is_over:
                return EXIT_CUT_SHORT if worker.exit_code is None else worker.exit_code

    @property
    def _is_over(self) -> bool:
        return self._is_leaving.is_set() or self._llm.death is not None

    async def _start(self) -> _Worker:
        worker = _Worker(self._llm, self)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: worker.line, sock=self._nursery.bear())
        worker.line.post(
            Welcome(
                self._config.model_copy(update={"port": self._listener.port}),
                self._keys,
                self._llm.config,
                self._llm.vocab_size,
                self._llm.read_stats(),
                os.getpid(),
                self._num_started,
            )
        )
        self._num_started += 1
        self._workers.add(worker)
        return worker

    def _note_start(self, worker: _Worker) -> None:
        """Logs the address when all are ready. Raises if a worker ends before that."""
        if worker.is_ready.is_set():
            self._num_ready += 1
            if self._num_ready == self._size:
                announce(self._listener, asks_for_key=bool(self._keys))
        elif self._num_ready < self._size and not self._is_over:
            raise ConfigurationError("an API worker did not start; the log says why")

    async def _pause(self) -> None:
        """Waits until another worker may be started: workers that die at once would use up a processor."""
        if len(self._starts) == _MAX_STARTS:
            left = self._starts[0] + _STARTS_WITHIN_S - time.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(first_of(self._is_leaving.wait(), self._llm.died.wait()), max(left, 0.0))
        self._starts.append(time.monotonic())

    async def _tell_death(self) -> None:
        await self._llm.died.wait()
        assert self._llm.death is not None, "it has died"
        for worker in self._workers:
            worker.line.tell_death(self._llm.death)

    def _handlers(self) -> Handlers:
        """Forwards signals to all workers, which get them only from here."""

        def hand_on(number: int) -> None:
            if number != signal.SIGHUP:
                self._is_leaving.set()
            for worker in self._workers:
                worker.line.ask("signal", number)

        return {number: partial(hand_on, number) for number in _SIGNALS}


# --- a worker


class _Store:
    """The responses that the engine's process keeps; see `jobs.Store`."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._unsettled: set[Future[Any]] = set()

    def keep(self, owner: str, response_id: str, response: StoredResponse) -> None:
        kept = self._begin("keep", owner, response_id, response)
        self._unsettled.add(kept)
        kept.add_done_callback(self._unsettled.discard)

    async def settled(self) -> None:
        unsettled = [asyncio.shield(asyncio.wrap_future(kept)) for kept in tuple(self._unsettled)]
        await asyncio.gather(*unsettled, return_exceptions=True)

    def find(self, owner: str, response_id: str) -> StoredResponse | None:
        found: StoredResponse | None = self._ask("find", owner, response_id)
        return found

    def delete(self, owner: str, response_id: str) -> bool:
        return bool(self._ask("delete", owner, response_id))

    def _ask(self, *args: str) -> Any:
        """Blocks, so it must not be called in the event loop's thread."""
        return self._begin(*args).result()

    def _begin(self, name: str, *args: Any) -> "Future[Any]":
        async def ask() -> Any:
            return await self._link.ask(name, *args)

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


def nurse(fd: int, run: Callable[[Coroutine[Any, Any, int]], int]) -> NoReturn:
    """The nursery's program. `run` runs a worker's loop."""
    for number in _SIGNALS:  # which the parent handles
        signal.signal(number, signal.SIG_IGN)
    preload()
    gc.collect()
    gc.freeze()  # otherwise a collection in a worker would write to, and so copy, all shared memory
    with socket.socket(fileno=fd) as parent:
        while True:
            _, fds, _, _ = socket.recv_fds(parent, 1, 1)
            if not fds:
                os._exit(0)
            if not os.fork():
                break
            os.close(fds[0])
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:  # reaps workers that have ended
                    pass
    _work(socket.socket(fileno=fds[0]), run)


def _work(parent: socket.socket, run: Callable[[Coroutine[Any, Any, int]], int]) -> NoReturn:
    code = EXIT_ENGINE_DIED
    try:
        welcome = read_message(parent)
        assert isinstance(welcome, Welcome), "the first message"
        set_up_logging(welcome.config.log_format)
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
    link = Link(welcome.engine, welcome.vocab_size, welcome.stats, {"signal": signals.hand_on})
    await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=parent)
    llm = AsyncLLM.of(link, link.grammars, welcome.number)
    llm.usable_engine()  # it may die before the first request

    async def read_books(own: Counts) -> tuple[EngineStats, Counts]:
        with contextlib.suppress(EngineClosed):
            link.stats, counts = await link.ask("read_books")
            return link.stats, counts
        return link.stats, own

    api = Api(llm, welcome.config, SharedState(welcome.keys, _Store(link), read_books, welcome.engine_pid))
    link.offer("counts", lambda: api.counts)
    with Listener(welcome.config, is_shared=True) as listener:
        code = await serve_api(api, llm, welcome.config, listener, signals.catch, partial(link.ask, "ready"))
    with contextlib.suppress(EngineClosed):
        await link.ask("bye", code)
    return code
