"""Cross-origin requests: which web pages a browser lets use the server (the Fetch standard's CORS protocol)."""

import re
from collections.abc import Sequence

from aiohttp import web

from chairlift.api.errors import Handler, failure_of
from chairlift.errors import ConfigurationError

ANY_ORIGIN = "*"

_ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_EXPOSED_HEADERS = "X-Request-Id, Retry-After"
_MAX_AGE_S = 3600  # for which browsers remember a preflight's answer


class Cors:
    """The origins that are allowed. Browsers ask; other clients never notice."""

    def __init__(self, allowed_origins: Sequence[str]) -> None:
        self._origins = frozenset(normalize_origin(origin) for origin in allowed_origins)

    def install(self, app: web.Application) -> None:
        """Answers preflights before any other middleware sees them, as they carry no API key, and marks all replies.

        Without an allowed origin the application stays as it is.
        """
        if self._origins:
            app.middlewares.insert(0, self._answer_preflight)
            app.on_response_prepare.append(self._mark)  # streams prepare themselves, out of reach of middlewares

    def _allows(self, origin: str) -> bool:
        return ANY_ORIGIN in self._origins or origin in self._origins

    @web.middleware
    async def _answer_preflight(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        if request.method != "OPTIONS" or origin is None or "Access-Control-Request-Method" not in request.headers:
            return await handler(request)
        if not self._allows(origin):
            message = f"pages of {origin} may not use this server; --allowed-origin would let them"
            return failure_of(web.HTTPForbidden(text=message)).response()
        # A * would not stand for Authorization, so the headers that are asked for are named.
        headers = {
            "Access-Control-Allow-Methods": ", ".join(_methods_of(request)),
            "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", "Authorization"),
            "Access-Control-Max-Age": str(_MAX_AGE_S),
        }
        return web.Response(status=204, headers=headers)

    async def _mark(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers.add("Vary", "Origin")  # a cache must not give one origin's reply to another
        origin = request.headers.get("Origin")
        if origin is not None and self._allows(origin):
            response.headers["Access-Control-Allow-Origin"] = ANY_ORIGIN if ANY_ORIGIN in self._origins else origin
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED_HEADERS


def normalize_origin(origin: str) -> str:
    """An origin as browsers write it: in lower case, without the scheme's own port. `*` stays itself."""
    if origin == ANY_ORIGIN:
        return origin
    match = _ORIGIN.fullmatch(origin.lower())
    if match is None or int(match["port"] or 0) > 65535:
        raise ConfigurationError(
            f"allowed_origin {origin!r} is no origin: write scheme://host or scheme://host:port, without a path or a"
            " slash at the end, the host in ASCII; or * for every origin"
        )
    scheme, host, port = match["scheme"], match["host"], match["port"]
    return f"{scheme}://{host}" if port in (None, _DEFAULT_PORTS.get(scheme)) else f"{scheme}://{host}:{port}"


def _methods_of(request: web.Request) -> list[str]:
    """What the path knows; OPTIONS itself has no route. A path that is not there has no methods to speak of."""
    error = request.match_info.http_exception
    return sorted(error.allowed_methods) if isinstance(error, web.HTTPMethodNotAllowed) else ["GET", "POST"]
