"""Where the server listens: the address, taken before a model is loaded for it, and TLS. Connections end when the other
side takes too long: with its handshake, its headers, its next request, its reading. (`bodies` waits for bodies.)
aiohttp times the silence between two requests.
"""

import asyncio
import errno
import ipaddress
import logging
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.streams import StreamReader

from chairlift.api import ServerConfig
from chairlift.api.errors import error_reply
from chairlift.api.telemetry import REQUEST_ID_HEADER, request_id_of
from chairlift.errors import ConfigurationError

logger = logging.getLogger(__name__)

_BACKLOG = 4096  # connections that wait to be accepted: a burst must not wait for repeated handshakes
_RECEIVE_BUFFER_BYTES = 2**16  # of a socket: what has arrived is parsed in one go, at 2.5 µs for a chunk of a byte


class Listener:
    """The sockets of one server. Connections are refused until it accepts them. A context manager, which closes it."""

    def __init__(self, config: ServerConfig, *, is_shared: bool = False) -> None:
        """`ConfigurationError` if the address is not this machine's, the port is taken, or the certificate is wrong.

        `is_shared`: the address is one of a listener that lets others share it.
        """
        self._config = config
        self._tls = tls_context(config)
        with _naming_the_address(config):
            self.sockets = _bind(config.host, config.port, is_shared)
        self._servers: list[asyncio.Server] = []

    async def accept(self, make_protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        """Makes a protocol for every connection, from here to `close()`.

        `ConfigurationError` if another program has begun to listen there since the address was taken.
        """
        handshake = None if self._tls is None else self._config.client_timeout
        for each in self.sockets:
            with _naming_the_address(self._config):
                each.listen(_BACKLOG)  # uvloop would fail to without a word
            server = await asyncio.get_running_loop().create_server(
                make_protocol,
                sock=each,
                backlog=_BACKLOG,
                ssl=self._tls,
                ssl_handshake_timeout=handshake,
                ssl_shutdown_timeout=handshake,
            )
            self._servers.append(server)

    def let_share(self) -> None:
        """From here on this user's shared listeners may have the address, too. The system spreads the connections."""
        for each in self.sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)

    def close(self) -> None:
        for server in self._servers:
            server.close()
        for each in self.sockets:
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def port(self) -> int:
        """That of all its sockets."""
        port: int = self.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """The address of the first socket, as clients write it."""
        host, port = self.sockets[0].getsockname()[:2]
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @property
    def is_open_to_others(self) -> bool:
        """True if any socket can be reached from another machine."""
        hosts = [each.getsockname()[0].partition("%")[0] for each in self.sockets]
        return not all(ipaddress.ip_address(host).is_loopback for host in hosts)

    def renew_certificate(self) -> None:
        """Reads certificate and key again, for connections to come. If they do not fit, the old ones stay."""
        if self._tls is None:
            logger.info("SIGHUP: there is no certificate to read again; nothing was done")
            return
        try:
            tls_context(self._config)  # what is wrong must not be found when half of it is in use
            _load_certificate(self._tls, self._config)
        except (ConfigurationError, OSError) as error:
            logger.error("the certificate was not renewed: %s", error)
        else:
            logger.info("the certificate was read again")


@contextmanager
def _naming_the_address(config: ServerConfig) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise ConfigurationError(
            f"cannot listen on {config.host}:{config.port}: {reason}; choose another --host or --port"
        ) from error


def _bind(host: str, port: int, is_shared: bool) -> list[socket.socket]:
    """A socket for each address of the host that this machine has; those after the first take its port."""
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, (address, _, *scope) in dict.fromkeys(found):
        each = socket.socket(family, kind, protocol)
        try:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_shared:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)  # connections inherit it
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            each.bind((address, sockets[0].getsockname()[1] if sockets else port, *scope))
            each.setblocking(False)
            sockets.append(each)
        except OSError as error:
            each.close()
            if error.errno != errno.EADDRNOTAVAIL:  # as ::1 is where a name has it and the machine has no IPv6
                for other in sockets:
                    other.close()
                raise
            missing = error
    if missing is not None and not sockets:
        raise missing
    return sockets


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """TLS 1.2 or later with the certificate that is configured; None if there is none. Else `ConfigurationError`."""
    if config.ssl_certfile is None and config.ssl_keyfile is None:
        return None
    if config.ssl_certfile is None:
        raise ConfigurationError("ssl_keyfile without a certificate: give ssl_certfile too, or neither")
    if config.ssl_keyfile is None:
        raise ConfigurationError("ssl_certfile without its private key: give ssl_keyfile too, or neither")
    _check_readable("ssl_certfile", config.ssl_certfile)
    _check_readable("ssl_keyfile", config.ssl_keyfile)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        _load_certificate(context, config)
    except ssl.SSLError as error:
        raise ConfigurationError(_explain(error, config)) from error
    return context


def _load_certificate(context: ssl.SSLContext, config: ServerConfig) -> None:
    assert config.ssl_certfile is not None, "checked"
    context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=_refuse_password)


def _check_readable(name: str, path: Path) -> None:
    """OpenSSL's own complaint would not say which of the two files it means."""
    try:
        path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{name} {path} cannot be read: {error.strerror}") from error


def _refuse_password() -> str:
    """Without this, OpenSSL would ask for the password at the terminal, and wait."""
    raise ConfigurationError("ssl_keyfile has a password; give a key without one (openssl pkey -in KEY -out NEW_KEY)")


def _explain(error: ssl.SSLError, config: ServerConfig) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"ssl_keyfile {config.ssl_keyfile} is not the key of the certificate in {config.ssl_certfile}"
    return (
        f"ssl_certfile {config.ssl_certfile} and ssl_keyfile {config.ssl_keyfile} must be PEM files with a certificate"
        f" and with its private key: {error.reason or error}"
    )


# --- connections

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
