"""Connections, which end when clients are too slow with headers, with the rest of a request, or in reading. (`bodies`
waits for bodies, `listening` for handshakes.) aiohttp limits the idle time between two requests.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.streams import StreamReader
from yarl import URL

from chairlift.api import ServerConfig
from chairlift.api.answers.text import whole_characters
from chairlift.api.errors import error_reply
from chairlift.api.telemetry.request_ids import REQUEST_ID_HEADER, request_id_of

_NUM_IN_A_ROW = 16  # pipelined requests that a connection is served before it pauses
_PAUSE_S = 0.001
_BEGUN_IN_A_TURN = 16  # requests, at 0.1 ms each
_READ_BUFFER_BYTES = 2**16  # of an unread body; aiohttp takes up to twice as many


class StartLimiter:
    """Limits how many requests begin in one turn of the event loop, so that streams continue during a burst.

    Half of the places go to connections that were answered before, so that a burst of new ones, of which more come than
    begin, buries no request of theirs. Half of each half go to the newest requests, so that a request amid a burst does
    not wait for all of it.
    """

    def __init__(self) -> None:
        self._known = deque[Callable[[], None]]()  # of connections that were answered before
        self._new = deque[Callable[[], None]]()
        self._num_left = _BEGUN_IN_A_TURN

    def try_acquire(self) -> bool:
        """Acquires a place in this turn; False if none is left."""
        if not self._num_left:
            return False
        if self._num_left == _BEGUN_IN_A_TURN:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._num_left -= 1
        return True

    def wait(self, begin: Callable[[], None], *, is_known: bool) -> None:
        """Has `begin` called in a later turn. `is_known`: its connection was answered before."""
        (self._known if is_known else self._new).append(begin)

    def _begin_turn(self) -> None:
        self._num_left = _BEGUN_IN_A_TURN
        while (self._known or self._new) and self.try_acquire():
            first, second = (self._known, self._new) if self._num_left % 4 < 2 else (self._new, self._known)
            waiting = first or second
            begin = waiting.pop() if self._num_left % 2 else waiting.popleft()
            begin()


class Connection(web.RequestHandler):
    """One connection: aiohttp's protocol with two more timers.

    The header timer runs from the connection's start, and from the first byte that arrives between two requests. The
    headers of pipelined requests arrive while an earlier one is in progress; if the last of them stay incomplete, the
    idle timer ends the connection. Between pipelined requests there are pauses, in which the engine and other
    connections get the interpreter.
    """

    __slots__ = (
        "_body", "_config", "_header_timer", "_held", "_is_last", "_is_working", "_num_in_a_row", "_starts",
        "_was_answered", "_write_timer",
    )  # fmt: skip

    def __init__(self, server: web.Server, config: ServerConfig, starts: StartLimiter) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=config.idle_timeout,
            access_log=None,  # type: ignore[arg-type]  # aiohttp's way to say none
            read_bufsize=_READ_BUFFER_BYTES,
            auto_decompress=False,  # it would do that in the event loop; see `bodies.py`
        )
        self._config = config
        self._starts = starts
        self._held = b""  # received, and waiting for its turn
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._body: StreamReader | None = None  # of the newest request
        self._is_working = False  # on a request
        self._is_last = False
        self._was_answered = False
        self._num_in_a_row = 0  # requests answered since bytes last arrived

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if isinstance(transport, asyncio.WriteTransport):
            transport.set_write_buffer_limits(high=0)  # so that `pause_writing` is called for any unread data
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        is_idle = not self._is_working and (self._body is None or self._body.is_eof())
        if not data or not is_idle or (not self._held and self._starts.try_acquire()):
            self._receive(data, is_idle=is_idle)
            return
        if not self._held:
            assert self.transport is not None, "what it received came from there"
            self.transport.pause_reading()
            self._starts.wait(self._receive_held, is_known=self._was_answered)
        self._held += data

    def _receive_held(self) -> None:
        if self.transport is not None:  # the client is still connected
            self.transport.resume_reading()  # first, because aiohttp may pause it again
            held, self._held = self._held, b""
            self._receive(held, is_idle=True)

    def _receive(self, data: bytes, *, is_idle: bool) -> None:
        self._num_in_a_row = 0
        super().data_received(data)
        if data and is_idle and self._header_timer is None:
            self._expect_headers()

    def request_begun(self, body: StreamReader) -> None:
        """Called when a request's headers are complete."""
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
        self._was_answered = True
        self._num_in_a_row += 1
        if self._num_in_a_row % _NUM_IN_A_ROW == 0:
            await asyncio.sleep(_PAUSE_S)
        return finished

    def pause_writing(self) -> None:
        """The transport's buffer is full: from here on the client's time to read counts."""
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
        """Makes the current request the last one, which its reply announces."""
        self._is_last = True
        super().close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers what is not HTTP with an error body, and logs no traceback: public servers receive it daily."""
        if status != web.HTTPBadRequest.status_code:
            response = super().handle_error(request, status, exc, message)
        else:
            response = error_reply(web.HTTPBadRequest(text=message)).response()  # it has reached no application
            response.force_close()
        response.headers[REQUEST_ID_HEADER] = request_id_of(request)  # otherwise the application adds it
        return response

    def _expect_headers(self) -> None:
        self.keep_alive(True)  # stops the idle timer, which starts anew after the reply
        loop = asyncio.get_running_loop()
        self._header_timer = loop.call_later(self._config.client_timeout, self.force_close)


def connections_of(server: web.Server, config: ServerConfig) -> Callable[[], Connection]:
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
        return make_request(_without_root(message, config.root_path), payload, protocol, writer, task)

    server.request_factory = begin_request
    starts = StartLimiter()
    return lambda: Connection(server, config, starts)


def _without_root(message: RawRequestMessage, root: str) -> RawRequestMessage:
    """The message without the prefix under which a proxy offers the server, which some proxies leave in the path."""
    if not root or not message.path.startswith(f"{root}/"):
        return message
    target = message.path[len(root) :]
    path, _, query = target.partition("?")
    return message._replace(path=target, url=URL.build(path=path, query_string=query, encoded=True))


async def meet_expectation(request: web.Request) -> None:
    """Answers `Expect: 100-continue` with a 100, and every other expectation with a 417 and an error body."""
    expectation = whole_characters(request.headers.get("Expect", ""))
    if expectation.lower() != "100-continue":
        reply = error_reply(web.HTTPExpectationFailed(text=f"Expect: {expectation} is not supported; leave it out"))
        body = reply.body(request)
        raise web.HTTPExpectationFailed(text=body, content_type="application/json")
    assert request.transport is not None, "the client waits for this"
    request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
