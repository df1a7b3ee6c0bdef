"""The two seams between the event loop and the engine: the inbox in, the mailbox out. One file holds both.

The engine thread is the only owner of scheduler, cache and model; what passes through the seams is frozen, or given
away. Commands come in through the inbox, which the thread empties between two steps. What comes out gathers in one
update, and the loop is woken once until it has taken that: a loop that is slow finds the news of several steps at once.
When it falls far behind, the thread takes no step until it has caught up.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from chairlift.engine.core import REST_AFTER_S, EngineCore
from chairlift.errors import EngineDead, EngineHung, QueueFull
from chairlift.scheduler import Request, TokenEvent

logger = logging.getLogger(__name__)

MAX_STEPS_AHEAD = 8
"""Steps with news not taken by the loop at which the thread stops stepping."""


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


class Taken:
    """The loop has taken an update for which the thread may be waiting."""


@dataclass(frozen=True, slots=True)
class Call:
    """Call this with the engine and deliver what it returns. `deliver` must not block."""

    function: Callable[[EngineCore], Any]
    deliver: Callable[[Any], None]


Command = Add | Abort | Call | Stop | Taken


@dataclass(frozen=True, slots=True)
class Rejection:
    """Sequences that the scheduler did not take, and why."""

    requests: list[Request]
    error: QueueFull | ValueError


@dataclass(slots=True)
class Update:
    """What the mailbox carries: events and rejections in order, or the engine's death."""

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


class EngineThread:
    """Runs an `EngineCore` in a thread of its own, and obeys commands between two steps."""

    def __init__(self, core: EngineCore, wake: Callable[[], None]) -> None:
        """`wake`: called on the engine's thread when there are news and the loop does not know; must not block."""
        self._core = core
        self._wake = wake
        self._lock = threading.Lock()  # of the next two
        self._untaken = Update()
        self._is_told = False  # the loop knows that there are, or may be, news
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="chairlift-engine", daemon=True)
        self._num_turns = 0
        self._is_waiting = True

    @property
    def progress(self) -> int | None:
        """Grows with every step; None while the thread waits for work, or for the loop."""
        return None if self._is_waiting else self._num_turns

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def send(self, command: Command) -> None:
        """From any thread. Obeyed before the next step."""
        self._inbox.put(command)

    def take(self) -> Update:
        """On the loop: all news since the last call. If there are none, the loop is woken with the next."""
        with self._lock:
            update, self._untaken = self._untaken, Update()
            self._is_told = bool(update)
        if update.num_parts >= MAX_STEPS_AHEAD:
            self.send(Taken())
        return update

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
            self._tell(Update(death=error))

    @property
    def _can_step(self) -> bool:
        return self._core.has_work and self._untaken.num_parts < MAX_STEPS_AHEAD

    def _turn(self) -> bool:
        """Obeys what has come in, then takes one step. False after `Stop`."""
        update = Update()
        self._num_turns += 1
        for command in self._commands():
            if isinstance(command, Stop):
                return False
            self._obey(command, update)
        self._tell(update)  # a refusal need not wait for the step
        if self._can_step:
            self._tell(Update(events=self._core.step()))
        return True

    def _tell(self, update: Update) -> None:
        if not update:
            return
        with self._lock:
            self._untaken.add(update)
            is_told, self._is_told = self._is_told, True
        if not is_told:
            self._wake()

    def _commands(self) -> list[Command]:
        """All commands that have come in; waits for one if no step can be taken."""
        commands = []
        if not self._can_step:
            self._is_waiting = True
            commands.append(self._wait())
            self._is_waiting = False
        while not self._inbox.empty():
            commands.append(self._inbox.get())
        return commands

    def _wait(self) -> Command:
        try:
            return self._inbox.get(timeout=REST_AFTER_S)
        except Empty:
            while self._core.rest() and self._inbox.empty():
                pass
            return self._inbox.get()

    def _obey(self, command: Add | Abort | Call | Taken, update: Update) -> None:
        match command:
            case Taken():
                pass  # it has ended the wait
            case Call():
                command.deliver(command.function(self._core))
            case Abort():
                ended = [self._core.abort(request_id) for request_id in command.request_ids]
                update.events += [event for event in ended if event is not None]
            case Add():
                try:
                    update.events += self._core.add(*command.requests)
                except (QueueFull, ValueError) as error:
                    update.rejections.append(Rejection(command.requests, error))
