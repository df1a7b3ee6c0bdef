"""A reply that is written event by event."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from aiohttp import web

from chairlift.api.http.unread import PIECE_BYTES, UNREAD

KEEP_ALIVE = ": keep-alive\n\n"  # a comment: clients ignore it, and proxies see activity
_NO_HEADERS: Mapping[str, str] = {}
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies must pass events on as they come
}


@dataclass(slots=True)
class Pulse:
    """Limits how long the streams of an application may be silent."""

    interval_s: float = 10.0  # proxies and clients drop a silent connection after a minute or so


PULSE = web.AppKey("chairlift_pulse", Pulse)


class EventStream:
    """One reply that is written event by event; a context manager.

    The status is sent with the first event, so that an earlier error can still have its own, or with the first
    keep-alive event, which is sent whenever the interval of the application's `Pulse` passes without an event.
    """

    def __init__(
        self, request: web.Request, headers: Mapping[str, str] = _NO_HEADERS, keep_alive: str = KEEP_ALIVE
    ) -> None:
        """`headers`: in addition to those of every stream; `keep_alive`: the keep-alive event."""
        self.response = web.StreamResponse(headers={**_HEADERS, **headers})
        self._request = request
        self._keep_alive_event = keep_alive.encode()
        self._num_sent = 0
        self._is_amid_event = False  # of which pieces have been sent: nothing else may come between
        self._opening = asyncio.Lock()
        self._beat: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """True once the status has been sent; errors can then only be events."""
        return self.response.prepared

    async def __aenter__(self) -> Self:
        self._beat = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        beat, self._beat = self._beat, None  # it refers to this stream: keeping it would make a cycle for the collector
        assert beat is not None, "entered before"
        beat.cancel()
        await asyncio.gather(beat, return_exceptions=True)

    async def send(self, *events: str) -> None:
        """Writes events. Waits while the client reads slowly; see `Connection` for clients that stop reading.

        Raises `ClientTooBusy` or `ServerTooBusy` if so much is unread already that there is no room for large ones.
        """
        for group in _in_groups(events):
            await self._write(group.encode())

    async def close(self) -> None:
        """Ends the reply, after the last event."""
        await self.response.write_eof()

    async def _write(self, data: bytes) -> None:
        self._num_sent += 1
        if len(data) <= PIECE_BYTES:
            await self._write_piece(data)
            return
        self._is_amid_event = True
        try:
            await self._request.app[UNREAD].send(self._request, data, self._write_piece)
        finally:
            self._is_amid_event = False

    async def _write_piece(self, data: bytes | memoryview) -> None:
        if not self.response.prepared:
            async with self._opening:
                if not self.response.prepared:
                    await self.response.prepare(self._request)
        await self.response.write(data)  # waits if more than a piece is unread

    async def _keep_alive(self) -> None:
        with contextlib.suppress(ConnectionError):  # the next write will notice
            while True:
                num_sent = self._num_sent
                await asyncio.sleep(self._request.app[PULSE].interval_s)
                if self._num_sent == num_sent and not self._is_amid_event:
                    await self._write(self._keep_alive_event)


def _in_groups(events: Sequence[str]) -> Iterator[str]:
    """Events, joined as long as they fit into one piece; larger ones stay alone."""
    group: list[str] = []
    num_characters = 0
    for each in events:
        if group and num_characters + len(each) > PIECE_BYTES:
            yield "".join(group)
            group, num_characters = [], 0
        group.append(each)
        num_characters += len(each)
    if num_characters:
        yield "".join(group)
