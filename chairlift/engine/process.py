"""The connections between the engine's process and its readers in other processes, the API workers.

    worker: AsyncLLM -> Link  === Unix socket ===  Line -> Port -> LocalEngine: the engine's process

To the worker, `Link` is an `Engine`; to the engine, `Line` is a reader. A message is its length in four bytes, then a
pickle; each end offers the other services, by name. Tokens are sent in columns: a step of a thousand takes 18 kB. Only
one update at a time is in flight to a worker; until the worker has taken it, news are merged in the port.

Grammars stay with the engine, which compiles them: a worker has a number instead, and the engine keeps the grammar as
long as the worker has the number. When a worker dies, its socket closes, and all its requests end.
"""

import asyncio
import inspect
import logging
import pickle
import socket
import struct
import weakref
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NoReturn, cast

from chairlift.config import ResolvedConfig
from chairlift.engine.async_llm import AsyncLLM, call_if_open
from chairlift.engine.journal import EngineStats
from chairlift.engine.text.grammar import Thinking
from chairlift.engine.thread import Abort, Add, Call, Command, Leave, LocalEngine, Taken, Update, describe_death
from chairlift.errors import ChairliftError, EngineClosed, EngineDead, RequestFailed
from chairlift.params import StructuredOutputs
from chairlift.scheduler import Grammar, Request, TokenEvent

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_GONE = "the process at the other end is gone"

Service = Callable[..., Any]
"""A function that one end offers the other. Its result is sent back; an awaitable is awaited first."""


# --- messages


@dataclass(frozen=True, slots=True)
class _Ask:
    number: int
    name: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Told:
    number: int
    answer: Any
    error: Exception | None


@dataclass(frozen=True, slots=True)
class _NumberedAdd:
    """`Add`, with a number for each sequence, by request id, that stands for it from here on."""

    requests: list[Request]
    numbers: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Release:
    """The worker no longer needs the grammar with this number."""

    number: int


@dataclass(frozen=True, slots=True, weakref_slot=True)
class EnginesGrammar:
    """Stands for a compiled grammar in a worker, as a request's `new_grammar`."""

    number: int

    def __call__(self) -> NoReturn:
        raise AssertionError("only the engine's process can start it")


@dataclass(slots=True)
class PackedUpdate:
    """An `Update` in columns, one row per event. An event that is not plain has count 0 and is in `others`."""

    numbers: "array[int]" = field(default_factory=lambda: array("I"))
    counts: "array[int]" = field(default_factory=lambda: array("H"))  # of tokens
    seconds: "array[float]" = field(default_factory=lambda: array("d"))
    tokens: "array[int]" = field(default_factory=lambda: array("I"))  # of all plain events, one after the other
    others: list[TokenEvent] = field(default_factory=list)
    death: EngineDead | None = None

    @classmethod
    def of(cls, update: Update, numbers: dict[str, int]) -> "PackedUpdate":
        """`numbers`: of sequences, by request id; a sequence that ends is removed."""
        packed = cls()
        if update.death is not None:
            packed.death = EngineDead(describe_death(update.death))
        for event in update.events:
            packed.numbers.append(numbers[event.request_id])
            if _is_plain(event):
                packed.counts.append(len(event.new_token_ids))
                packed.seconds.append(event.token_seconds or 0.0)
                packed.tokens.extend(event.new_token_ids)
            else:
                packed.counts.append(0)
                packed.others.append(event)
                if event.finish_reason is not None:
                    del numbers[event.request_id]
        return packed

    def unpack(self, names: dict[int, str]) -> Update:
        """`names`: of sequences, by number; a sequence that ends is removed."""
        events, others, tokens, end = list[TokenEvent](), iter(self.others), self.tokens.tolist(), 0
        seconds = iter(self.seconds)
        for number, num_tokens in zip(self.numbers, self.counts, strict=True):
            if num_tokens:
                begin, end = end, end + num_tokens
                events.append(TokenEvent(names[number], tokens[begin:end], None, token_seconds=next(seconds)))
            else:
                events.append(next(others))
                if events[-1].finish_reason is not None:
                    del names[number]
        return Update(events, self.death)


def _is_plain(event: TokenEvent) -> bool:
    """Whether it has only tokens, and is neither a sequence's beginning nor its end."""
    if event.times is not None or event.finish_reason is not None or not event.new_token_ids:
        return False
    return event.token_seconds is not None and not (event.logprobs or event.prompt_logprobs or event.num_drafted)


# --- both ends


class Peer(asyncio.Protocol):
    """One end of a socket between processes. Used from one event loop."""

    def __init__(self, services: Mapping[str, Service]) -> None:
        self._services = dict(services)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count()
        self._replies: set[asyncio.Task[None]] = set()
        self._received = bytearray()
        self._transport: asyncio.WriteTransport | None = None
        self.lost = asyncio.Event()

    def offer(self, name: str, service: Service) -> None:
        """Adds a service."""
        self._services[name] = service

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)  # as is uvloop's, which does not declare it

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            message = pickle.loads(bytes(self._received[_LENGTH.size : end]))
            del self._received[:end]
            self._receive(message)

    def connection_lost(self, _: Exception | None) -> None:
        self.lost.set()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(EngineClosed(_GONE))

    def post(self, message: object) -> None:
        """Sends a message, unless the other end is gone (`lost`)."""
        if self._transport is not None and not self.lost.is_set():
            data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
            self._transport.write(_LENGTH.pack(len(data)) + data)

    def ask(self, name: str, *args: Any) -> "asyncio.Future[Any]":
        """Calls a service of the other end: its result or exception. `EngineClosed` if the other end is gone."""
        answer = asyncio.get_running_loop().create_future()
        if self.lost.is_set():
            answer.set_exception(EngineClosed(_GONE))
            answer.exception()  # the caller may never retrieve it
            return answer
        number = next(self._numbers)
        self._asked[number] = answer
        answer.add_done_callback(lambda done: self._forget(number, done))
        self.post(_Ask(number, name, args))
        return answer

    def _forget(self, number: int, answer: "asyncio.Future[Any]") -> None:
        self._asked.pop(number)
        if not answer.cancelled():
            answer.exception()  # the caller may never retrieve it

    def _receive(self, message: object) -> None:
        match message:
            case _Ask():
                reply = asyncio.get_running_loop().create_task(self._reply(message))
                self._replies.add(reply)
                reply.add_done_callback(self._replies.discard)
            case _Told() if (asked := self._asked.get(message.number)) is not None and not asked.done():
                if message.error is None:
                    asked.set_result(message.answer)
                else:
                    asked.set_exception(message.error)

    async def _reply(self, ask: _Ask) -> None:
        try:
            answer = self._services[ask.name](*ask.args)
            self.post(_Told(ask.number, await answer if inspect.isawaitable(answer) else answer, None))
        except ChairliftError as error:
            self.post(_Told(ask.number, None, error))
        except Exception as error:
            logger.error("answering %s failed", ask.name, exc_info=error)
            problem = RequestFailed(f"{ask.name} failed: {type(error).__name__}: {error}")
            self.post(_Told(ask.number, None, problem))


def read_message(connection: socket.socket) -> object:
    """Reads the first message from a socket without a `Peer`. `EngineClosed` if the other end closes it before."""
    (length,) = _LENGTH.unpack(_read_exactly(connection, _LENGTH.size))
    return pickle.loads(_read_exactly(connection, length))


def _read_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = connection.recv(num_bytes, socket.MSG_WAITALL)
    if len(data) < num_bytes:
        raise EngineClosed(_GONE)
    return data


# --- the worker's end


class Link(Peer):
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

    def __init__(self, link: Link) -> None:
        self._link = link

    def compile(self, outputs: StructuredOutputs, thinking: Thinking | None = None) -> "Future[EnginesGrammar]":
        """Must be called on the event loop. The engine keeps the grammar as long as the result is referenced."""
        return asyncio.run_coroutine_threadsafe(self._compile(outputs, thinking), asyncio.get_running_loop())

    async def _compile(self, outputs: StructuredOutputs, thinking: Thinking | None) -> EnginesGrammar:
        grammar = EnginesGrammar(await self._link.ask("compile", outputs, thinking))
        loop, release = asyncio.get_running_loop(), _Release(grammar.number)
        weakref.finalize(grammar, call_if_open, loop, self._link.post, release).atexit = False
        return grammar

    def starter(self, compiled: EnginesGrammar) -> EnginesGrammar:
        return compiled

    def close(self) -> None:
        """Does nothing: the compiler is the engine's."""


# --- the engine's end


class Line(Peer):
    """The engine's end of the socket: a worker as a reader."""

    def __init__(self, llm: AsyncLLM, services: Mapping[str, Service]) -> None:
        """`services`: offered to the worker, beside the engine's. The worker is connected once it has a socket."""
        of_engine = {"take_snapshot": llm.take_snapshot, "reset_prefix_cache": llm.reset_prefix_cache}
        super().__init__({**of_engine, "compile": self._compile, **services})
        loop = asyncio.get_running_loop()
        self._grammars = llm.inputs.grammars
        self._kept: dict[int, Callable[[], Grammar]] = {}  # grammars that the worker has numbers of
        self._serials = count()
        self._numbers_of: dict[str, int] = {}  # of sequences
        self._is_full = False  # an update is in flight
        engine = llm.usable_engine()
        assert isinstance(engine, LocalEngine), "the other way is a link"
        self._port = engine.connect(lambda: call_if_open(loop, self._flush))

    def tell_death(self, death: BaseException) -> None:
        """Reports the engine's death to the worker, because a hung thread cannot."""
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
        """Sends pending news, unless the worker has not yet taken the last update."""
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
