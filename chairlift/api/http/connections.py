"""Connections that end when the other side takes too long: with its headers, its next request, its reading. (`bodies`
waits for bodies, `listening` for TLS handshakes.) aiohttp times the silence between two requests.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from typing import ClassVar

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.streams import StreamReader

from chairlift.api.config import ServerConfig
from chairlift.api.errors import error_reply
from chairlift.api.telemetry.observation import REQUEST_ID_HEADER, request_id_of

logger = logging.getLogger(__name__)

_ALARM_INTERVAL_S = 10.0
_RESERVED_FILES = 4  # within so many of the limit it counts as reached
_NUM_IN_A_ROW = 16  # pipelined requests that a connection is served before it rests
_REST_S = 0.001
_READ_BUFFER_BYTES = 2**16  # of a body that nobody reads yet; aiohttp takes up to twice as many


class Connection(web.RequestHandler):
    """One connection: aiohttp's protocol with two timers more.

    The header timer runs from the connection's start, and from the first byte that arrives between two requests. Of
    pipelined requests the later ones' headers come while an earlier one is worked on; if the last of them stays
    incomplete, the idle timer ends the connection. Pipelined requests are served with rests in between, in which the
    engine and other connections get the interpreter.
    """

    __slots__ = ("_body", "_config", "_header_timer", "_is_last", "_is_working", "_num_in_a_row", "_write_timer")

    _last_alarm: ClassVar[float] = -_ALARM_INTERVAL_S

    def __init__(self, server: web.Server, config: ServerConfig) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=config.idle_timeout,
            access_log=None,  # type: ignore[arg-type]  # aiohttp's way to say none
            read_bufsize=_READ_BUFFER_BYTES,
            auto_decompress=False,  # it would do that in the event loop; see `bodies.py`
        )
        self._config = config
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._body: StreamReader | None = None  # of the newest request
        self._is_working = False  # on a request
        self._is_last = False
        self._num_in_a_row = 0  # requests answered since bytes came

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if isinstance(transport, asyncio.WriteTransport):
            transport.set_write_buffer_limits(high=0)  # so that `pause_writing` tells of whatever stays unread
        self._expect_headers()
        self._check_open_files(transport)

    def data_received(self, data: bytes) -> None:
        is_idle = not self._is_working and (self._body is None or self._body.is_eof())
        self._num_in_a_row = 0
        super().data_received(data)
        if data and is_idle and self._header_timer is None:
            self._expect_headers()

    def request_begun(self, body: StreamReader) -> None:
        """A request's headers are there."""
        _stop(self._header_timer)
        self._header_timer = None
        self._body = body
        self._is_working = True

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if self._is_last:
            resp.force_close()
        try:
            finished = await super().finish_response(request, resp, start_time)
        finally:
            self._is_working = False
        self._num_in_a_row += 1
        if self._num_in_a_row % _NUM_IN_A_ROW == 0:
            await asyncio.sleep(_REST_S)
        return finished

    def pause_writing(self) -> None:
        """The transport's buffer is full: from here on the client is awaited."""
        super().pause_writing()
        if self.transport is not None:  # not close(): that would wait for the client once more
            loop = asyncio.get_running_loop()
            self._write_timer = loop.call_later(self._config.client_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _stop(self._write_timer)

    def connection_lost(self, exc: BaseException | None) -> None:
        _stop(self._header_timer)
        _stop(self._write_timer)
        super().connection_lost(exc)

    def close(self) -> None:
        """The request that is worked on is the last one, and its reply will say so."""
        self._is_last = True
        super().close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is not HTTP gets an error body too, and no traceback in the log: public servers see it daily."""
        if status != web.HTTPBadRequest.status_code:
            response = super().handle_error(request, status, exc, message)
        else:
            response = error_reply(web.HTTPBadRequest(text=message)).response(request)
            response.force_close()
        response.headers[REQUEST_ID_HEADER] = request_id_of(request)  # no application has seen it
        return response

    def _expect_headers(self) -> None:
        self.keep_alive(True)  # stops the idle timer, which starts anew after the reply
        loop = asyncio.get_running_loop()
        self._header_timer = loop.call_later(self._config.client_timeout, self.force_close)

    def _check_open_files(self, transport: asyncio.BaseTransport) -> None:
        """Warns, now and then, if there can be no more connections: the loop refuses them without a word.

        A new connection has the lowest descriptor that was free.
        """
        limit = _max_open_files()
        now = time.monotonic()
        is_last = limit is not None and transport.get_extra_info("socket").fileno() >= limit - _RESERVED_FILES
        if is_last and now - Connection._last_alarm >= _ALARM_INTERVAL_S:
            Connection._last_alarm = now
            logger.warning(
                "%s files and connections are open, which is this process's limit: more connections are refused until"
                " some close; raise the limit (ulimit -n)",
                limit,
            )


def connections_of(server: web.Server, config: ServerConfig) -> Callable[[], Connection]:
    """Makes an application's connections."""
    make_request = server.request_factory

    def begin_request(
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: "asyncio.Task[None]",
    ) -> web.BaseRequest:
        if isinstance(protocol, Connection):
            protocol.request_begun(payload)
        return make_request(message, payload, protocol, writer, task)

    server.request_factory = begin_request
    return lambda: Connection(server, config)


async def meet_expectation(request: web.Request) -> None:
    """`Expect: 100-continue` is told to go on; every other expectation is a 417 with an error body."""
    expectation = request.headers.get("Expect", "")
    if expectation.lower() != "100-continue":
        reply = error_reply(web.HTTPExpectationFailed(text=f"Expect: {expectation} cannot be met"))
        raise web.HTTPExpectationFailed(text=reply.body(request), content_type="application/json")
    assert request.transport is not None, "the client waits for this"
    request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _max_open_files() -> int | None:
    """This process's limit; None where there is none."""
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft
