"""A few threads with bounded queues, which clients share fairly, for what must not run on the event loop.

The interpreter runs one thread at a time, so more threads would speed up nothing and slow down every stream.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from chairlift.engine.async_llm import OffLoop
from chairlift.errors import ClientTooBusy, ServerTooBusy

_STUCK_AFTER_S = 30.0
_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class _ClientCall:
    """One pending or running call of a client."""

    client: str
    has_come: asyncio.Future[None]
    begin: float | None = None  # None: it waits


class CallThreads:
    """Threads that run the calls of many clients, who take turns. Used from one event loop.

    If there are several threads, no client gets all of them. A call whose client left before its turn is not made; one
    that has begun keeps its thread, and counts, until it ends.
    """

    def __init__(self, num_threads: int, max_per_client: int | None = None, max_waiting: int | None = None) -> None:
        """Limits: `max_per_client` calls run or wait (`ClientTooBusy`), and `max_waiting` wait (`ServerTooBusy`)."""
        self._num_threads = num_threads
        self._max_per_client = max_per_client
        self._max_waiting = max_waiting
        self._max_running_per_client = max(1, num_threads - 1)
        self._waiting: dict[str, deque[_ClientCall]] = {}  # clients in the order of their turns
        self._running: set[_ClientCall] = set()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="chairlift-worker")

    @property
    def is_stuck(self) -> bool:
        """True if a call has been running so long that it may never end."""
        now = time.monotonic()
        return any(queued.begin is not None and now - queued.begin > _STUCK_AFTER_S for queued in self._running)

    def for_client(self, client: str) -> OffLoop:

        async def run(function: Callable[..., _T], /, *args: Any) -> _T:
            return await self._run(client, partial(function, *args))

        return run

    def close(self) -> None:
        """Ends each thread after its current call. Pending calls are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, client: str, call: Callable[[], _T]) -> _T:
        self._check_room(client)
        loop = asyncio.get_running_loop()
        queued = _ClientCall(client, loop.create_future())
        self._waiting.setdefault(client, deque()).append(queued)
        self._dispatch()
        try:
            await queued.has_come
            result = loop.run_in_executor(self._threads, call)
        except BaseException as error:
            self._end(queued)
            if isinstance(error, RuntimeError):
                raise ServerTooBusy("the system has no thread for this request; try again later") from error
            raise

        def finish(done: asyncio.Future[_T]) -> None:
            if not done.cancelled():
                done.exception()  # if its client has left, nothing else retrieves it, and asyncio would complain
            self._end(queued)

        result.add_done_callback(finish)
        try:
            return await asyncio.shield(result)
        finally:
            del call, result  # an error's traceback holds this frame: without a cycle both are freed at once

    def _check_room(self, client: str) -> None:
        num_of_client = len(self._waiting.get(client, ())) + self._num_running(client)
        if self._max_per_client is not None and num_of_client >= self._max_per_client:
            raise ClientTooBusy(f"{self._max_per_client} of your requests are being checked; send fewer at once")
        num_waiting = sum(map(len, self._waiting.values()))
        if self._max_waiting is not None and num_waiting >= self._max_waiting:
            raise ServerTooBusy(f"{num_waiting} requests wait to be checked; try again later")

    def _dispatch(self) -> None:
        while len(self._running) < self._num_threads:
            able = (each for each in self._waiting if self._num_running(each) < self._max_running_per_client)
            if (client := next(able, None)) is None:
                return
            others = self._waiting.pop(client)
            queued = others.popleft()
            if others:  # the client goes behind the others
                self._waiting[client] = others
            queued.begin = time.monotonic()
            self._running.add(queued)
            if not queued.has_come.cancelled():  # otherwise its client has just left, and `_run` is about to end it
                queued.has_come.set_result(None)

    def _end(self, queued: _ClientCall) -> None:
        """Removes a call that has ended or is not made."""
        if queued.begin is None:
            self._waiting[queued.client].remove(queued)
            if not self._waiting[queued.client]:
                del self._waiting[queued.client]
        self._running.discard(queued)
        self._dispatch()

    def _num_running(self, client: str) -> int:
        return sum(queued.client == client for queued in self._running)
