"""Says who may use the server: clients with an API key, and web pages that a browser or the server itself admits.

A server that asks for no key and listens only on this machine trusts all local programs. But any web page in a local
browser can send requests, too. Their headers name the page, and if the page's own name was made to resolve to this
machine (DNS rebinding), `Host` holds that name.
"""

import hashlib
import hmac
import ipaddress
import os
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from aiohttp import web

from chairlift.api import KEYS_VARIABLE, ServerConfig
from chairlift.api.answers.text import whole_characters
from chairlift.api.errors import Handler, convention_of, error_reply
from chairlift.errors import ConfigurationError, InvalidApiKey, InvalidRequest
from chairlift.params import RequestOptions

ANY = "*"  # origin or host
BATCH_HEADER = "X-Chairlift-Batch"
"""A header in which the server names the client for whose batch it asks itself, after a secret of this process."""

IDLE_PRIORITY = 10**9
"""The priority of requests of batches, below that of all others."""

_TENANT_CHARACTERS = 16  # 64 bits: two of a server's keys will not collide by accident
_RANGE = re.compile(r"(?P<lowest>-?[0-9]{1,10}):(?P<highest>-?[0-9]{1,10})")
_SHARE = re.compile(r"[0-9]*\.?[0-9]+")
_LIMIT = re.compile(r"\s+(?P<name>[a-z_]+)=(?P<value>[^\s=]+)$")

_ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_HOST = re.compile(r"(?P<name>[^:\[\]]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
_EXPOSED_HEADERS = "X-Request-Id, Retry-After"
_MAX_AGE_S = 3600  # how long browsers cache a preflight's answer


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits on the requests of one key."""

    lowest_priority: int  # the most urgent
    highest_priority: int
    queue_share: float

    @classmethod
    def parse(cls, priority: str = "0:100", queue: str = "0.5") -> "KeyLimits":
        """`priority`: `LOWEST:HIGHEST`. `ConfigurationError` if either cannot be read or is out of range."""
        found = _RANGE.fullmatch(priority)
        if found is None or int(found["lowest"]) > int(found["highest"]):
            raise ConfigurationError(f"priority must be LOWEST:HIGHEST, such as -10:10, not {priority!r}")
        share = float(queue) if _SHARE.fullmatch(queue) else 0.0
        if not 0.0 < share <= 1.0:
            raise ConfigurationError(f"queue must be above 0 and at most 1, not {queue!r}")
        return cls(int(found["lowest"]), int(found["highest"]), share)


class Scheduled(Protocol):
    """A body that says how its request is scheduled."""

    def request_options(self, key_tenant: str | None) -> RequestOptions:
        """`key_tenant`: the tenant of the API key; None where there are no keys."""
        ...


@dataclass(frozen=True, slots=True)
class Client:
    """The sender of a request: a key or, on a server without keys, an address."""

    name: str  # identifies clients that take turns; of a key, its digest
    limits: KeyLimits | None = None  # None: no keys are asked for
    shares_prefixes: bool = False
    is_idle: bool = False  # asks at idle priority, whatever its body says

    @property
    def owner(self) -> str:
        """The owner of the client's stored responses. Without keys, any client that knows an id may read them."""
        return "" if self.limits is None else self.name

    def options_of(self, body: Scheduled) -> RequestOptions:
        """Says how a request is scheduled. `InvalidRequest` if the key may not use its priority."""
        options = body.request_options(None if self.limits is None else self.name)
        if self.is_idle:
            options = replace(options, priority=IDLE_PRIORITY)
        if self.limits is None:
            return options
        lowest, highest = self.limits.lowest_priority, self.limits.highest_priority
        if not self.is_idle and not lowest <= options.priority <= highest:
            raise InvalidRequest(
                f"priority {options.priority} is out of this key's range: {lowest} to {highest}", "priority"
            )
        # Clients that share prefixes can infer from `usage` and from times what others sent and got.
        salt = options.cache_salt if self.shares_prefixes else f"{self.name}:{options.cache_salt}"
        return replace(options, cache_salt=salt, queue_share=self.limits.queue_share)


class KeyRing:
    """The valid keys; without any, every client is admitted."""

    def __init__(
        self, keys: Mapping[str, KeyLimits], shares_prefixes: bool = False, open_paths: Collection[str] = ()
    ) -> None:
        """`shares_prefixes`: keys reuse each other's cached prompts; `open_paths` need no key."""
        if len(keys) == 1:  # no other key needs the rest of the queue
            keys = {key: replace(limits, queue_share=1.0) for key, limits in keys.items()}
        digests = {_digest(key): limits for key, limits in keys.items()}
        self._clients = {
            digest: Client(digest.hex()[:_TENANT_CHARACTERS], limits, shares_prefixes)
            for digest, limits in digests.items()
        }
        self._open_paths = open_paths
        self._batch_secret = secrets.token_hex(32)

    def __len__(self) -> int:
        return len(self._clients)

    def knows(self, key: str) -> bool:
        """Compares with every key, each in constant time, so that timing tells nothing about them."""
        digest = _digest(key)
        return sum(hmac.compare_digest(digest, known) for known in self._clients) > 0

    def client_of(self, request: web.Request) -> Client:
        """The sender of a request that passed the middleware. A key has the same name on every server."""
        if (batch_client := self._batch_client_of(request)) is not None:
            return batch_client
        key = self._key_of(request)
        return Client(request.remote or "") if key is None else self._clients[_digest(key)]

    def has_owner(self, owner: str) -> bool:
        """Returns true if a client of this server has this name, or for "" if there are no keys."""
        return any(client.owner == owner for client in self._clients.values()) if self._clients else not owner

    def headers_for(self, owner: str) -> dict[str, str]:
        """The headers by which this process asks itself for a client's batch."""
        return {BATCH_HEADER: f"{self._batch_secret} {owner}"}

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuses requests without a valid key with `InvalidApiKey`."""
        asks_for_key = bool(self._clients) and request.path not in self._open_paths
        if asks_for_key and self._key_of(request) is None and self._batch_client_of(request) is None:
            raise InvalidApiKey
        return await handler(request)

    def _batch_client_of(self, request: web.Request) -> Client | None:
        """The client for whose batch this process asks itself; None for all other requests."""
        secret, _, owner = request.headers.get(BATCH_HEADER, "").partition(" ")
        if not hmac.compare_digest(secret.encode("utf-8", "surrogateescape"), self._batch_secret.encode()):
            return None
        client = next((each for each in self._clients.values() if each.owner == owner), Client("batches"))
        return replace(client, is_idle=True)

    def _key_of(self, request: web.Request) -> str | None:
        """The valid key of a request; None if it has none, or none is required."""
        return next((key for key in _keys_of(request) if self.knows(key)), None)


def check_access(config: ServerConfig) -> None:
    """`ConfigurationError` if keys or origins are wrong."""
    gather_keys(config)
    Cors(config.allowed_origin)


def gather_keys(config: ServerConfig) -> dict[str, KeyLimits]:
    """The keys from flags, file and environment, and the limits of each.

    `ConfigurationError` if a source is given but holds no key: an open server was not intended.
    """
    keys = [key.get_secret_value().strip() for key in config.api_key]
    if not all(keys):
        raise ConfigurationError("api_key is empty; give a key, or leave the flag out to ask for none")
    if (listed := os.environ.get(KEYS_VARIABLE)) is not None:
        in_environment = [key.strip() for key in listed.split(",") if key.strip()]
        if not in_environment:
            raise ConfigurationError(
                f"{KEYS_VARIABLE} is set but contains no key; set it to keys separated by commas, or unset it"
            )
        keys += in_environment
    in_file = {} if config.api_key_file is None else read_keys(config.api_key_file)
    return {**dict.fromkeys(keys, KeyLimits.parse()), **in_file}


def read_keys(path: Path) -> dict[str, KeyLimits]:
    """One key per line, optionally with limits; blank lines and lines that begin with # are ignored."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigurationError(f"api_key_file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:  # its message would show a piece of the file
        raise ConfigurationError(f"api_key_file {path} cannot be read: it is not UTF-8") from None
    keys: dict[str, KeyLimits] = {}
    for number, line in enumerate(lines, start=1):
        if line and not line.startswith("#"):
            try:
                keys.update([_parse_line(line)])
            except ConfigurationError as error:
                raise ConfigurationError(f"api_key_file {path}, line {number}: {error}") from None
    if not keys:
        raise ConfigurationError(f"api_key_file {path} contains no key; write one per line")
    return keys


def _parse_line(line: str) -> tuple[str, KeyLimits]:
    """`KEY priority=-10:10 queue=0.25`, where a key may hold spaces."""
    given: dict[str, str] = {}
    while (found := _LIMIT.search(line)) is not None:
        name = found["name"]
        if name not in ("priority", "queue") or name in given:
            raise ConfigurationError(
                f"{name}= is unknown or given twice; a key can have priority=LOWEST:HIGHEST and queue=SHARE"
            )
        given[name] = found["value"]
        line = line[: found.start()]
    return line, KeyLimits.parse(**given)


def _keys_of(request: web.Request) -> Iterator[str]:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield key.strip()
    convention = convention_of(request)
    if convention is not None:
        yield request.headers.get(convention.key_header, "").strip()


def _digest(key: str) -> bytes:
    """Digests have one length whatever the key's, which comparison in constant time needs."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Cors:
    """The Fetch standard's CORS protocol for allowed origins and, if `is_strict`, no service for any other page."""

    def __init__(self, allowed_origins: Sequence[str], allowed_hosts: Sequence[str] = ()) -> None:
        self._origins = frozenset(normalize_origin(origin) for origin in allowed_origins)
        self._hosts = frozenset(host.lower() for host in allowed_hosts)
        self.is_strict = False

    def install(self, app: web.Application) -> None:
        """Installs this before any other middleware, because preflights carry no API key."""
        if self._origins:
            app.middlewares.insert(0, self._answer_preflight)
            app.on_response_prepare.append(self._mark)  # streams prepare themselves, where no middleware sees them
        app.middlewares.insert(0, self._refuse_foreign_pages)

    def _allows(self, origin: str) -> bool:
        return ANY in self._origins or origin in self._origins

    @web.middleware
    async def _refuse_foreign_pages(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        is_form = request.content_type == "multipart/form-data"  # which a foreign page may send to any server
        complaint = self._complaint_of(request) if self.is_strict or is_form else None
        if complaint is not None:
            return error_reply(web.HTTPForbidden(text=complaint)).response(request)
        return await handler(request)

    def _complaint_of(self, request: web.Request) -> str | None:
        host = request.headers.get("Host")
        if self.is_strict and host is not None and not self._is_known(host):  # browsers always send one
            return f"this server does not answer to the name {host}; start it with --allowed-host to let that name in"
        origin = request.headers.get("Origin")
        if origin is not None:
            is_own = origin.lower() == f"{request.scheme}://{host}".lower()
            return None if is_own or self._allows(origin) else _refusal(origin)
        # Foreign pages load images and scripts without an origin. Following a link is not such a fetch.
        is_foreign = request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site")
        if is_foreign and request.headers.get("Sec-Fetch-Mode") != "navigate":
            return _refusal("another site")
        return None

    def _is_known(self, host: str) -> bool:
        found = _HOST.fullmatch(host.lower())
        if found is None:
            return False
        name = found["name"].strip("[]")
        return ANY in self._hosts or name in self._hosts or name == "localhost" or _is_loopback(name)

    @web.middleware
    async def _answer_preflight(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        if request.method != "OPTIONS" or origin is None or "Access-Control-Request-Method" not in request.headers:
            return await handler(request)
        if not self._allows(origin):
            return error_reply(web.HTTPForbidden(text=_refusal(origin))).response(request)
        error = request.match_info.http_exception  # OPTIONS itself has no route
        methods = error.allowed_methods if isinstance(error, web.HTTPMethodNotAllowed) else {"GET", "POST"}
        headers = {
            "Access-Control-Allow-Methods": ", ".join(sorted(methods)),
            # A * would not include Authorization, so the requested headers are named.
            "Access-Control-Allow-Headers": whole_characters(
                request.headers.get("Access-Control-Request-Headers", "Authorization")
            ),
            "Access-Control-Max-Age": str(_MAX_AGE_S),
        }
        return web.Response(status=204, headers=headers)

    async def _mark(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers.add("Vary", "Origin")  # a cache must not give one origin's reply to another
        origin = request.headers.get("Origin")
        if origin is not None and self._allows(origin):
            response.headers["Access-Control-Allow-Origin"] = ANY if ANY in self._origins else origin
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED_HEADERS


def normalize_origin(origin: str) -> str:
    """An origin as browsers write it: in lower case, without the scheme's default port. `*` is returned as it is."""
    if origin == ANY:
        return origin
    match = _ORIGIN.fullmatch(origin.lower())
    if match is None or int(match["port"] or 0) > 65535:
        raise ConfigurationError(
            f"allowed_origin {origin!r} is not an origin: write scheme://host or scheme://host:port, the host in ASCII,"
            " with nothing behind it; or * for every origin"
        )
    scheme, host, port = match["scheme"], match["host"], match["port"]
    return f"{scheme}://{host}" if port in (None, _DEFAULT_PORTS.get(scheme)) else f"{scheme}://{host}:{port}"


def _refusal(origin: str) -> str:
    site = whole_characters(origin)
    return f"pages of {site} may not use this server; start it with --allowed-origin to let them"


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:  # a name
        return False
