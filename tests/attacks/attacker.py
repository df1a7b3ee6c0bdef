"""Makes what attackers send before the clock starts, and sends it over plain sockets."""

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

KEY = "attacker-key"
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
MAX_BODY = 10 * 2**20
ANSWER_WITHIN_S = 60.0
HUNG, GONE = 0, -1
"""The status of what was not answered in time, and of what never was, because the connection ended."""
MAX_REFUSAL_BYTES = 2048  # a refusal echoes at most 1 kB of the request
_PIECE = 2**16


@dataclass(frozen=True)
class Shot:
    """One request, and how it is sent."""

    path: str
    body: bytes | Callable[[], bytes] = b""  # called just before it is sent, so that large ones do not pile up
    label: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    method: str = "POST"
    leaves_after: float | None = None  # seconds after which the client is gone; None: it stays to the end
    allowed: frozenset[int] | None = None  # statuses; None: see `is_fine`

    def raw(self) -> bytes:
        body = self.body() if callable(self.body) else self.body
        headers = {
            "Host": "127.0.0.1",
            "Connection": "close",
            "Authorization": f"Bearer {KEY}",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **self.headers,
        }
        lines = [f"{self.method} {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    def is_fine(self, status: int) -> bool:
        """Answered or refused: no 5xx but 503, and not left without an answer."""
        has_left = self.leaves_after is not None and status in (HUNG, GONE)
        is_allowed = status in self.allowed if self.allowed else status in (200, 503) or 400 <= status < 500
        return has_left or is_allowed

    def __str__(self) -> str:
        return f"{self.path} {self.label}".strip()


def post(path: str, fields: Any, label: str = "", **options: Any) -> Shot:
    """A shot whose body is that as JSON."""
    return Shot(path, json.dumps(fields).encode(), label, **options)


@dataclass(frozen=True)
class Answer:
    """Holds what came back, and from when to when it took. Times are `time.monotonic`'s."""

    shot: Shot
    status: int
    body: bytes
    begin: float
    end: float

    @property
    def complaint(self) -> str | None:
        """Returns what is wrong with it as an answer to an attack; None if nothing is."""
        if not self.shot.is_fine(self.status):
            outcome = {HUNG: "no answer in time", GONE: "the connection ended without an answer"}
            text = outcome.get(self.status, str(self.status))
            return f"{self.shot}: {text} after {self.end - self.begin:.1f} s: {self.body[:300]!r}"
        if 400 <= self.status < 600 and len(self.body) > MAX_REFUSAL_BYTES:
            return f"{self.shot}: the refusal has {len(self.body)} bytes"
        return None


class Attacker:
    """Sends shots at one server and remembers what came of them."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.answers: list[Answer] = []

    async def fire(self, shot: Shot) -> Answer:
        """Sends it and waits for the answer, or leaves when its time has come."""
        raw = shot.raw()
        begin = time.monotonic()
        status, body = await self.exchange(raw, ANSWER_WITHIN_S if shot.leaves_after is None else shot.leaves_after)
        answer = Answer(shot, status, body, begin, time.monotonic())
        self.answers.append(answer)
        return answer

    async def fire_all(self, shots: Iterable[Shot]) -> None:
        """One after the other, each made when it is its turn."""
        for shot in shots:
            await self.fire(shot)

    async def fire_at_once(self, shots: Iterable[Shot], at_most: int = 1000) -> None:
        turn = asyncio.Semaphore(at_most)

        async def fire(shot: Shot) -> None:
            async with turn:
                await self.fire(shot)

        await asyncio.gather(*(fire(shot) for shot in shots))

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """For what is no proper request."""
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def hold(self, raw: bytes, number: int, seconds: float) -> None:
        """So many connections that send this, read nothing, and leave after a while."""

        async def one() -> None:
            _, writer = await self.connect()
            writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's transport
            try:
                async with asyncio.timeout(seconds):
                    writer.write(raw)
                    await writer.drain()
                    await asyncio.sleep(seconds)
            except (OSError, TimeoutError):
                return
            finally:
                writer.transport.abort()

        await asyncio.gather(*(one() for _ in range(number)))

    async def exchange(self, raw: bytes, limit_s: float = 30.0) -> tuple[int, bytes]:
        """Sends what may be no HTTP at all; the status and body that came until the server closed or time was over."""
        writer: asyncio.StreamWriter | None = None
        received = b""
        try:
            async with asyncio.timeout(limit_s):
                reader, writer = await self.connect()
                sending = asyncio.ensure_future(_send(writer, raw))
                try:
                    received = await _read_reply(reader)
                finally:
                    sending.cancel()  # a refusal may come before the whole body is out
        except TimeoutError:
            return HUNG, received
        except OSError as error:
            return GONE, repr(error).encode()
        finally:
            if writer is not None:
                writer.transport.abort()
        return _status_of(received), received.partition(b"\r\n\r\n")[2]


async def _send(writer: asyncio.StreamWriter, raw: bytes) -> None:
    try:
        for start in range(0, len(raw), _PIECE):
            writer.write(raw[start : start + _PIECE])
            await writer.drain()
    except OSError:  # whoever reads the reply notices, too
        return


async def _read_reply(reader: asyncio.StreamReader) -> bytes:
    """All of it, but of a long one only the beginning."""
    received = b""
    try:
        while piece := await reader.read(_PIECE):
            received = received if len(received) > _PIECE else received + piece
    except ConnectionResetError:
        if not received:
            raise
    return received


def _status_of(reply: bytes) -> int:
    return int(reply[9:12]) if reply.startswith(b"HTTP/1.") and reply[9:12].isdigit() else GONE
