"""Connections that end when the other side takes too long: with its headers, its body, its next request, its reading.

aiohttp has a timer for silence between two requests; the others are here.
"""

import asyncio
from dataclasses import dataclass

from aiohttp import web

from chairlift.api.config import ServerConfig
from chairlift.api.errors import failure_of
from chairlift.api.request_ids import REQUEST_ID_HEADER, request_id_of

BODY_TIMEOUT = web.AppKey("BODY_TIMEOUT", float)
"""Of an application: the seconds that `read_body` waits."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds to wait for each thing that a client does."""

    headers: float
    next_request: float
    reading: float

    @classmethod
    def of(cls, config: ServerConfig) -> "Patience":
        return cls(config.header_timeout, config.idle_timeout, config.write_timeout)


class Connection(web.RequestHandler):
    """One connection: aiohttp's protocol with two timers more.

    The header timer runs from the connection's start, and from the first byte that arrives while no request is worked
    on. Of pipelined requests the later ones' headers come while an earlier one is worked on; if the last of them stays
    incomplete, the idle timer ends the connection.
    """

    __slots__ = ("_header_timer", "_is_last", "_patience", "_write_timer")

    def __init__(self, server: web.Server, patience: Patience) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=patience.next_request,
            access_log=None,  # type: ignore[arg-type]  # aiohttp's way to say none
        )
        self._patience = patience
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._is_last = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if isinstance(transport, asyncio.WriteTransport):
            transport.set_write_buffer_limits(high=0)  # so that `pause_writing` tells of whatever stays unread
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if data and self._is_waiting and self._header_timer is None:
            self._expect_headers()

    def pause_writing(self) -> None:
        """The transport's buffer is full: from here on the client is awaited."""
        super().pause_writing()
        if self.transport is not None:  # not close(): that would wait for the client once more
            self._write_timer = self._loop.call_later(self._patience.reading, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_header_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def close(self) -> None:
        """The request that is worked on is the last one, and its reply will say so."""
        self._is_last = True
        super().close()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        self._stop_header_timer()
        if self._is_last:
            resp.force_close()
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no HTTP gets an error body too, and no traceback in the log: in the open, rubbish comes in daily."""
        if status != web.HTTPBadRequest.status_code:
            response = super().handle_error(request, status, exc, message)
        else:
            response = failure_of(web.HTTPBadRequest(text=message)).response()
            response.force_close()
        response.headers[REQUEST_ID_HEADER] = request_id_of(request)  # no application has seen it
        return response

    @property
    def _is_waiting(self) -> bool:
        """True between two requests. The future is aiohttp's own mark of that state."""
        return self._waiter is not None and not self._waiter.done()

    def _expect_headers(self) -> None:
        self.keep_alive(True)  # takes back the idle timer, which starts anew after the reply
        self._header_timer = self._loop.call_later(self._patience.headers, self._end_if_waiting)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _end_if_waiting(self) -> None:
        self._header_timer = None
        if self._is_waiting:
            self.force_close()


async def meet_expectation(request: web.Request) -> None:
    """`Expect: 100-continue` is told to go on; every other expectation is a 417 with an error body."""
    expectation = request.headers.get("Expect", "")
    if expectation.lower() != "100-continue":
        failure = failure_of(web.HTTPExpectationFailed(text=f"Expect: {expectation} cannot be met"))
        raise web.HTTPExpectationFailed(text=failure.body(), content_type="application/json")
    assert request.transport is not None, "the client waits for this"
    request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


async def read_body(request: web.Request) -> bytes:
    """The whole body. `HTTPRequestEntityTooLarge` if it is, or says that it is, larger than the application allows;
    `HTTPRequestTimeout` if it does not come within `BODY_TIMEOUT`, and then this reply is the connection's last.
    """
    limit, timeout_s = request.client_max_size, request.app[BODY_TIMEOUT]
    if request.content_length is not None and request.content_length > limit:
        raise web.HTTPRequestEntityTooLarge(limit, request.content_length)
    try:
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except web.RequestPayloadError:
        _end_body(request)
        raise
    except TimeoutError:
        _end_body(request)
        raise web.HTTPRequestTimeout(text=f"the body did not come within {timeout_s:g} s") from None


def _end_body(request: web.Request) -> None:
    """Or aiohttp would wait for the rest in order to throw it away. The reply is the connection's last."""
    request.content.feed_eof()
    request.protocol.close()
