"""The crew: all workers of an engine, kept running by the engine's process."""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Coroutine
from functools import partial
from typing import TypeVar

from chairlift.api import ServerConfig
from chairlift.api.http.access import gather_keys
from chairlift.api.http.listening import Listener
from chairlift.api.server import (
    EXIT_CUT_SHORT,
    EXIT_ENGINE_DIED,
    EXIT_OK,
    Handlers,
    announce,
    catch_signals,
    first_of,
    reporting,
    save_prompts,
    short_pauses,
)
from chairlift.api.store import ReplyStore
from chairlift.api.telemetry.metrics import SCRAPE_INTERVAL_S, Counts
from chairlift.api.telemetry.pace import Paced
from chairlift.api.workers.nursery import FORWARDED_SIGNALS, IS_POSSIBLE, Nursery, WorkerProcess
from chairlift.api.workers.worker import Welcome
from chairlift.config import ResolvedConfig
from chairlift.engine.async_llm import AsyncLLM
from chairlift.engine.journal import EngineStats
from chairlift.engine.process import RemoteReader
from chairlift.errors import ConfigurationError, EngineClosed, EngineDead

logger = logging.getLogger(__name__)

ROWS_PER_WORKER = 256
"""Rows of a GPU's batch whose tokens one event loop streams."""

_START_S = 120.0  # that a worker has until it is ready
_END_S = 10.0  # that workers have beyond the deadlines that they know, after which they are killed
_LAST_WORDS_S = 5.0  # between the end of a worker's connection and that of its process
_COUNTS_S = 1.0  # how long a scrape waits for a worker

_Made = TypeVar("_Made")


def choose_size(config: ServerConfig, engine: ResolvedConfig) -> int:
    """The number of workers; 1: none, because the engine's process serves requests itself."""
    if config.api_workers != "auto":
        return config.api_workers
    if config.uds is not None:  # the system does not spread its connections
        return 1
    is_worth_it = engine.device != "cpu" and IS_POSSIBLE
    return -(-engine.max_batch_size // ROWS_PER_WORKER) if is_worth_it else 1


class Restarts:
    """Paces the starts in one worker's place: workers that die at once would use up a processor."""

    LASTING_S = 60.0
    _FIRST_S, _MOST_S = 1.0, 30.0

    def __init__(self) -> None:
        self._num_brief = 0  # workers in a row that did not last

    def delay_after(self, lasted: bool) -> float:
        """Seconds until the next start. 0 after a worker that lasted, and after the first one that did not; then they
        double, up to 30.
        """
        self._num_brief = 0 if lasted else self._num_brief + 1
        return 0.0 if self._num_brief < 2 else min(self._MOST_S, self._FIRST_S * 2.0 ** (self._num_brief - 2))


class _Worker:
    """One worker, as the parent sees it."""

    def __init__(self, llm: AsyncLLM, crew: "Crew", process: WorkerProcess) -> None:
        self.is_ready = asyncio.Event()
        self.exit_code: int | None = None
        self.counts = Counts()  # the newest known
        self.was_silent = False
        self.process = process
        self._begin = time.monotonic()
        store = crew.store
        self.connection = RemoteReader(
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

    @property
    def lasted(self) -> bool:
        """True if another one in its place is likely to last as well. To find one silent takes a while, too."""
        return self.is_ready.is_set() and (self.was_silent or time.monotonic() - self._begin >= Restarts.LASTING_S)

    async def read_counts(self) -> Counts:
        with contextlib.suppress(TimeoutError, EngineClosed):
            self.counts = await asyncio.wait_for(self.connection.ask("counts"), _COUNTS_S)
        return self.counts

    async def live(self, start_s: float, timeout_s: float) -> None:
        """Returns when it has ended. Kills it if it is not ready in `start_s`, or silent for `timeout_s` seconds."""
        await first_of(self.is_ready.wait(), self.connection.lost.wait(), asyncio.sleep(start_s))
        if not self.is_ready.is_set():
            self.kill(f"was not ready after {start_s:g} s")
        watching = asyncio.create_task(self.connection.watch(timeout_s), name="chairlift-worker-watch")
        try:
            await first_of(self.connection.silent.wait(), self.connection.lost.wait())
            self.was_silent = not self.connection.lost.is_set()
            self.kill(f"did not answer for {timeout_s:g} s")
            await self.connection.lost.wait()
        finally:
            watching.cancel()

    def kill(self, reason: str) -> None:
        """Kills it and ends its requests, unless its connection has ended."""
        if not self.connection.lost.is_set():
            logger.error("API worker %d %s; it is killed", self.process.pid, reason)
            self.process.kill()
            self.connection.abort()


class Crew:
    """All workers of an engine."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig, listener: Listener, nursery: Nursery, size: int) -> None:
        self._llm = llm
        self._config = config
        self._listener = listener
        self._nursery = nursery
        self._size = size
        self._keys = gather_keys(config)
        self.store = ReplyStore()
        self.read_books = Paced(self._read_books, SCRAPE_INTERVAL_S)
        self._workers: set[_Worker] = set()  # that are connected
        self._ending: set[_Worker] = set()  # whose processes may still be there
        self._num_started = 0
        self._past = Counts()  # of workers that have ended
        self._num_ready = 0
        self._is_leaving, self._is_hurried = asyncio.Event(), asyncio.Event()
        self._left_at = 0.0  # when the first signal came, and the delay of the drain is over

    async def serve(self) -> int:
        self._listener.let_share()
        with short_pauses(), catch_signals(self._handlers()), reporting(self._llm, self._config.log_interval):
            keeping = [asyncio.create_task(self._keep_one()) for _ in range(self._size)]
            beside = [asyncio.create_task(each) for each in (self._tell_death(), self._limit_the_end())]
            try:
                codes = await asyncio.gather(*keeping)
                left_s = self._left_at + self._config.drain_timeout - time.monotonic()
                await save_prompts(self._llm, left_s, self._is_hurried)
            finally:
                for task in keeping + beside:
                    task.cancel()
                for worker in self._workers | self._ending:
                    if worker.exit_code is None:
                        worker.process.kill()
                await self._llm.close()
        if self._llm.death is not None:
            return EXIT_ENGINE_DIED
        return EXIT_OK if set(codes) == {EXIT_OK} else EXIT_CUT_SHORT

    async def _read_books(self) -> tuple[EngineStats, Counts]:
        """Returns what the engine and all workers have counted."""
        total = Counts()
        total += self._past  # first, or a worker that ends meanwhile would count twice
        for counts in await asyncio.gather(*(worker.read_counts() for worker in self._workers)):
            total += counts
        return self._llm.read_stats(), total

    async def _keep_one(self) -> int:
        """Keeps one worker running until the server leaves; returns the last one's exit code."""
        restarts, code = Restarts(), EXIT_OK
        while True:
            worker = await self._start()
            if worker is not None:
                await self._accompany(worker)
                code = EXIT_CUT_SHORT if worker.exit_code is None else worker.exit_code
            if self._is_over:
                return code
            if worker is not None and worker.is_ready.is_set():
                logger.error("an API worker has ended, and with it the requests that it served; another one is started")
            elif self._num_ready < self._size:
                raise ConfigurationError("an API worker did not start; the log says why")
            else:
                logger.error("an API worker ended before it was ready; this is tried again")
            await self._pause(restarts.delay_after(worker is not None and worker.lasted))

    @property
    def _is_over(self) -> bool:
        return self._is_leaving.is_set() or self._llm.death is not None

    async def _start(self) -> _Worker | None:
        """Starts a worker. None if it cannot be started, as the log says then, or if the server leaves meanwhile."""
        try:
            born = await self._unless_over(self._nursery.bear(self._config.worker_timeout))
            if born is None:
                return None
            worker = _Worker(self._llm, self, born.process)
            await asyncio.get_running_loop().create_unix_connection(lambda: worker.connection, sock=born.socket)
        except (OSError, EngineClosed, EngineDead) as error:
            logger.error("an API worker cannot be started: %s", error)
            return None
        if self._is_over:  # it would not hear of that
            self._bury(worker)
            return None
        worker.connection.post(
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

    async def _accompany(self, worker: _Worker) -> None:
        """Returns when it has ended."""
        noting = asyncio.create_task(self._note_start(worker))
        await worker.live(_START_S, self._config.worker_timeout)
        noting.cancel()
        self._workers.discard(worker)
        self._past += worker.counts
        self._ending.add(worker)
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._bury, worker)

    async def _note_start(self, worker: _Worker) -> None:
        """Logs the address when all are ready."""
        await worker.is_ready.wait()
        self._num_ready += 1
        if self._num_ready == self._size:
            announce(self._listener, asks_for_key=bool(self._keys))

    def _bury(self, worker: _Worker) -> None:
        """Kills what may be left of a worker: a stopped one would keep its part of the address."""
        self._ending.discard(worker)
        worker.process.kill()
        worker.process.close()

    async def _unless_over(self, making: Coroutine[None, None, _Made]) -> _Made | None:
        """Returns what a coroutine makes; None if the server leaves or its engine dies before."""
        task = asyncio.ensure_future(making)
        try:
            await first_of(asyncio.wait([task]), self._is_leaving.wait(), self._llm.died.wait())
            return task.result() if task.done() else None
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _pause(self, seconds: float) -> None:
        """Waits, unless the server leaves."""
        await first_of(asyncio.sleep(seconds), self._is_leaving.wait(), self._llm.died.wait())

    async def _limit_the_end(self) -> None:
        """Kills the workers that have not ended when they should have."""
        await first_of(self._is_leaving.wait(), self._llm.died.wait())
        drain_s = self._config.drain_delay + self._config.drain_timeout
        await first_of(asyncio.sleep(drain_s), self._is_hurried.wait(), self._llm.died.wait())
        await asyncio.sleep(_END_S)
        for worker in self._workers:
            worker.kill("has not ended in time")

    async def _tell_death(self) -> None:
        await self._llm.died.wait()
        assert self._llm.death is not None, "it has died"
        for worker in self._workers:
            worker.connection.tell_death(self._llm.death)

    def _handlers(self) -> Handlers:
        """Forwards signals to all workers, which get them only from here."""

        def hand_on(number: int) -> None:
            if number != signal.SIGHUP:
                if not self._is_leaving.is_set():
                    self._left_at = time.monotonic() + self._config.drain_delay
                (self._is_hurried if self._is_leaving.is_set() else self._is_leaving).set()
            for worker in self._workers:
                worker.connection.ask("signal", number)

        return {number: partial(hand_on, number) for number in FORWARDED_SIGNALS}
