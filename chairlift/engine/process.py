"""The seams between processes: an engine here, and its readers, API workers, at the other ends of sockets.

    worker: AsyncLLM -> Link  === Unix socket ===  Line -> Port -> LocalEngine: the engine's process

`Link` is an `Engine` to the worker, and `Line` a reader to the engine; `wire.py` says how they talk. One update at a
time is under way to a worker, the next when it has taken that; what comes meanwhile gathers in the port.

Grammars stay with the engine, which compiles them: a worker has a number instead, and as long as it has that the
engine keeps the grammar. A worker that dies closes its socket, and all that it ran ends.
"""

import asyncio
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NoReturn

from chairlift.config import ResolvedConfig
from chairlift.engine.async_llm import AsyncLLM, call_if_open
from chairlift.engine.journal import EngineStats
from chairlift.engine.text.grammar import Thinking
from chairlift.engine.thread import Abort, Add, Call, Command, Leave, LocalEngine, Taken, Update, describe_death
from chairlift.engine.wire import PackedUpdate, Peer, Service
from chairlift.errors import EngineDead
from chairlift.params import StructuredOutputs
from chairlift.scheduler import Grammar, Request


@dataclass(frozen=True, slots=True)
class _NumberedAdd:
    """`Add`, with the numbers that stand for its sequences from here on, by their names."""

    requests: list[Request]
    numbers: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Release:
    """The worker needs that grammar no more."""

    number: int


@dataclass(frozen=True, slots=True, weakref_slot=True)
class EnginesGrammar:
    """A worker's word for a compiled grammar, as a request's `new_grammar`."""

    number: int

    def __call__(self) -> NoReturn:
        raise AssertionError("only the engine's process can start it")


# --- the worker's end


class Link(Peer):
    """An engine in another process; see `Engine`, all of which is for the event loop."""

    def __init__(
        self, config: ResolvedConfig, vocab_size: int, stats: EngineStats, services: Mapping[str, Service]
    ) -> None:
        """`stats`: as of now; `services`: for the engine's process."""
        super().__init__(services)
        self.config = config
        self.vocab_size = vocab_size
        self.stats = stats  # the newest that are known
        self.grammars = _Grammars(self)
        self._wake: Callable[[], None] = lambda: None
        self._packed: PackedUpdate | None = None
        self._is_told = False
        self._serials = count(1)
        self._names: dict[int, str] = {}  # of sequences, by number

    @property
    def is_alive(self) -> bool:
        return not self.lost.is_set()

    def start(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def send(self, command: Command) -> None:
        match command:
            case Add():
                numbers = {request.request_id: next(self._serials) for request in command.requests}
                self._names |= {number: name for name, number in numbers.items()}
                self.post(_NumberedAdd(command.requests, numbers))
            case Abort():
                self.post(command)
            case Call():
                asked = self.ask(command.function.__name__)
                asked.add_done_callback(lambda done: _deliver(done, command.deliver))
            case _:
                pass  # the engine does not stop for one of its readers

    def take(self) -> Update:
        packed, self._packed = self._packed, None
        self._is_told = packed is not None
        if packed is None:
            return Update()
        self.post(Taken())
        return packed.unpack(self._names)

    def read_stats(self) -> EngineStats:
        return self.stats

    async def until_dead(self) -> EngineDead:
        await self.lost.wait()
        return EngineDead("the engine's process is gone")

    async def close(self, *, waits: bool = True) -> None:
        """Nothing: the socket is there until its process ends."""

    def _receive(self, message: object) -> None:
        if not isinstance(message, PackedUpdate):
            super()._receive(message)
            return
        self._packed = message
        if not self._is_told:
            self._is_told = True
            self._wake()


def _deliver(answer: "asyncio.Future[Any]", deliver: Callable[[Any], None]) -> None:
    """What is no answer means that the engine is dead, of which there are other news."""
    if not answer.cancelled() and answer.exception() is None:
        deliver(answer.result())


class _Grammars:
    """The engine's compiler, from a worker; see `inputs.Grammars`."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def compile(self, outputs: StructuredOutputs, thinking: Thinking | None = None) -> "Future[EnginesGrammar]":
        """On the event loop. The engine keeps it for as long as the result is there."""
        return asyncio.run_coroutine_threadsafe(self._compile(outputs, thinking), asyncio.get_running_loop())

    async def _compile(self, outputs: StructuredOutputs, thinking: Thinking | None) -> EnginesGrammar:
        grammar = EnginesGrammar(await self._link.ask("compile", outputs, thinking))
        release = call_if_open, asyncio.get_running_loop(), self._link.post, _Release(grammar.number)
        weakref.finalize(grammar, *release).atexit = False
        return grammar

    def starter(self, compiled: EnginesGrammar) -> EnginesGrammar:
        return compiled

    def close(self) -> None:
        """Nothing: it is the engine's."""


# --- the engine's end


class Line(Peer):
    """A worker, as a reader of the engine."""

    def __init__(self, llm: AsyncLLM, services: Mapping[str, Service]) -> None:
        """`services`: for the worker, beside those of the engine. It is connected when it has a socket."""
        of_engine = {"take_snapshot": llm.take_snapshot, "reset_prefix_cache": llm.reset_prefix_cache}
        super().__init__({**of_engine, "compile": self._compile, **services})
        loop = asyncio.get_running_loop()
        self._grammars = llm.inputs.grammars
        self._kept: dict[int, Callable[[], Grammar]] = {}  # grammars that the worker has numbers of
        self._serials = count()
        self._numbers_of: dict[str, int] = {}  # of sequences
        self._is_full = False  # an update is under way
        engine = llm.usable_engine()
        assert isinstance(engine, LocalEngine), "the other way is a link"
        self._port = engine.connect(lambda: call_if_open(loop, self._flush))

    def tell_death(self, death: BaseException) -> None:
        """Of which a thread that hangs says nothing."""
        self.post(PackedUpdate(death=EngineDead(describe_death(death))))

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._port.send(Leave())
        self._kept.clear()

    def _receive(self, message: object) -> None:
        match message:
            case Taken():
                self._is_full = False
                self._flush()
            case Abort():
                self._port.send(message)
            case _NumberedAdd():
                self._numbers_of |= message.numbers
                self._port.send(Add([self._with_grammar(request) for request in message.requests]))
            case _Release():
                self._kept.pop(message.number, None)
            case _:
                super()._receive(message)

    def _flush(self) -> None:
        """Sends what there is, unless the worker has not taken what was sent before."""
        if not self._is_full and not self.lost.is_set() and (update := self._port.take()):
            self._is_full = True
            self.post(PackedUpdate.of(update, self._numbers_of))

    def _with_grammar(self, request: Request) -> Request:
        if not isinstance(request.new_grammar, EnginesGrammar):
            return request
        return replace(request, new_grammar=self._kept[request.new_grammar.number])

    async def _compile(self, outputs: StructuredOutputs, thinking: Thinking | None) -> int:
        shared = asyncio.wrap_future(self._grammars.compile(outputs, thinking))
        number = next(self._serials)
        self._kept[number] = self._grammars.starter(await asyncio.shield(shared))
        return number
