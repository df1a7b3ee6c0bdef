"""Turns every failure into an error body, in the form that the path's clients expect, with the right status.

An error body repeats at most a kilobyte of what the client sent.
"""

import json
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from aiohttp import web
from pydantic import BaseModel, ValidationError

from chairlift.api.answers.text import whole_characters
from chairlift.api.telemetry.observation import OBSERVATION
from chairlift.api.telemetry.request_ids import request_id_of
from chairlift.api.wire.complaints import complaint_of
from chairlift.api.wire.errors import ErrorBody, ErrorDetail
from chairlift.errors import (
    ChairliftError,
    ClientTooBusy,
    ContextLengthExceeded,
    EngineClosed,
    EngineDead,
    GrammarsBusy,
    InvalidApiKey,
    InvalidRequest,
    ModelNotFound,
    PromptExcess,
    QueueFull,
    QueueTimeout,
    RequestFailed,
    ServerTooBusy,
)

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 1  # where nothing better is known
_MAX_MESSAGE_BYTES = 800
_MAX_PARAM_BYTES = 100
_MAX_REASON_BYTES = 200  # in the log

_STATUSES: dict[type[ChairliftError], tuple[int, str | None]] = {
    ModelNotFound: (404, "model_not_found"),
    ContextLengthExceeded: (400, "context_length_exceeded"),
    InvalidRequest: (400, None),
    InvalidApiKey: (401, "invalid_api_key"),
    QueueFull: (429, "queue_full"),
    QueueTimeout: (503, "queue_timeout"),
    ClientTooBusy: (429, "client_too_busy"),
    ServerTooBusy: (503, "server_too_busy"),
    GrammarsBusy: (503, "grammars_busy"),
    EngineClosed: (503, "unavailable"),
    RequestFailed: (500, "request_failed"),
    EngineDead: (500, "engine_dead"),
}
"""Status and code by exception type; the first type that matches counts."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ENDPOINTS = web.AppKey("chairlift_endpoints", str)
"""The endpoints that a 404 lists."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """A status and the body that explains it."""

    status: int
    detail: ErrorDetail
    allow: str | None = None  # for a 405: the allowed methods
    retry_after_s: int = _RETRY_AFTER_S  # for a 429 or 503
    excess: PromptExcess | None = None  # of a prompt that is too long

    def body(self, request: web.Request) -> str:
        """The body, in the form of the request's convention."""
        return self.body_in(convention_of(request), request_id_of(request))

    def body_in(self, convention: "Convention | None", request_id: str | None) -> str:
        """The body in the form of a convention; None: OpenAI's."""
        if convention is None:
            return ErrorBody(error=self.detail).model_dump_json()
        return convention.error_body(self, request_id).model_dump_json()

    @property
    def headers(self) -> dict[str, str]:
        headers = {"Retry-After": str(self.retry_after_s)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.allow is not None:
            headers["Allow"] = self.allow
        return headers

    def response(self, request: web.Request | None = None) -> web.Response:
        text = self.body_in(None, None) if request is None else self.body(request)
        return web.Response(status=self.status, text=text, content_type="application/json", headers=self.headers)


@dataclass(frozen=True, slots=True)
class Convention:
    """Says in which form clients of a path, and of all paths below it, expect errors, and where they put their keys."""

    path: str
    error_body: Callable[[ErrorReply, str | None], BaseModel]  # of an error and the request's id
    key_header: str  # holds the client's key, in addition to `Authorization`

    def covers(self, path: str) -> bool:
        return path == self.path or path.startswith(f"{self.path}/")


KNOWN_CONVENTIONS: web.AppKey[Sequence[Convention]] = web.AppKey("chairlift_conventions")


def convention_of(request: web.Request) -> Convention | None:
    """The convention of the request's path; None: OpenAI's."""
    return find_convention(request.path, request.app.get(KNOWN_CONVENTIONS, ()))


def find_convention(path: str, known: Sequence[Convention]) -> Convention | None:
    """The one of these that covers the path."""
    return next((each for each in known if each.covers(path)), None)


def error_reply(error: Exception) -> ErrorReply:
    """Makes the reply to a failed request. An unexpected exception is logged and becomes a 500."""
    if isinstance(error, ValidationError):
        error = complaint_of(error)
    elif isinstance(error, RecursionError):
        error = InvalidRequest("the body is nested too deeply; nest less")
    elif isinstance(error, web.RequestPayloadError):
        error = InvalidRequest("the body cannot be decoded; check its Content-Encoding")
    for kind, (status, code) in _STATUSES.items():
        if isinstance(error, kind):
            detail = _detail(status, str(error), getattr(error, "param", None), code)
            retry_after = math.ceil(getattr(error, "retry_after", _RETRY_AFTER_S))
            excess = error.excess if isinstance(error, ContextLengthExceeded) else None
            return ErrorReply(status, detail, retry_after_s=max(retry_after, _RETRY_AFTER_S), excess=excess)
    if isinstance(error, web.HTTPException):
        message = error.text or error.reason
        if isinstance(error, web.HTTPRequestEntityTooLarge):
            message = f"the body is too large: {message}"
        return ErrorReply(error.status, _detail(error.status, message), allow=error.headers.get("Allow"))
    logger.error("a request failed unexpectedly", exc_info=error)
    return ErrorReply(500, _detail(500, f"internal error: {type(error).__name__}"))


def _detail(status: int, message: str, param: str | None = None, code: str | None = None) -> ErrorDetail:
    kind = "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
    param = None if param is None else _shorten(param, _MAX_PARAM_BYTES)
    return ErrorDetail(message=_shorten(message, _MAX_MESSAGE_BYTES), type=kind, param=param, code=code)


def _shorten(text: str, max_bytes: int) -> str:
    """The text as UTF-8 can encode it, cut to at most so many bytes of JSON, with "..." appended if it was cut."""
    text = whole_characters(text)
    shorter = text[:max_bytes]
    while len(json.dumps(shorter)) > max_bytes + 2:
        shorter = shorter[: len(shorter) * 3 // 4]
    return text if shorter == text else f"{shorter}..."


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns what a handler raises into an error reply. Streams that have begun report their own errors."""
    try:
        return await handler(request)
    except Exception as error:
        if error is request.match_info.http_exception:  # the router's own message only repeats the status
            path = _shorten(request.path, _MAX_PARAM_BYTES)
            if isinstance(error, web.HTTPMethodNotAllowed):
                error.text = f"{path} takes {' or '.join(sorted(error.allowed_methods))}, not {request.method}"
            elif isinstance(error, web.HTTPNotFound):
                error.text = f"there is no {path} here; there are {request.app.get(ENDPOINTS, 'none')}"
        reply = error_reply(error)
        if OBSERVATION in request:
            request[OBSERVATION].reason = _shorten(reply.detail.message, _MAX_REASON_BYTES)
        return reply.response(request)
