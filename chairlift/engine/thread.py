"""The interface between readers and the engine's thread: commands in, news out.

The engine's thread is the only owner of scheduler, cache and model; objects that pass between threads are frozen, or
handed over. Commands arrive in the inbox, which the thread empties between two steps. News are merged into one update
per reader, which is woken once until it takes the update: a slow reader gets the news of several steps at once. The
rows of a reader that lags far behind are paused until it has caught up; if all readers lag, the thread takes no step.

A reader is an event loop: the one in the same process (`LocalEngine`), or those of other processes (`process/`).
"""

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from chairlift.config import ResolvedConfig
from chairlift.engine.core import EngineCore
from chairlift.engine.journal import EngineStats
from chairlift.errors import EngineDead, EngineHung, QueueFull
from chairlift.params import FinishReason
from chairlift.scheduler import Request, TokenEvent

logger = logging.getLogger(__name__)

MAX_STEPS_AHEAD = 8
"""At this number of steps whose news a reader has not taken, nothing more is computed for it."""

_JOIN_TIMEOUT_S = 10.0
_SAVE_PATIENCE_S = 0.002  # at rest, for which a new command may have to wait


@dataclass(frozen=True, slots=True)
class Add:
    """Queue these sequences, all or none."""

    requests: list[Request]


@dataclass(frozen=True, slots=True)
class Abort:
    """End these sequences, wherever they are."""

    request_ids: list[str]


class Stop:
    """End the thread. Running requests get no event, so abort them first."""


class Leave:
    """The reader is gone: end all its sequences."""


class Taken:
    """The reader has taken an update for which the thread may be waiting."""


@dataclass(frozen=True, slots=True)
class Invoke:
    """Call this with the engine and deliver what it returns. `deliver` must not block."""

    function: Callable[[EngineCore], Any]
    deliver: Callable[[Any], None]


Command = Add | Abort | Invoke | Leave | Stop | Taken


@dataclass(slots=True)
class Update:
    """News for one reader: events in order, or the engine's death."""

    events: list[TokenEvent] = field(default_factory=list)
    death: BaseException | None = None
    num_parts: int = 0  # updates that were merged into this one

    def add(self, part: "Update") -> None:
        """Appends a newer update."""
        self.events += part.events
        self.death = self.death or part.death
        self.num_parts += 1

    def __bool__(self) -> bool:
        return bool(self.events or self.death)


class Engine(Protocol):
    """An engine as its reader sees it, in any process. All but `send` must be called on one event loop."""

    config: ResolvedConfig
    vocab_size: int

    @property
    def is_alive(self) -> bool:
        """False once the engine has stopped for good, and as long as its process does not answer."""
        ...

    def start(self, wake: Callable[[], None]) -> None:
        """`wake`: called, on any thread, when there are news and the reader was not woken yet; must not block."""
        ...

    def send(self, command: Command) -> None:
        """Sends a command, which is executed before the next step. May be called from any thread."""
        ...

    def take(self) -> Update:
        """All news since the last call. If there are none, the reader is woken by the next ones."""
        ...

    def read_stats(self) -> EngineStats:
        """Returns what the engine has done so far, also if it hangs, is dead or was closed."""
        ...

    async def until_dead(self) -> EngineDead:
        """Returns when the engine has stopped for good, which may come with no other news."""
        ...

    async def close(self, *, waits: bool = True) -> None:
        """Stops the engine. `waits`: for its current step, some seconds at most."""
        ...


class Subscription:
    """One reader's end of the seams to the engine's thread."""

    def __init__(self, inbox: "SimpleQueue[tuple[Subscription, Command]]", wake: Callable[[], None]) -> None:
        self._inbox = inbox
        self._wake = wake
        self._lock = threading.Lock()  # for the next two
        self._untaken = Update()
        self._is_told = False  # the reader was woken, or will take news again anyway
        self.num_open = 0  # sequences that have not ended; this and the next are the engine thread's
        self.paused: set[str] = set()  # those of them that are paused

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
        with self._lock:
            self._untaken.add(update)
            is_told, self._is_told = self._is_told, True
        if not is_told:
            self._wake()


class LocalEngine:
    """An engine in a thread of this process, with one reader or more; see `Engine`."""

    def __init__(self, core: EngineCore) -> None:
        self.config, self.vocab_size = core.config, core.vocab_size
        self.core = core  # once the thread runs, it alone may use this
        self._inbox: SimpleQueue[tuple[Subscription, Command]] = SimpleQueue()
        self._subscriptions: list[Subscription] = []
        self._subscription_of: dict[str, Subscription] = {}  # by the id of a sequence that has not ended
        self._updates = defaultdict[Subscription, Update](Update)  # not yet delivered
        self._thread: threading.Thread | None = None
        self._num_iterations = 0
        self._is_waiting = True
        self.subscription: Subscription | None = None  # of the reader that started it

    @property
    def is_alive(self) -> bool:
        return self._thread is None or self._thread.is_alive()

    @property
    def progress(self) -> int | None:
        """Grows with every step; None while the thread waits for work, or for its readers."""
        return None if self._is_waiting else self._num_iterations

    def start(self, wake: Callable[[], None]) -> None:
        self.subscription = self.subscribe(wake)
        self._thread = threading.Thread(target=self._run, name="chairlift-engine", daemon=True)
        self._thread.start()

    def subscribe(self, wake: Callable[[], None]) -> Subscription:
        """For one more reader, until it sends `Leave`; see `Engine.start`."""
        subscription = Subscription(self._inbox, wake)
        self._subscriptions.append(subscription)
        return subscription

    def send(self, command: Command) -> None:
        if self.subscription is not None:
            self.subscription.send(command)

    def take(self) -> Update:
        return Update() if self.subscription is None else self.subscription.take()

    def read_stats(self) -> EngineStats:
        return self.core.read_stats()

    async def until_dead(self) -> EngineDead:
        """See `Engine`. Returns when a step exceeds its time limit, or when the thread or another rank is gone."""
        limit = self.config.step_timeout
        interval = min(1.0, limit / 4)
        seen, num_looks = None, 0
        while num_looks * interval < limit:
            # Counts looks rather than time: a stopped process or a blocked loop is not the engine's fault.
            await asyncio.sleep(interval)
            if not self.is_alive:
                return EngineHung("the engine's thread is gone")
            if (failure := self.core.ranks.failure) is not None:
                return EngineDead(failure)
            progress = self.progress
            num_looks = num_looks + 1 if progress is not None and progress == seen else 0
            seen = progress
        return EngineHung(f"a step took longer than {limit:g} s")

    async def close(self, *, waits: bool = True) -> None:
        if self._thread is not None:
            self.send(Stop())
            await asyncio.to_thread(self._thread.join, _JOIN_TIMEOUT_S if waits else 0.0)
            if self._thread.is_alive():
                logger.error("the engine thread did not stop in time; it runs until the process ends")
            else:
                self._thread = self.subscription = None
                self._subscriptions.clear()  # and with them references to the readers, to free the memory at once
        await asyncio.to_thread(self.core.close)

    def _run(self) -> None:
        try:
            while self._iterate():
                pass
        except BaseException as error:  # of any kind, because clients wait for tokens
            logger.critical("the engine died in a step", exc_info=error)
            for subscription in self._subscriptions:
                subscription.tell(Update(death=error))

    @property
    def _can_step(self) -> bool:
        behind = [subscription.is_behind for subscription in self._subscriptions if subscription.num_open]
        return self.core.has_work and not (behind and all(behind))

    def _iterate(self) -> bool:
        """Executes pending commands, then takes one step. False after `Stop`."""
        self._num_iterations += 1
        for subscription, command in self._commands():
            if isinstance(command, Stop):
                return False
            self._obey(subscription, command)
        self._tell()  # a refusal need not wait for the step
        if self._can_step:
            self._sort(self.core.step())
            self._tell()
        return True

    def _sort(self, events: Iterable[TokenEvent]) -> None:
        """Adds each event to the news of the sequence's reader."""
        for event in events:
            self._updates[self._subscription_of[event.request_id]].events.append(event)
            if event.finish_reason is not None:
                subscription = self._subscription_of.pop(event.request_id)
                subscription.num_open -= 1
                subscription.paused.discard(event.request_id)

    def _tell(self) -> None:
        updates, self._updates = self._updates, defaultdict(Update)
        for subscription, update in updates.items():
            subscription.tell(update)
            if subscription.is_behind and len(self._subscriptions) > 1:
                # Pause its rows, so that other readers need not wait for it.
                unfinished = [event.request_id for event in update.events if event.finish_reason is None]
                subscription.paused.update(unfinished)
                self.core.pause(unfinished)

    def _commands(self) -> list[tuple[Subscription, Command]]:
        """All commands that have come in; waits for one if no step can be taken."""
        commands = [] if self._can_step else [self._wait()]
        while not self._inbox.empty():
            commands.append(self._inbox.get())
        return commands

    def _wait(self) -> tuple[Subscription, Command]:
        self._is_waiting = True
        try:
            while self.core.save_next(_SAVE_PATIENCE_S):
                if not self._inbox.empty():
                    break
            return self._inbox.get(timeout=self.core.idle_after)
        except Empty:
            while self.core.use_idle_time() and self._inbox.empty():
                pass
            return self._inbox.get()
        finally:
            self._is_waiting = False

    def _obey(self, subscription: Subscription, command: Command) -> None:
        match command:
            case Taken():  # its arrival has ended the wait
                if subscription.paused:
                    self.core.resume(list(subscription.paused))
                    subscription.paused.clear()
            case Invoke():
                command.deliver(command.function(self.core))
            case Abort():
                self._sort(filter(None, map(self.core.abort, command.request_ids)))
            case Add():
                names = [request.request_id for request in command.requests]
                try:
                    self._sort(self.core.add(*command.requests))
                    self._subscription_of.update(dict.fromkeys(names, subscription))
                    subscription.num_open += len(names)
                except (QueueFull, ValueError) as error:
                    self._updates[subscription].events += [
                        TokenEvent(name, [], FinishReason.ABORT, error=str(error), rejection=error) for name in names
                    ]
            case Leave():
                self._obey(
                    subscription,
                    Abort([name for name, owner in self._subscription_of.items() if owner is subscription]),
                )
                self._subscriptions.remove(subscription)


def describe_death(error: BaseException) -> str:
    """Says in words why an engine died."""
    return str(error) if isinstance(error, EngineDead) else f"a step failed: {type(error).__name__}: {error}"
