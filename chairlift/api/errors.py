"""Every failure as OpenAI's error body with the right status."""

import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from aiohttp import web
from pydantic import ValidationError

from chairlift.api.wire.base import ErrorBody, ErrorDetail
from chairlift.errors import (
    EngineClosed,
    EngineDead,
    InvalidApiKey,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    QueueTimeout,
    RequestFailed,
)

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 1  # where nothing better is known

_KINDS = {
    InvalidApiKey: (401, "invalid_request_error", "invalid_api_key"),
    QueueFull: (429, "rate_limit_error", "queue_full"),
    QueueTimeout: (503, "server_error", "queue_timeout"),
    EngineClosed: (503, "server_error", "unavailable"),
    RequestFailed: (500, "server_error", "request_failed"),
    EngineDead: (500, "server_error", "engine_dead"),
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Failure:
    """A status and the body that explains it."""

    status: int
    detail: ErrorDetail
    allow: str | None = None  # of a 405: the methods that there are
    retry_after_s: int = _RETRY_AFTER_S  # of a 429 or 503

    def body(self) -> str:
        return ErrorBody(error=self.detail).model_dump_json()

    def response(self) -> web.Response:
        headers = {"Retry-After": str(self.retry_after_s)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.allow is not None:
            headers["Allow"] = self.allow
        return web.Response(status=self.status, text=self.body(), content_type="application/json", headers=headers)


def failure_of(error: Exception) -> Failure:
    """What to tell a client. An exception that nobody expected is logged and becomes a 500."""
    match error:
        case ValidationError():
            return _describe(error)
        case ModelNotFound():
            detail = ErrorDetail(
                message=str(error), type="invalid_request_error", param=error.param, code="model_not_found"
            )
            return Failure(404, detail)
        case InvalidRequest():
            return _invalid(str(error), error.param)
        case QueueFull() | QueueTimeout():
            return replace(_known(error), retry_after_s=max(math.ceil(error.retry_after), _RETRY_AFTER_S))
        case InvalidApiKey() | EngineClosed() | RequestFailed() | EngineDead():
            return _known(error)
        case web.RequestPayloadError():
            return _invalid("the body cannot be decoded; check its Content-Encoding", None)
        case web.HTTPException():
            kind = "invalid_request_error" if error.status < 500 else "server_error"
            detail = ErrorDetail(message=_http_message(error), type=kind)
            return Failure(error.status, detail, allow=error.headers.get("Allow"))
        case _:
            logger.error("a request failed unexpectedly", exc_info=error)
            return Failure(500, ErrorDetail(message=f"internal error: {type(error).__name__}", type="server_error"))


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns what a handler raises into an error reply. Streams that have begun report their own."""
    try:
        return await handler(request)
    except Exception as error:
        return failure_of(error).response()


def _known(error: Exception) -> Failure:
    status, kind, code = next(row for known, row in _KINDS.items() if isinstance(error, known))
    return Failure(status, ErrorDetail(message=str(error), type=kind, code=code))


def _invalid(message: str, param: str | None) -> Failure:
    return Failure(400, ErrorDetail(message=message, type="invalid_request_error", param=param))


def _describe(error: ValidationError) -> Failure:
    """One complaint, with the field's name in it: our own if there is one, else the first."""
    complaints = error.errors(include_url=False)
    for complaint in complaints:
        cause = complaint.get("ctx", {}).get("error")
        if isinstance(cause, InvalidRequest):
            return _invalid(str(cause), cause.param)
    first = complaints[0]
    path = ".".join(str(part) for part in first["loc"])
    param = str(first["loc"][0]) if path else None
    if first["type"] == "extra_forbidden":
        return _invalid(f"unknown or unsupported field: {path}", path)
    if first["type"] == "json_invalid":
        return _invalid(f"the body is not JSON: {first['msg']}", None)
    return _invalid(f"{path}: {first['msg']}" if path else first["msg"], param)


def _http_message(error: web.HTTPException) -> str:
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return f"the body is too large: {error.text}"
    return error.text or error.reason
