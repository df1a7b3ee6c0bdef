"""The errors of `/v1/messages`."""

from typing import Annotated, Literal

from pydantic import BaseModel

from chairlift.api.wire.body import LeftOutIfNone
from chairlift.api.wire.errors import ErrorDetail
from chairlift.api.wire.events import NamedEvent
from chairlift.errors import PromptExcess

ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "overloaded_error",
]
_ERROR_TYPES: dict[int, ErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class ErrorDetails(BaseModel):
    """Tells a client to send the whole conversation from here on."""

    error_code: Literal["thread_unsupported_request"] = "thread_unsupported_request"
    unsupported: list[str] = ["thread"]


class AnthropicErrorDetail(BaseModel):
    type: ErrorType
    message: str
    details: Annotated[ErrorDetails | None, LeftOutIfNone] = None


class AnthropicErrorBody(NamedEvent):
    """Every error's body, and the event that ends a stream that cannot go on."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail
    request_id: str | None = None

    @classmethod
    def of(
        cls, status: int, detail: ErrorDetail, request_id: str | None = None, excess: PromptExcess | None = None
    ) -> "AnthropicErrorBody":
        """`excess`: of a prompt that is too long, for clients that look for these words to shorten a conversation."""
        message = detail.message
        if excess is not None:
            message = f"prompt is too long: {excess.num_tokens} tokens > {excess.limit} maximum. {message}"
        kind = _ERROR_TYPES.get(status, "invalid_request_error")
        details = ErrorDetails() if detail.param == "thread" else None
        return cls(error=AnthropicErrorDetail(type=kind, message=message, details=details), request_id=request_id)
