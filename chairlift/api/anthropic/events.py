"""The events of a streamed message."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, RootModel

from chairlift.api.anthropic.errors import AnthropicErrorBody
from chairlift.api.anthropic.message import AnthropicMessage, Block, MessageUsage, StopReason
from chairlift.api.wire.events import NamedEvent


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
    """Tells how the message ended."""

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
