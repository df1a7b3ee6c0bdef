"""The two seams between the event loop and the engine: the inbox in, the mailbox out. One file holds both.

The engine thread is the only owner of scheduler, cache and model. Commands reach it through the inbox, which it
empties between two steps; what it has to tell goes out through one callback per step, which must be quick and must
not block (`loop.call_soon_threadsafe`).
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

from chairlift.engine.core import EngineCore
from chairlift.engine.snapshot import Snapshot
from chairlift.errors import QueueFull
from chairlift.scheduler import Request, TokenEvent

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Add:
    """Queue these sequences, all or none."""

    requests: list[Request]


@dataclass(frozen=True, slots=True)
class Abort:
    """End these sequences, wherever they are."""

    request_ids: list[str]


class Stop:
    """End the thread. What still runs is not told; abort it before."""


@dataclass(frozen=True, slots=True)
class Look:
    """Hand over a snapshot. `deliver` must be quick and must not block."""

    deliver: Callable[[Snapshot], None]


Command = Add | Abort | Look | Stop


@dataclass(frozen=True, slots=True)
class Rejection:
    """Sequences that the scheduler did not take, and why."""

    requests: list[Request]
    error: QueueFull


@dataclass(slots=True)
class Update:
    """What the mailbox carries: one step's events and rejections, or the engine's death."""

    events: list[TokenEvent] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    death: BaseException | None = None

    def __bool__(self) -> bool:
        return bool(self.events or self.rejections or self.death)


class EngineThread:
    """Runs an `EngineCore` in a thread of its own: between two steps it obeys commands, otherwise it steps."""

    def __init__(self, core: EngineCore, deliver: Callable[[Update], None]) -> None:
        self._core = core
        self._deliver = deliver
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="chairlift-engine", daemon=True)
        self._num_turns = 0
        self._is_waiting = True

    @property
    def progress(self) -> int | None:
        """Grows with every step; None while there is nothing to do."""
        return None if self._is_waiting else self._num_turns

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def send(self, command: Command) -> None:
        """From any thread. Obeyed before the next step."""
        self._inbox.put(command)

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the thread to end; True if it has."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # whatever it was, somebody waits for tokens
            logger.critical("the engine died in a step", exc_info=error)
            self._deliver(Update(death=error))

    def _turn(self) -> bool:
        """Obeys what has come in, then takes one step. False after `Stop`."""
        update = Update()
        self._num_turns += 1
        for command in self._commands():
            if isinstance(command, Stop):
                return False
            self._obey(command, update)
        if update:
            self._deliver(update)  # who was refused need not wait for the step
        if self._core.has_work and (events := self._core.step()):
            self._deliver(Update(events=events))
        return True

    def _commands(self) -> list[Command]:
        """All that has come in; waits for something if there is nothing else to do."""
        commands = []
        if not self._core.has_work:
            self._is_waiting = True
            commands.append(self._inbox.get())
            self._is_waiting = False
        while not self._inbox.empty():
            commands.append(self._inbox.get())
        return commands

    def _obey(self, command: Add | Abort | Look, update: Update) -> None:
        if isinstance(command, Look):
            command.deliver(self._core.take_snapshot())
            return
        if isinstance(command, Abort):
            ended = [self._core.abort(request_id) for request_id in command.request_ids]
            update.events += [event for event in ended if event is not None]
            return
        try:
            self._core.add(*command.requests)
        except QueueFull as error:
            update.rejections.append(Rejection(command.requests, error))
