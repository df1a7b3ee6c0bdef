"""The convention of Anthropic's clients: they expect errors of another form, and send their key in another header."""

from chairlift.api.anthropic.errors import AnthropicErrorBody
from chairlift.api.errors import Convention, ErrorReply

PATH = "/v1/messages"
KEY_HEADER = "x-api-key"


def _error_body(error: ErrorReply, request_id: str | None) -> AnthropicErrorBody:
    return AnthropicErrorBody.of(error.status, error.detail, request_id, error.excess)


CONVENTION = Convention(PATH, _error_body, KEY_HEADER)
