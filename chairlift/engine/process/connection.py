"""Either end of a socket between processes: messages, services by name, and pings."""

import asyncio
import inspect
import logging
import pickle
import socket
import struct
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, cast

from chairlift.engine.process.messages import Ask, Told
from chairlift.errors import ChairliftError, EngineClosed, RequestFailed

logger = logging.getLogger(__name__)

GONE = "the process at the other end is gone"
_LENGTH = struct.Struct("<I")
_MAX_LOOK_S = 1.0

Service = Callable[..., Any]
"""A function that one end offers the other. Its result is sent back; an awaitable is awaited first."""


class ProcessConnection(asyncio.Protocol):
    """One end of a socket between processes. Used from one event loop."""

    def __init__(self, services: Mapping[str, Service]) -> None:
        self._services: dict[str, Service] = {"ping": lambda: None, **services}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count()
        self._replies: set[asyncio.Task[None]] = set()
        self._received = bytearray()
        self._transport: asyncio.WriteTransport | None = None
        self.lost = asyncio.Event()
        self.silent = asyncio.Event()  # it is connected, but does not answer; see `watch`

    def offer(self, name: str, service: Service) -> None:
        """Adds a service."""
        self._services[name] = service

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)  # as is uvloop's, which does not declare it

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            self._read()
        except Exception as error:
            self.break_off(error)

    def _read(self) -> None:
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
                asked.set_exception(EngineClosed(GONE))

    def post(self, message: object) -> None:
        """Sends a message, unless the other end is gone (`lost`)."""
        if not self.lost.is_set():
            self.post_packed(pack(message))

    def post_packed(self, packed: bytes) -> None:
        """Sends what `pack` made of a message; see `post`."""
        if self._transport is not None and not self.lost.is_set():
            self._transport.write(packed)

    def break_off(self, error: Exception) -> None:
        """Closes the connection: a message was lost, for which the other end would wait for ever."""
        logger.critical("a connection between the server's processes failed", exc_info=error)
        self.abort()

    def abort(self) -> None:
        """Closes the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    async def watch(self, limit_s: float) -> None:
        """Pings the other end until that is gone, and keeps `silent` up to date: set once it has not answered for
        `limit_s` seconds. Counts looks rather than time: what this process itself has slept is not the other's fault.
        """
        interval_s = min(_MAX_LOOK_S, limit_s / 4)
        num_looks, ping = 0, self.ask("ping")
        while not self.lost.is_set():
            await asyncio.sleep(interval_s)
            num_looks += 1
            if ping.done():
                num_looks, ping = 0, self.ask("ping")
            if num_looks * interval_s < limit_s:
                self.silent.clear()
            else:
                self.silent.set()

    def ask(self, name: str, *args: Any) -> "asyncio.Future[Any]":
        """Calls a service of the other end: its result or exception. `EngineClosed` if the other end is gone."""
        answer = asyncio.get_running_loop().create_future()
        if self.lost.is_set():
            answer.set_exception(EngineClosed(GONE))
            answer.exception()  # the caller may never retrieve it
            return answer
        number = next(self._numbers)
        self._asked[number] = answer
        answer.add_done_callback(lambda done: self._forget(number, done))
        self.post(Ask(number, name, args))
        return answer

    def _forget(self, number: int, answer: "asyncio.Future[Any]") -> None:
        self._asked.pop(number)
        if not answer.cancelled():
            answer.exception()  # the caller may never retrieve it

    def _receive(self, message: object) -> None:
        match message:
            case Ask():
                reply = asyncio.get_running_loop().create_task(self._reply(message))
                self._replies.add(reply)
                reply.add_done_callback(self._replies.discard)
            case Told() if (asked := self._asked.get(message.number)) is not None and not asked.done():
                if message.error is None:
                    asked.set_result(message.answer)
                else:
                    asked.set_exception(message.error)

    async def _reply(self, ask: Ask) -> None:
        try:
            answer = self._services[ask.name](*ask.args)
            self.post(Told(ask.number, await answer if inspect.isawaitable(answer) else answer, None))
        except ChairliftError as error:
            self.post(Told(ask.number, None, error))
        except Exception as error:
            logger.error("answering %s failed", ask.name, exc_info=error)
            problem = RequestFailed(f"{ask.name} failed: {type(error).__name__}: {error}")
            self.post(Told(ask.number, None, problem))


def pack(message: object) -> bytes:
    """A message as it goes over the socket. May be called in any thread."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def read_message(connection: socket.socket) -> object:
    """Reads the first message from a socket without protocol. `EngineClosed` if the other end closes it."""
    (length,) = _LENGTH.unpack(_read_exactly(connection, _LENGTH.size))
    return pickle.loads(_read_exactly(connection, length))


def _read_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = connection.recv(num_bytes, socket.MSG_WAITALL)
    if len(data) < num_bytes:
        raise EngineClosed(GONE)
    return data
