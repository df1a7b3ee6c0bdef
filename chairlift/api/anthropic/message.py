"""The whole message that `/v1/messages` answers."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from chairlift.api.wire.body import WholeReply
from chairlift.api.wire.usage import Usage


class SaidText(BaseModel):
    """Holds what the model says."""

    type: Literal["text"] = "text"
    text: str
    citations: None = None


class Thoughts(BaseModel):
    """Holds what the model thought before what follows. The signature is a digest of the text: it hides nothing."""

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
    """Counts the generated tokens that are thoughts."""

    thinking_tokens: int


class MessageUsage(BaseModel):
    """Counts the tokens that a request took; those of the prompt that were computed, and those that were reused."""

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


class AnthropicMessage(WholeReply):
    """The reply. `stop_reason` is pause_turn if its timeout passed, or the server went down: it can be continued."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block] = Field([])
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(BaseModel):
    """Counts the tokens of a prompt."""

    input_tokens: int
