"""How processes that run one program talk over a socket: a message is its length in four bytes, then a pickle.

Each end offers the other services, by name. Tokens travel in columns: a step of a thousand of them takes 18 kB.
"""

import asyncio
import inspect
import logging
import pickle
import socket
import struct
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

from chairlift.engine.thread import Update, describe_death
from chairlift.errors import ChairliftError, EngineClosed, EngineDead, RequestFailed
from chairlift.scheduler import TokenEvent

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_GONE = "the process at the other end is gone"

Service = Callable[..., Any]
"""What one end offers the other: a function, whose result, an awaitable's if it is one, travels back."""


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


@dataclass(slots=True)
class PackedUpdate:
    """An `Update` in columns, a row for each event. One that is not plain has no count and stands in `others`."""

    numbers: "array[int]" = field(default_factory=lambda: array("I"))
    counts: "array[int]" = field(default_factory=lambda: array("H"))  # of tokens
    seconds: "array[float]" = field(default_factory=lambda: array("d"))
    tokens: "array[int]" = field(default_factory=lambda: array("I"))  # of all events, one after the other
    others: list[TokenEvent] = field(default_factory=list)
    death: EngineDead | None = None

    @classmethod
    def of(cls, update: Update, numbers: dict[str, int]) -> "PackedUpdate":
        """`numbers`: of sequences; one that ends is removed."""
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
        """`names`: of sequences by their numbers; as for `of`."""
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
    """Whether it says no more than tokens: neither a sequence's beginning nor its end."""
    if event.times is not None or event.finish_reason is not None or not event.new_token_ids:
        return False
    return event.token_seconds is not None and not (event.logprobs or event.prompt_logprobs or event.num_drafted)


# --- both ends


class Peer(asyncio.Protocol):
    """One end of a socket between processes. For one event loop."""

    def __init__(self, services: Mapping[str, Service]) -> None:
        self._services = dict(services)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count()
        self._replies: set[asyncio.Task[None]] = set()
        self._received = bytearray()
        self._transport: asyncio.WriteTransport | None = None
        self.lost = asyncio.Event()

    def offer(self, name: str, service: Service) -> None:
        """One more."""
        self._services[name] = service

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)  # which uvloop's is, without saying so

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
        """Sends it, unless the other end is gone, which `lost` tells."""
        if self._transport is not None and not self.lost.is_set():
            data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
            self._transport.write(_LENGTH.pack(len(data)) + data)

    def ask(self, name: str, *args: Any) -> "asyncio.Future[Any]":
        """What the other end's service says, or raises. `EngineClosed` if the other end is gone."""
        answer = asyncio.get_running_loop().create_future()
        if self.lost.is_set():
            answer.set_exception(EngineClosed(_GONE))
            answer.exception()  # who asked may not want to know
            return answer
        number = next(self._numbers)
        self._asked[number] = answer
        answer.add_done_callback(lambda done: self._forget(number, done))
        self.post(_Ask(number, name, args))
        return answer

    def _forget(self, number: int, answer: "asyncio.Future[Any]") -> None:
        self._asked.pop(number)
        if not answer.cancelled():
            answer.exception()  # who asked may have left

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
    """The first message, from a socket that has no `Peer` yet; `EngineClosed` if there will be none."""
    (length,) = _LENGTH.unpack(_read_exactly(connection, _LENGTH.size))
    return pickle.loads(_read_exactly(connection, length))


def _read_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = connection.recv(num_bytes, socket.MSG_WAITALL)
    if len(data) < num_bytes:
        raise EngineClosed(_GONE)
    return data
