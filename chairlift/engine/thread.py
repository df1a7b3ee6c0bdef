"""The two seams between readers and the engine: commands in, news out. One file holds both.

The engine thread is the only owner of scheduler, cache and model; what passes through the seams is frozen, or given
away. Commands come in through the inbox, which the thread empties between two steps. What comes out gathers in one
update per reader, who is woken once until that is taken: one that is slow finds the news of several steps at once.
The rows of a reader that falls far behind rest until it has caught up; if all are behind, the thread takes no step.

A reader is an event loop: the one beside the thread (`LocalEngine`), or those of other processes (`process.py`).
"""

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from chairlift.config import ResolvedConfig
from chairlift.engine.core import REST_AFTER_S, EngineCore
from chairlift.engine.journal import EngineStats
from chairlift.errors import EngineDead, EngineHung, QueueFull
from chairlift.scheduler import Request, TokenEvent

logger = logging.getLogger(__name__)

MAX_STEPS_AHEAD = 8
"""Steps with news that a reader has not taken, at which nothing is computed for it."""

_JOIN_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Add:
    """Queue these sequences, all or none."""

    requests: list[Request]


@dataclass(frozen=True, slots=True)
class Abort:
    """End these sequences, wherever they are."""

    request_ids: list[str]


class Stop:
    """End the thread. Abort what still runs before: it gets no event."""


class Leave:
    """The reader is gone: end all that is its."""


class Taken:
    """The reader has taken an update for which the thread may be waiting."""


@dataclass(frozen=True, slots=True)
class Call:
    """Call this with the engine and deliver what it returns. `deliver` must not block."""

    function: Callable[[EngineCore], Any]
    deliver: Callable[[Any], None]


Command = Add | Abort | Call | Leave | Stop | Taken


@dataclass(frozen=True, slots=True)
class Rejection:
    """Sequences that the scheduler did not take, and why."""

    request_ids: list[str]
    error: QueueFull | ValueError


@dataclass(slots=True)
class Update:
    """News for one reader: events and rejections in order, or the engine's death."""

    events: list[TokenEvent] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    death: BaseException | None = None
    num_parts: int = 0  # that were added

    def add(self, part: "Update") -> None:
        """What is new comes last."""
        self.events += part.events
        self.rejections += part.rejections
        self.death = self.death or part.death
        self.num_parts += 1

    def __bool__(self) -> bool:
        return bool(self.events or self.rejections or self.death)


class Engine(Protocol):
    """An engine as its reader sees it, wherever it runs. All but `send` is for one event loop."""

    config: ResolvedConfig
    vocab_size: int

    @property
    def is_alive(self) -> bool:
        """False once it can do nothing any more."""
        ...

    def start(self, wake: Callable[[], None]) -> None:
        """`wake`: called, on some thread, when there are news and the reader does not know; must not block."""
        ...

    def send(self, command: Command) -> None:
        """From any thread. Obeyed before the next step."""
        ...

    def take(self) -> Update:
        """All news since the last call. If there are none, the reader is woken with the next."""
        ...

    def read_stats(self) -> EngineStats:
        """What it has done so far, also if it hangs, is dead or was closed."""
        ...

    async def until_dead(self) -> EngineDead:
        """Returns when it will do nothing any more, of which there may be no other news."""
        ...

    async def close(self, *, waits: bool = True) -> None:
        """Stops it. `waits`: for what it is at, for some seconds."""
        ...


class Port:
    """One reader's ends of both seams."""

    def __init__(self, inbox: "SimpleQueue[tuple[Port, Command]]", wake: Callable[[], None]) -> None:
        self._inbox = inbox
        self._wake = wake
        self._lock = threading.Lock()  # of the next two
        self._untaken = Update()
        self._is_told = False  # the reader knows that there are, or may be, news
        self.num_open = 0  # sequences that have not ended; this and the next are the engine thread's
        self.held: set[str] = set()  # those of them that rest

    @property
    def is_behind(self) -> bool:
        return self._untaken.num_parts >= MAX_STEPS_AHEAD

    def send(self, command: Command) -> None:
        """See `Engine`."""
        self._inbox.put((self, command))

    def take(self) -> Update:
        """See `Engine`."""
        with self._lock:
            update, self._untaken = self._untaken, Update()
            self._is_told = bool(update)
        if update.num_parts >= MAX_STEPS_AHEAD:
            self.send(Taken())
        return update

    def tell(self, update: Update) -> None:
        """On the engine's thread: adds news."""
        if not update:
            return
        with self._lock:
            self._untaken.add(update)
            is_told, self._is_told = self._is_told, True
        if not is_told:
            self._wake()


class EngineThread:
    """Runs an `EngineCore` in a thread of its own, and obeys commands between two steps."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._inbox: SimpleQueue[tuple[Port, Command]] = SimpleQueue()
        self._ports: list[Port] = []
        self._ports_of: dict[str, Port] = {}  # by sequence that has not ended
        self._thread = threading.Thread(target=self._run, name="chairlift-engine", daemon=True)
        self._num_turns = 0
        self._is_waiting = True

    @property
    def progress(self) -> int | None:
        """Grows with every step; None while the thread waits for work, or for its readers."""
        return None if self._is_waiting else self._num_turns

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def connect(self, wake: Callable[[], None]) -> Port:
        """For one more reader, until it sends `Leave`; see `Engine.start`."""
        port = Port(self._inbox, wake)
        self._ports.append(port)
        return port

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the thread to end; True if it has."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    async def until_hung(self, limit: float) -> EngineDead:
        """Returns when a step did not come back within `limit` seconds, or the thread or another rank is gone."""
        interval = min(1.0, limit / 4)
        seen, num_looks = None, 0
        while num_looks * interval < limit:
            # It counts looks rather than time: a stopped process or a blocked loop is not the engine's fault.
            await asyncio.sleep(interval)
            if not self.is_alive:
                return EngineHung("the engine's thread is gone")
            if (failure := self._core.ranks.failure) is not None:
                return EngineDead(failure)
            progress = self.progress
            num_looks = num_looks + 1 if progress is not None and progress == seen else 0
            seen = progress
        return EngineHung(f"a step did not come back within {limit:g} s")

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # whatever it was, clients wait for tokens
            logger.critical("the engine died in a step", exc_info=error)
            for port in self._ports:
                port.tell(Update(death=error))

    @property
    def _can_step(self) -> bool:
        behind = [port.is_behind for port in self._ports if port.num_open]
        return self._core.has_work and not (behind and all(behind))

    def _turn(self) -> bool:
        """Obeys what has come in, then takes one step. False after `Stop`."""
        updates = defaultdict[Port, Update](Update)
        self._num_turns += 1
        for port, command in self._commands():
            if isinstance(command, Stop):
                return False
            self._obey(port, command, updates)
        self._tell(updates)  # a refusal need not wait for the step
        if self._can_step:
            updates = defaultdict[Port, Update](Update)
            self._sort(self._core.step(), updates)
            self._tell(updates)
        return True

    def _sort(self, events: Sequence[TokenEvent], updates: defaultdict[Port, Update]) -> None:
        """Adds each event to the news of the sequence's reader."""
        for event in events:
            updates[self._ports_of[event.request_id]].events.append(event)
            if event.finish_reason is not None:
                port = self._ports_of.pop(event.request_id)
                port.num_open -= 1
                port.held.discard(event.request_id)

    def _tell(self, updates: defaultdict[Port, Update]) -> None:
        for port, update in updates.items():
            port.tell(update)
            if port.is_behind and len(self._ports) > 1:
                self._hold(port, [event.request_id for event in update.events if event.finish_reason is None])

    def _hold(self, port: Port, request_ids: list[str]) -> None:
        """So that the others need not wait for a reader that is slow."""
        port.held.update(request_ids)
        self._core.hold(request_ids, True)

    def _commands(self) -> list[tuple[Port, Command]]:
        """All commands that have come in; waits for one if no step can be taken."""
        commands = []
        if not self._can_step:
            self._is_waiting = True
            commands.append(self._wait())
            self._is_waiting = False
        while not self._inbox.empty():
            commands.append(self._inbox.get())
        return commands

    def _wait(self) -> tuple[Port, Command]:
        try:
            return self._inbox.get(timeout=REST_AFTER_S)
        except Empty:
            while self._core.rest() and self._inbox.empty():
                pass
            return self._inbox.get()

    def _obey(
        self, port: Port, command: Add | Abort | Call | Leave | Taken, updates: defaultdict[Port, Update]
    ) -> None:
        match command:
            case Taken():  # it has ended the wait
                if port.held:
                    self._core.hold(list(port.held), False)
                    port.held.clear()
            case Call():
                command.deliver(command.function(self._core))
            case Abort():
                self._abort(command.request_ids, updates)
            case Add():
                names = [request.request_id for request in command.requests]
                try:
                    self._sort(self._core.add(*command.requests), updates)
                    self._ports_of.update(dict.fromkeys(names, port))
                    port.num_open += len(names)
                except (QueueFull, ValueError) as error:
                    updates[port].rejections.append(Rejection(names, error))
            case Leave():
                self._abort([name for name, owner in self._ports_of.items() if owner is port], updates)
                self._ports.remove(port)

    def _abort(self, request_ids: list[str], updates: defaultdict[Port, Update]) -> None:
        ended = [self._core.abort(request_id) for request_id in request_ids]
        self._sort([event for event in ended if event is not None], updates)


class LocalEngine:
    """An engine in a thread of this process, with one reader; see `Engine`."""

    def __init__(self, core: EngineCore) -> None:
        self.config = core.config
        self.vocab_size = core.vocab_size
        self._core = core
        self.thread: EngineThread | None = None
        self.port: Port | None = None

    @property
    def is_alive(self) -> bool:
        return self.thread is None or self.thread.is_alive

    def start(self, wake: Callable[[], None]) -> None:
        self.thread = EngineThread(self._core)
        self.port = self.thread.connect(wake)
        self.thread.start()

    def connect(self, wake: Callable[[], None]) -> Port:
        """For one more reader; see `EngineThread.connect`."""
        assert self.thread is not None, "it was started"
        return self.thread.connect(wake)

    def send(self, command: Command) -> None:
        if self.port is not None:
            self.port.send(command)

    def take(self) -> Update:
        return Update() if self.port is None else self.port.take()

    def read_stats(self) -> EngineStats:
        return self._core.read_stats()

    async def until_dead(self) -> EngineDead:
        assert self.thread is not None, "it was started"
        return await self.thread.until_hung(self.config.step_timeout)

    async def close(self, *, waits: bool = True) -> None:
        if self.thread is not None:
            self.send(Stop())
            if await asyncio.to_thread(self.thread.join, _JOIN_TIMEOUT_S if waits else 0.0):
                self.thread = self.port = None  # and with them the way to the reader: the memory is free at once
            else:
                logger.error("the engine thread did not stop; it is left behind")
        await asyncio.to_thread(self._core.ranks.close)


def describe_death(error: BaseException) -> str:
    """Why an engine does nothing any more, in words."""
    return str(error) if isinstance(error, EngineDead) else f"a step failed: {type(error).__name__}: {error}"
