"""A server's state: what it holds at a moment, read inside its process, and what must be so when nobody asks it."""

import asyncio
import ctypes
import gc
import logging
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, fields
from typing import Any

import psutil
from aiohttp import web

from chairlift.api.app import Api
from chairlift.api.errors import Handler
from chairlift.engine.async_llm import AsyncLLM

NUMBER_HEADER = "X-Soak-Number"
LEFT = "left"


@dataclass(frozen=True, slots=True)
class ServerState:
    """What a server holds. Everything but `server_log` and `faults` is a number at one moment."""

    num_slots: int
    num_free_slots: int
    num_sequences: int  # waiting and running, in the scheduler
    num_generations: int  # that `AsyncLLM` follows
    num_routes: int  # sequences whose tokens the text side waits for
    num_active: int  # POST requests between their headers and their last byte
    num_connections: int
    num_tasks: int
    num_threads: int
    num_fds: int
    num_objects: int  # that the garbage collector knows; 0 unless counted
    rss_mb: float
    faults: list[str] = field(default_factory=list)  # what was logged as an error, and books that do not agree
    server_log: dict[str, list[str]] = field(default_factory=dict)  # statuses of its arrivals, by a request's number

    @property
    def leftovers(self) -> dict[str, int]:
        """What should be zero when nobody asks anything, where it is not."""
        counts = {
            "slots taken": self.num_slots - self.num_free_slots,
            "sequences": self.num_sequences,
            "generations": self.num_generations,
            "routes": self.num_routes,
            "active requests": self.num_active,
            "connections": self.num_connections,
        }
        return {name: count for name, count in counts.items() if count}


@dataclass(frozen=True, slots=True)
class Target:
    """A server that a load is put on, and how its state is read: thoroughly or not, see `Served.read`."""

    url: str
    read: Callable[[bool], Awaitable[ServerState]]


class ServerLog(logging.Handler):
    """Notes every numbered request that reaches the application and how it ends, and every error that is logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.entries: dict[str, list[str]] = {}
        self.faults: list[str] = []

    @web.middleware
    async def note(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The outermost middleware."""
        ending = LEFT
        try:
            response = await handler(request)
            ending = str(response.status)
            return response
        finally:
            if (number := request.headers.get(NUMBER_HEADER)) is not None:
                self.entries.setdefault(number, []).append(ending)

    def emit(self, record: logging.LogRecord) -> None:
        self.faults.append(f"{record.name}: {record.getMessage()} {record.exc_info[1] if record.exc_info else ''}")


@dataclass(frozen=True, slots=True)
class Served:
    """A running server, seen from inside its process."""

    url: str
    llm: AsyncLLM
    api: Api
    server: web.Server
    server_log: ServerLog

    async def read(self, is_thorough: bool) -> ServerState:
        """In the server's own event loop. Thorough: after a garbage collection, with the objects counted.

        The server's log is handed over: what was in it is not told again.
        """
        if is_thorough:
            _tidy()
        process = psutil.Process()
        core, scheduler = self.llm._core, self.llm._core._scheduler
        entries, self.server_log.entries = self.server_log.entries, {}
        faults, self.server_log.faults = self.server_log.faults, []
        return ServerState(
            num_slots=core.config.max_batch_size,
            num_free_slots=core.cache.slots_remaining,
            num_sequences=scheduler.num_waiting + scheduler.num_running,
            num_generations=self.llm.num_unfinished,
            num_routes=len(self.llm._outputs._routes),
            num_active=self.api.num_active,
            num_connections=len(self.server.connections),
            num_tasks=len(asyncio.all_tasks()),
            num_threads=threading.active_count(),
            num_fds=process.num_fds(),
            num_objects=len(gc.get_objects()) if is_thorough else 0,
            rss_mb=process.memory_info().rss / 2**20,
            faults=faults + self._disagreements(),
            server_log=entries,
        )

    def _disagreements(self) -> list[str]:
        """The engine's own check, which may only be made while its thread rests."""
        if self.llm._core.has_work:
            return []
        try:
            self.llm._core.check()
        except AssertionError as error:
            return [f"the engine's books do not agree: {error}"]
        return []


def _tidy() -> None:
    """Collects garbage and returns its memory to the system as far as possible, so that the rest can be compared."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def as_record(state: ServerState) -> dict[str, Any]:
    """For a report: the numbers."""
    return {each.name: getattr(state, each.name) for each in fields(state) if each.name not in ("faults", "server_log")}
