"""API keys: who may use the server."""

import hashlib
import hmac
import os
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from chairlift.api.config import KEYS_VARIABLE, ServerConfig
from chairlift.api.errors import Handler
from chairlift.api.home import PAGE_PATHS
from chairlift.api.routes import ROUTES
from chairlift.errors import ConfigurationError, InvalidApiKey

_TENANT_CHARACTERS = 16  # 64 bits: two of a server's keys will not share them by accident

_OPEN_PATHS = PAGE_PATHS | {route.path for route in ROUTES if route.is_open}


class KeyRing:
    """The keys that are valid; an empty ring lets everybody in."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def knows(self, key: str) -> bool:
        """Compares with every key, each in constant time, so that timing tells nothing about them."""
        digest = _digest(key)
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0

    def tenant_of(self, request: web.Request) -> str | None:
        """A name for whoever holds the request's key, from which the key cannot be read; None if no keys are asked for.

        It is the same for the same key on every server.
        """
        return _digest(_key_of(request)).hex()[:_TENANT_CHARACTERS] if self._digests else None

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuses requests without a valid key with `InvalidApiKey`."""
        if self._digests and request.path not in _OPEN_PATHS and not self.knows(_key_of(request)):
            raise InvalidApiKey
        return await handler(request)


def gather_keys(config: ServerConfig) -> list[str]:
    """The keys of all three places: flags, file and environment.

    A place that is named but holds no key is a `ConfigurationError`: who wrote it did not want an open server.
    """
    keys = [key.get_secret_value().strip() for key in config.api_key]
    if not all(keys):
        raise ConfigurationError("api_key is empty; give a key, or leave the flag out to let everybody in")
    if config.api_key_file is not None:
        keys += read_keys(config.api_key_file)
    if (listed := os.environ.get(KEYS_VARIABLE)) is not None:
        in_environment = [key.strip() for key in listed.split(",") if key.strip()]
        if not in_environment:
            raise ConfigurationError(f"{KEYS_VARIABLE} is set but holds no key; write keys with commas, or unset it")
        keys += in_environment
    return keys


def read_keys(path: Path) -> list[str]:
    """One key per line; blank lines and lines that begin with # are passed over."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigurationError(f"api_key_file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:  # whose message would show a piece of the file
        raise ConfigurationError(f"api_key_file {path} cannot be read: it is not UTF-8") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigurationError(f"api_key_file {path} holds no key; write one per line")
    return keys


def _key_of(request: web.Request) -> str:
    """The key that it brings; empty if none, which no key is."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    """Of one length for keys of any length, which comparison in constant time needs."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
