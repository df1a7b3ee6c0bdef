"""What `/v1/responses` answers: the whole reply, and the events of a streamed one."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, RootModel

from chairlift.api.wire.base import ErrorDetail, LeftOutIfNone
from chairlift.api.wire.chat import TokenLogprob
from chairlift.api.wire.usage import Usage

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(BaseModel):
    """What the model says."""

    id: str
    type: Literal["message"] = "message"
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputCall(BaseModel):
    """What the model wants to be called."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputCall


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """How many tokens a request took."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> "ResponseUsage":
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
        )


class IncompleteDetails(BaseModel):
    """Why a response ended early; without a reason: its timeout passed, or the server went down."""

    reason: Annotated[Literal["max_output_tokens"] | None, LeftOutIfNone] = None


class ResponseError(BaseModel):
    """Why a response failed."""

    code: Literal["server_error"] = "server_error"
    message: str


class ResponseObject(BaseModel):
    """The reply. What was asked for is repeated in it, with what was left open filled in."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None

    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None

    background: Literal[False] = False
    previous_response_id: None = None
    reasoning: None = None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"


class Event(BaseModel):
    """One event of a streamed reply; they are numbered from 0."""

    type: str
    sequence_number: int = 0


class ResponseEvent(Event):
    """The whole reply as far as it is."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: ResponseObject


class ItemEvent(Event):
    """An item begins or ends."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class PartEvent(Event):
    """A part of a message begins or ends."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText


class TextDelta(Event):
    """What a message has more."""

    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(Event):
    """All of a message's text."""

    type: Literal["response.output_text.done"] = "response.output_text.done"
    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: list[TokenLogprob]


class ArgumentsDelta(Event):
    """What a call's arguments have more."""

    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Event):
    """All of a call's arguments."""

    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    item_id: str
    output_index: int
    name: str
    arguments: str


class ErrorEvent(Event):
    """The end of a stream that cannot go on. `error` says the same once more: by it the `openai` client knows."""

    type: Literal["error"] = "error"
    message: str
    code: str | None
    param: str | None
    error: ErrorDetail


class ResponsesEvent(
    RootModel[
        ResponseEvent | ItemEvent | PartEvent | TextDelta | TextDone | ArgumentsDelta | ArgumentsDone | ErrorEvent
    ]
):
    """One event of a streamed reply."""
