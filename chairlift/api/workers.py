"""Where work is done that would hold up the event loop: few threads, shared fairly by clients, with bounded queues.

The interpreter runs one thread at a time, so more threads would make nothing faster and every stream slower.
"""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from chairlift.engine.async_llm import OffLoop
from chairlift.errors import ClientTooBusy, ServerTooBusy

_STUCK_AFTER_S = 30.0

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class _Task:
    """A call for a client, and where its result goes."""

    client: str
    call: Callable[[], object] | None
    done: asyncio.Future[Any]
    begin: float | None = None  # None: it waits


class Workers:
    """Threads for the calls of many clients, who take turns. Used from one event loop.

    One thread at least is left for others than the client who has the most. A call whose client left before its turn is
    not made.
    """

    def __init__(self, num_threads: int, max_per_client: int | None = None, max_waiting: int | None = None) -> None:
        """Limits: `max_per_client` calls run or wait (`ClientTooBusy`), and `max_waiting` wait (`ServerTooBusy`)."""
        self._num_threads = num_threads
        self._max_per_client = max_per_client
        self._max_waiting = max_waiting
        self._max_running_per_client = max(1, num_threads - 1)
        self._waiting: dict[str, deque[_Task]] = {}  # clients in the order of their turns
        self._num_waiting = 0
        self._running: set[_Task] = set()
        self._inbox: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    @property
    def is_stuck(self) -> bool:
        """True if some call runs for so long that it may never end."""
        now = time.monotonic()
        return any(task.begin is not None and now - task.begin > _STUCK_AFTER_S for task in self._running)

    def for_client(self, client: str) -> OffLoop:
        """Calls functions in this client's turn."""

        async def run(function: Callable[..., _T], /, *args: Any) -> _T:
            return await self._run(client, partial(function, *args))

        return run

    def close(self) -> None:
        """Ends the threads, each after its present call. What waits is not done."""
        for _ in self._threads:
            self._inbox.put(None)

    async def _run(self, client: str, call: Callable[[], _T]) -> _T:
        self._check_room(client)
        self._start_threads()
        task = _Task(client, call, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(client, deque()).append(task)
        self._num_waiting += 1
        self._dispatch()
        try:
            result: _T = await task.done
            return result
        finally:
            if task.begin is None:  # its client left before its turn
                self._take_out(task)
            del task  # an error's traceback holds this frame: without a cycle what is in it lives no longer than needed

    def _check_room(self, client: str) -> None:
        num_of_client = len(self._waiting.get(client, ())) + self._num_running(client)
        if self._max_per_client is not None and num_of_client >= self._max_per_client:
            raise ClientTooBusy(f"{self._max_per_client} of your requests are being checked; send fewer at once")
        if self._max_waiting is not None and self._num_waiting >= self._max_waiting:
            raise ServerTooBusy(f"{self._num_waiting} requests wait to be checked; try again later")

    def _start_threads(self) -> None:
        """All of them, or as many as the system has left; tried again with the next call."""
        try:
            while len(self._threads) < self._num_threads:
                thread = threading.Thread(
                    target=_work, args=[self._inbox, self._finish], name="chairlift-worker", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        except RuntimeError as error:
            if not self._threads:
                raise ServerTooBusy("the system has no thread for this request; try again later") from error

    def _dispatch(self) -> None:
        while len(self._running) < self._num_threads and (task := self._next()) is not None:
            self._take_out(task)
            if task.client in self._waiting:  # the next turn is another's
                self._waiting[task.client] = self._waiting.pop(task.client)
            task.begin = time.monotonic()
            self._running.add(task)
            self._inbox.put(task)

    def _next(self) -> _Task | None:
        """The first call of the client whose turn it is."""
        for client, tasks in self._waiting.items():
            if self._num_running(client) < self._max_running_per_client:
                return tasks[0]
        return None

    def _num_running(self, client: str) -> int:
        return sum(task.client == client for task in self._running)

    def _take_out(self, task: _Task) -> None:
        tasks = self._waiting[task.client]
        tasks.remove(task)
        if not tasks:
            del self._waiting[task.client]
        self._num_waiting -= 1

    def _finish(self, task: _Task, result: object, error: BaseException | None) -> None:
        self._running.discard(task)
        if not task.done.done():  # else its client has left
            if error is None:
                task.done.set_result(result)
            else:
                task.done.set_exception(error)
        self._dispatch()


def _work(inbox: "queue.SimpleQueue[_Task | None]", finish: Callable[..., None]) -> None:
    """A thread's life."""
    while (task := inbox.get()) is not None:
        _perform(task, finish)
        del task  # or what it is about would live until the next one comes


def _perform(task: _Task, finish: Callable[..., None]) -> None:
    result: object = None
    failure: BaseException | None = None
    call, task.call = task.call, None
    assert call is not None, "performed once"
    try:
        result = call()
    except BaseException as error:  # whoever waits gets it
        failure = error
    with suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
        task.done.get_loop().call_soon_threadsafe(finish, task, result, failure)
    del call, failure, task  # see `_run`
