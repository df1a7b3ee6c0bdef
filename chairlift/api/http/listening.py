"""Listens for connections: takes the address before a model is loaded, sets up TLS, and paces accepting."""

import asyncio
import errno
import ipaddress
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from chairlift.api import ServerConfig
from chairlift.errors import ConfigurationError

logger = logging.getLogger(__name__)

_BACKLOG = 4096  # connections pending acceptance; a burst must not wait for repeated handshakes
_ACCEPTED_IN_A_TURN = 64  # of the event loop, so that other connections are served in between
_ALARM_INTERVAL_S = 10.0
_PAUSE_S = 0.1
_RECEIVE_BUFFER_BYTES = 2**16  # of a socket: all that has arrived is parsed at once, at 2.5 µs per one-byte chunk
_OPEN_TO_ALL = 0o666


class Listener:
    """The sockets of one server. Connections are refused until it accepts them. A context manager, which closes it."""

    def __init__(self, config: ServerConfig, *, is_shared: bool = False) -> None:
        """`ConfigurationError` if the address is not this machine's, the port is taken, or the certificate is wrong.

        `is_shared`: takes the address of another listener, which lets others share it.
        """
        self._config = config
        self._tls = tls_context(config)
        with _naming_the_address(config):
            file = config.uds
            self.sockets = _bind(config.host, config.port, is_shared) if file is None else [_bind_file(file)]
        self._last_alarm = -_ALARM_INTERVAL_S
        self._loop: asyncio.AbstractEventLoop | None = None  # in which it accepts connections
        self._handshakes: set[asyncio.Task[None]] = set()

    def accept(self, make_protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        """Makes a protocol for every connection, in the running event loop, from here to `close()`.

        `ConfigurationError` if another program has begun to listen there since the address was taken.
        """
        self._loop = asyncio.get_running_loop()
        for each in self.sockets:
            with _naming_the_address(self._config):
                each.listen(_BACKLOG)
            self._loop.add_reader(each, self._accept_some, each, make_protocol)

    def let_share(self) -> None:
        """Lets this user's shared listeners take the address too. The system spreads the connections."""
        for each in self.sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)

    def close(self) -> None:
        for each in self.sockets:
            if self._loop is not None:
                self._loop.remove_reader(each)
            each.close()
        self._loop = None
        if self._config.uds is not None:
            self._config.uds.unlink(missing_ok=True)

    def _accept_some(self, waiting: socket.socket, make_protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        """Accepts a few at a time: the loop's own servers accept all pending ones, and then read from all at once."""
        try:
            for _ in range(_ACCEPTED_IN_A_TURN):
                connection, _ = waiting.accept()
                task = asyncio.ensure_future(self._begin(connection, make_protocol))
                self._handshakes.add(task)
                task.add_done_callback(self._handshakes.discard)
        except (BlockingIOError, ConnectionAbortedError):
            return  # none is pending, or one has left
        except OSError as error:
            self._pause(waiting, make_protocol, error)

    def _pause(self, waiting: socket.socket, make_protocol: Callable[[], asyncio.BaseProtocol], error: OSError) -> None:
        """Pauses when file descriptors or memory run out; pending connections stay in the queue."""
        assert self._loop is not None, "it accepts"
        now = time.monotonic()
        if now - self._last_alarm >= _ALARM_INTERVAL_S:
            self._last_alarm = now
            logger.warning(
                "cannot accept connections (%s); they wait until others close. If too many files are open,"
                " raise the limit (ulimit -n)",
                error.strerror,
            )
        self._loop.remove_reader(waiting)

        def go_on() -> None:
            if self._loop is not None:
                self._loop.add_reader(waiting, self._accept_some, waiting, make_protocol)

        self._loop.call_later(_PAUSE_S, go_on)

    async def _begin(self, connection: socket.socket, make_protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        timeout = None if self._tls is None else self._config.client_timeout
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                make_protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=timeout,
                ssl_shutdown_timeout=timeout,
            )
        except OSError as error:  # also if a handshake failed or took too long
            logger.debug("a connection ended before its first request: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def port(self) -> int:
        port: int = self.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """The address of the first socket, as clients write it."""
        if self._config.uds is not None:
            return f"unix:{self._config.uds}"
        host, port = self.sockets[0].getsockname()[:2]
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @property
    def is_open_to_others(self) -> bool:
        """True if any socket can be reached from another machine."""
        if self._config.uds is not None:
            return False
        hosts = [each.getsockname()[0].partition("%")[0] for each in self.sockets]
        return not all(ipaddress.ip_address(host).is_loopback for host in hosts)

    def renew_certificate(self) -> None:
        """Reads certificate and key again, for later connections. If they are invalid, the old ones stay in use."""
        if self._tls is None:
            logger.info("SIGHUP: there is no certificate to read again; nothing was done")
            return
        try:
            tls_context(self._config)  # finds errors before any part of it is in use
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
        where, flags = f"{config.host}:{config.port}", "--host or --port"
        if config.uds is not None:
            where, flags = str(config.uds), "--uds"
        reason = error.strerror or error
        raise ConfigurationError(f"cannot listen on {where}: {reason}; choose another {flags}") from error


def _bind(host: str, port: int, is_shared: bool) -> list[socket.socket]:
    """A socket for each address of the host that this machine has; all use the first one's port."""
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
            if error.errno != errno.EADDRNOTAVAIL:  # such as ::1 on a machine without IPv6
                for other in sockets:
                    other.close()
                raise
            missing = error
    if missing is not None and not sockets:
        raise missing
    return sockets


def _bind_file(path: Path) -> socket.socket:
    """A Unix socket of that name, which takes the place of one that a killed server has left."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and bound.connect_ex(str(path)) == errno.ECONNREFUSED:
            path.unlink()
        bound.close()
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        bound.bind(str(path))
        path.chmod(_OPEN_TO_ALL)  # its directory says who may use it, as the setting promises, whatever the umask is
        bound.setblocking(False)
    except OSError:
        bound.close()
        raise
    return bound


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """TLS 1.2 or later with the configured certificate, or None if there is none. Else `ConfigurationError`."""
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
    """Checks this here because OpenSSL's own error does not name the file."""
    try:
        path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{name} {path} cannot be read: {error.strerror}") from error


def _refuse_password() -> str:
    """Without this, OpenSSL would ask for the password at the terminal, and block."""
    raise ConfigurationError("ssl_keyfile has a password; give a key without one (openssl pkey -in KEY -out NEW_KEY)")


def _explain(error: ssl.SSLError, config: ServerConfig) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"ssl_keyfile {config.ssl_keyfile} is not the key of the certificate in {config.ssl_certfile}"
    return (
        f"ssl_certfile {config.ssl_certfile} and ssl_keyfile {config.ssl_keyfile} must be PEM files with a certificate"
        f" and with its private key: {error.reason or error}"
    )
