"""The listening socket: where, with which certificate, and whether it can be had at all."""

import asyncio
import contextlib
import ipaddress
import ssl
from collections.abc import Iterator
from pathlib import Path

from aiohttp import web

from chairlift.api.config import ServerConfig
from chairlift.api.connections import Connection, Patience
from chairlift.errors import ConfigurationError


async def listen(server: web.Server, config: ServerConfig) -> asyncio.Server:
    """Accepts connections for an application's server, from here to `close()`."""
    patience = Patience.of(config)
    context = tls_context(config)
    handshake = None if context is None else patience.headers  # what slow headers are to http; the farewell likewise
    with _complaining(config):
        return await asyncio.get_running_loop().create_server(
            lambda: Connection(server, patience),
            config.host,
            config.port,
            ssl=context,
            ssl_handshake_timeout=handshake,
            ssl_shutdown_timeout=handshake,
        )


def check_can_listen(config: ServerConfig) -> None:
    """`ConfigurationError` if the address is not this machine's or the port is taken. Not from within an event loop."""

    async def try_it() -> None:
        server = await asyncio.get_running_loop().create_server(
            asyncio.Protocol, config.host, config.port, start_serving=False
        )
        server.close()

    with _complaining(config):
        asyncio.run(try_it())


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
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=_refuse_password)
    except ssl.SSLError as error:
        raise ConfigurationError(_explain(error, config)) from error
    return context


def url_of(listening: asyncio.Server, config: ServerConfig) -> str:
    """The address of the first socket, as clients write it."""
    host, port = listening.sockets[0].getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_open_to_others(listening: asyncio.Server) -> bool:
    """True if any socket can be reached from another machine."""
    hosts = [sock.getsockname()[0].partition("%")[0] for sock in listening.sockets]
    return not all(ipaddress.ip_address(host).is_loopback for host in hosts)


@contextlib.contextmanager
def _complaining(config: ServerConfig) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {config.host}:{config.port}: {error.strerror}") from error


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
