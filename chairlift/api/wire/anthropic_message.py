"""What `/v1/messages` answers: the whole message, the events of a streamed one, and errors."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, RootModel

from chairlift.api.wire.body import LeftOutIfNone
from chairlift.api.wire.errors import ErrorDetail
from chairlift.api.wire.events import NamedEvent
from chairlift.api.wire.usage import Usage
from chairlift.errors import PromptExcess


class SaidText(BaseModel):
    """What the model says."""

    type: Literal["text"] = "text"
    text: str
    citations: None = None


class Thoughts(BaseModel):
    """What the model thought before what follows. The signature is a digest of the text: nothing is hidden in it."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class MadeCall(BaseModel):
    """A call that the model makes."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any] = {}


Block = SaidText | Thoughts | MadeCall


class OutputTokensDetails(BaseModel):
    """How many of the generated tokens are thoughts."""

    thinking_tokens: int


class MessageUsage(BaseModel):
    """How many tokens a request took; those of the prompt that were computed, and those that were reused."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails

    @classmethod
    def of(cls, usage: Usage) -> "MessageUsage":
        num_cached = usage.prompt_tokens_details.cached_tokens
        return cls(
            input_tokens=usage.prompt_tokens - num_cached,
            cache_read_input_tokens=num_cached,
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(thinking_tokens=usage.completion_tokens_details.reasoning_tokens),
        )


StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "model_context_window_exceeded"
]


class AnthropicMessage(BaseModel):
    """The reply. `stop_reason` is pause_turn if its timeout passed, or the server went down: it can be continued."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(BaseModel):
    """How many tokens a prompt has."""

    input_tokens: int


# --- errors

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


# --- events


class MessageStart(NamedEvent):
    """The first event: the message as far as it exists."""

    type: Literal["message_start"] = "message_start"
    message: AnthropicMessage


class ContentBlockStart(NamedEvent):
    """A block begins."""

    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: Block


class TextDelta(BaseModel):
    type: Literal["text_delta"] = "text_delta"
    text: str


class InputJsonDelta(BaseModel):
    type: Literal["input_json_delta"] = "input_json_delta"
    partial_json: str


class ThinkingDelta(BaseModel):
    type: Literal["thinking_delta"] = "thinking_delta"
    thinking: str


class SignatureDelta(BaseModel):
    type: Literal["signature_delta"] = "signature_delta"
    signature: str


class ContentBlockDelta(NamedEvent):
    """The new part of a block."""

    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: Annotated[TextDelta | InputJsonDelta | ThinkingDelta | SignatureDelta, Field(discriminator="type")]


class ContentBlockStop(NamedEvent):
    """A block ends."""

    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class MessageEnd(BaseModel):
    stop_reason: StopReason
    stop_sequence: str | None = None


class MessageDelta(NamedEvent):
    """How the message ended."""

    type: Literal["message_delta"] = "message_delta"
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(NamedEvent):
    """The last event."""

    type: Literal["message_stop"] = "message_stop"


class Ping(NamedEvent):
    """Keeps a silent stream alive."""

    type: Literal["ping"] = "ping"


StreamEvent = (
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | Ping
    | AnthropicErrorBody
)


class MessagesEvent(RootModel[StreamEvent]):
    """One event of a streamed reply."""
