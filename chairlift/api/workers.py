"""Where work is done that would hold up the event loop: few threads, shared fairly by clients, with bounded queues.

The interpreter runs one thread at a time, so more threads would make nothing faster and every stream slower.
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
class _Turn:
    """A client's turn to have something called."""

    client: str
    has_come: asyncio.Future[None]
    begin: float | None = None  # None: it waits


class Workers:
    """Threads for the calls of many clients, who take turns. Used from one event loop.

    One thread at least is left for others than the client who has the most. A call whose client left before its turn is
    not made; one that has begun keeps its thread, and counts, until it ends.
    """

    def __init__(self, num_threads: int, max_per_client: int | None = None, max_waiting: int | None = None) -> None:
        """Limits: `max_per_client` calls run or wait (`ClientTooBusy`), and `max_waiting` wait (`ServerTooBusy`)."""
        self._num_threads = num_threads
        self._max_per_client = max_per_client
        self._max_waiting = max_waiting
        self._max_running_per_client = max(1, num_threads - 1)
        self._waiting: dict[str, deque[_Turn]] = {}  # clients in the order of their turns
        self._running: set[_Turn] = set()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="chairlift-worker")

    @property
    def is_stuck(self) -> bool:
        """True if some call runs for so long that it may never end."""
        now = time.monotonic()
        return any(turn.begin is not None and now - turn.begin > _STUCK_AFTER_S for turn in self._running)

    def for_client(self, client: str) -> OffLoop:
        """Calls functions in this client's turn."""

        async def run(function: Callable[..., _T], /, *args: Any) -> _T:
            return await self._run(client, partial(function, *args))

        return run

    def close(self) -> None:
        """Ends the threads, each after its present call. What waits is not done."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, client: str, call: Callable[[], _T]) -> _T:
        self._check_room(client)
        loop = asyncio.get_running_loop()
        turn = _Turn(client, loop.create_future())
        self._waiting.setdefault(client, deque()).append(turn)
        self._dispatch()
        try:
            await turn.has_come
            result = loop.run_in_executor(self._threads, call)
        except BaseException as error:
            self._end(turn)
            if isinstance(error, RuntimeError):
                raise ServerTooBusy("the system has no thread for this request; try again later") from error
            raise

        def finish(done: asyncio.Future[_T]) -> None:
            if not done.cancelled():
                done.exception()  # if its client has left, nobody else asks for it, and asyncio would complain
            self._end(turn)

        result.add_done_callback(finish)
        try:
            return await asyncio.shield(result)
        finally:
            del call, result  # an error's traceback holds this frame: without a cycle they live no longer than needed

    def _check_room(self, client: str) -> None:
        num_of_client = len(self._waiting.get(client, ())) + self._num_running(client)
        if self._max_per_client is not None and num_of_client >= self._max_per_client:
            raise ClientTooBusy(f"{self._max_per_client} of your requests are being checked; send fewer at once")
        num_waiting = sum(map(len, self._waiting.values()))
        if self._max_waiting is not None and num_waiting >= self._max_waiting:
            raise ServerTooBusy(f"{num_waiting} requests wait to be checked; try again later")

    def _dispatch(self) -> None:
        """Begins the turns for which there are threads."""
        while len(self._running) < self._num_threads:
            able = (each for each in self._waiting if self._num_running(each) < self._max_running_per_client)
            if (client := next(able, None)) is None:
                return
            turns = self._waiting.pop(client)
            turn = turns.popleft()
            if turns:  # the next turn is another's
                self._waiting[client] = turns
            turn.begin = time.monotonic()
            self._running.add(turn)
            if not turn.has_come.cancelled():  # otherwise its client has just left, and `_run` is about to end the turn
                turn.has_come.set_result(None)

    def _end(self, turn: _Turn) -> None:
        """Its call is over, or will not be made."""
        if turn.begin is None:
            self._waiting[turn.client].remove(turn)
            if not self._waiting[turn.client]:
                del self._waiting[turn.client]
        self._running.discard(turn)
        self._dispatch()

    def _num_running(self, client: str) -> int:
        return sum(turn.client == client for turn in self._running)
