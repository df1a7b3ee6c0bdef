"""Replies that clients have not read yet: they are written in pieces, and their bytes are counted and limited.

A socket takes some megabytes that its client does not read; everything beyond that stays in this process. A reply of up
to one piece costs little, and the time to read it is limited (`Connection`). The bytes of larger ones are counted while
they are written: for each client, and for all together. Several connections that are sent the same object, such as a
stored response, share it, so it counts once.

When a limit is reached, connections whose clients do not read are closed, first the one that has waited for longest:
a client's own, or, when the process holds too much, those of the client with most. The newest reply is refused only if
all of them are being read. So a client that reads loses nothing to one that does not.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload

from chairlift.api.errors import Handler
from chairlift.errors import ClientTooBusy, ServerTooBusy

PIECE_BYTES = 2**16
"""Bounds what is written to a connection at once, before its client has read more; less than that is not counted."""

_STALLED_S = 1.0  # without a piece that was taken


@dataclass(slots=True, eq=False)
class _Reading:
    """A reply on its way to a client."""

    client: str
    data: bytes
    transport: asyncio.Transport | None
    last_taken: float = field(default_factory=time.monotonic)  # when the connection took the newest piece


class UnreadReplies:
    """The large replies of one application that are being written. Used from one event loop."""

    def __init__(self, max_bytes: int, client_of: Callable[[web.Request], str], stalled_s: float = _STALLED_S) -> None:
        """`max_bytes`: of all clients; half of it for one. `client_of`: who is sent the reply to a request. A
        connection that has taken nothing for `stalled_s` seconds is not being read.
        """
        self._stalled_s = stalled_s
        self._max_bytes = max_bytes
        self._max_bytes_per_client = max_bytes // 2
        self._client_of = client_of
        self._readings: dict[_Reading, None] = {}
        self._num_bytes: Counter[str] = Counter()  # by client
        self._num_readers: Counter[tuple[str, int]] = Counter()  # by client and object

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Has whole replies written in pieces. Raises `ClientTooBusy` or `ServerTooBusy` instead of one too many."""
        response = await handler(request)
        if isinstance(response, web.Response) and isinstance(response.body, bytes) and len(response.body) > PIECE_BYTES:
            self._make_room(self._client_of(request), response.body)
            response.body = _Pieces(self, request, response.body, response.content_type)
        return response

    async def send(self, request: web.Request, data: bytes, write: Callable[[memoryview], Awaitable[None]]) -> None:
        """Writes a reply, or a part of one, in pieces. `write` waits until the connection has taken most of its piece.

        Raises `ClientTooBusy` or `ServerTooBusy` before anything is written if there is no room for it.
        """
        self._make_room(self._client_of(request), data)
        await self.send_admitted(request, data, write)

    async def send_admitted(
        self, request: web.Request, data: bytes, write: Callable[[memoryview], Awaitable[None]]
    ) -> None:
        """As `send`, for a reply that there is room for."""
        reading = _Reading(self._client_of(request), data, request.transport)
        self._add(reading)
        try:
            view = memoryview(data)
            for begin in range(0, len(data), PIECE_BYTES):
                await write(view[begin : begin + PIECE_BYTES])
                reading.last_taken = time.monotonic()
        finally:
            self._remove(reading)

    def _make_room(self, client: str, data: bytes) -> None:
        """Closes connections that are not read, if need be. A client that is sent nothing else has room for any reply,
        unless the others leave none.
        """
        size = 0 if self._num_readers[client, id(data)] else len(data)
        while self._num_bytes[client] and self._num_bytes[client] + size > self._max_bytes_per_client:
            if not self._close_stalled([client]):
                raise ClientTooBusy("too many bytes of your replies are not read yet; ask for less at once")
        while self._readings and self._num_bytes.total() + size > self._max_bytes:
            if not self._close_stalled([name for name, _ in self._num_bytes.most_common()]):
                raise ServerTooBusy("too many bytes of replies are not read yet; try again later")

    def _close_stalled(self, clients: Sequence[str]) -> bool:
        """Closes the connection that has waited for longest, of the first of these clients that does not read.

        False if all of them read.
        """
        latest = time.monotonic() - self._stalled_s
        for client in clients:
            stalled = [each for each in self._readings if each.client == client and each.last_taken < latest]
            if stalled:
                longest = min(stalled, key=lambda each: each.last_taken)
                self._remove(longest)
                if longest.transport is not None:
                    longest.transport.abort()
                return True
        return False

    def _add(self, reading: _Reading) -> None:
        self._readings[reading] = None
        name = reading.client, id(reading.data)
        self._num_readers[name] += 1
        if self._num_readers[name] == 1:
            self._num_bytes[reading.client] += len(reading.data)

    def _remove(self, reading: _Reading) -> None:
        """Stops counting; the second time it does nothing."""
        if reading not in self._readings:
            return
        del self._readings[reading]
        name = reading.client, id(reading.data)
        self._num_readers[name] -= 1
        if not self._num_readers[name]:
            del self._num_readers[name]
            self._num_bytes[reading.client] -= len(reading.data)
            if not self._num_bytes[reading.client]:
                del self._num_bytes[reading.client]


UNREAD = web.AppKey("chairlift_unread", UnreadReplies)


class _Pieces(Payload):
    """A whole reply's body."""

    def __init__(self, unread: UnreadReplies, request: web.Request, data: bytes, content_type: str) -> None:
        super().__init__(data, content_type=content_type)
        self._size = len(data)
        self._unread = unread
        self._request = request

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        text: str = self._value.decode(encoding, errors)
        return text

    async def write(self, writer: AbstractStreamWriter) -> None:
        async def write(piece: memoryview) -> None:
            await writer.write(piece)
            await writer.drain()

        await self._unread.send_admitted(self._request, self._value, write)
