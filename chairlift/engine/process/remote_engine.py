"""The worker's end of the socket: the engine as its worker sees it."""

import asyncio
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from itertools import count
from typing import Any

from chairlift.config import ResolvedConfig
from chairlift.engine.async_llm import call_if_open
from chairlift.engine.core import EngineCore
from chairlift.engine.journal import EngineStats
from chairlift.engine.process.connection import ProcessConnection, Service
from chairlift.engine.process.messages import EnginesGrammar, NumberedAdd, PackedUpdate, Release
from chairlift.engine.text.grammar import Thinking
from chairlift.engine.thread import Abort, Add, Command, Invoke, Taken, Update
from chairlift.errors import EngineDead
from chairlift.params import StructuredOutputs

_SERVICES: Mapping[Callable[[EngineCore], Any], str] = {
    EngineCore.read_snapshot: "read_snapshot",
    EngineCore.reset_prefix_cache: "reset_prefix_cache",
}
"""The services of the engine's process, see `RemoteReader`, that stand for the functions of calls."""


class RemoteEngine(ProcessConnection):
    """An engine in another process; see `Engine`. All methods must be called on the event loop."""

    def __init__(
        self, config: ResolvedConfig, vocab_size: int, stats: EngineStats, services: Mapping[str, Service]
    ) -> None:
        """`stats`: the current ones; `services`: offered to the engine's process."""
        super().__init__(services)
        self.config = config
        self.vocab_size = vocab_size
        self.stats = stats  # the newest known
        self.grammars = _Grammars(self)
        self._wake: Callable[[], None] = lambda: None
        self._packed: PackedUpdate | None = None
        self._is_told = False
        self._serials = count(1)
        self._names: dict[int, str] = {}  # of sequences, by number

    @property
    def is_alive(self) -> bool:
        return not self.lost.is_set() and not self.silent.is_set()

    def start(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def send(self, command: Command) -> None:
        match command:
            case Add():
                numbers = {request.request_id: next(self._serials) for request in command.requests}
                self._names |= {number: name for name, number in numbers.items()}
                self.post(NumberedAdd(command.requests, numbers))
            case Abort():
                self.post(command)
            case Invoke():
                asked = self.ask(_SERVICES[command.function])
                asked.add_done_callback(lambda done: _deliver(done, command.deliver))
            case _:
                pass  # a single reader cannot stop the engine

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
        """Does nothing: the socket stays open until the process ends."""

    def _receive(self, message: object) -> None:
        if not isinstance(message, PackedUpdate):
            super()._receive(message)
            return
        self._packed = message
        if not self._is_told:
            self._is_told = True
            self._wake()


def _deliver(answer: "asyncio.Future[Any]", deliver: Callable[[Any], None]) -> None:
    """Delivers the answer. Without one the engine is dead, which is reported elsewhere."""
    if not answer.cancelled() and answer.exception() is None:
        deliver(answer.result())


class _Grammars:
    """The engine's grammar compiler, used from a worker; see `inputs.Grammars`."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine

    def compile(self, outputs: StructuredOutputs, thinking: Thinking | None = None) -> "Future[EnginesGrammar]":
        """Must be called on the event loop. The engine keeps the grammar as long as the result is referenced."""
        return asyncio.run_coroutine_threadsafe(self._compile(outputs, thinking), asyncio.get_running_loop())

    async def _compile(self, outputs: StructuredOutputs, thinking: Thinking | None) -> EnginesGrammar:
        grammar = EnginesGrammar(await self._engine.ask("compile", outputs, thinking))
        loop, release = asyncio.get_running_loop(), Release(grammar.number)
        weakref.finalize(grammar, call_if_open, loop, self._engine.post, release).atexit = False
        return grammar

    def starter(self, compiled: EnginesGrammar) -> EnginesGrammar:
        return compiled

    def close(self) -> None:
        """Does nothing: the compiler is the engine's."""
