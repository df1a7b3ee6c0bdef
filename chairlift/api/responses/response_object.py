"""The reply of `/v1/responses`: the whole one, and the events of a streamed one."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, RootModel

from chairlift.api.responses.items import ItemStatus
from chairlift.api.wire.body import LeftOutIfNone, WholeReply
from chairlift.api.wire.conversation import Effort
from chairlift.api.wire.errors import ErrorDetail
from chairlift.api.wire.events import NamedEvent
from chairlift.api.wire.scores import TokenLogprob
from chairlift.api.wire.usage import Usage


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(BaseModel):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(BaseModel):
    """Holds what the model thought before what follows."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus
    summary: list[Any] = []
    content: list[ReasoningText]


class OutputMessage(BaseModel):
    """Holds what the model says."""

    id: str
    type: Literal["message"] = "message"
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputCall(BaseModel):
    """A call that the model makes."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class OutputCustomCall(BaseModel):
    """A call of a custom tool."""

    id: str
    type: Literal["custom_tool_call"] = "custom_tool_call"
    status: ItemStatus
    call_id: str
    name: str
    input: str


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Counts the tokens that a request took."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> "ResponseUsage":
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(
                reasoning_tokens=usage.completion_tokens_details.reasoning_tokens
            ),
            total_tokens=usage.total_tokens,
        )


class IncompleteDetails(BaseModel):
    """Says why a response ended early; without a reason: its timeout passed, or the server went down."""

    reason: Annotated[Literal["max_output_tokens"] | None, LeftOutIfNone] = None


class ResponseError(BaseModel):
    """Says why a response failed."""

    code: Literal["server_error"] = "server_error"
    message: str


class ReasoningUsed(BaseModel):
    """Repeats what was asked for."""

    effort: Effort | None = None
    summary: None = None


class UsedTool(BaseModel):
    """A function that the model may call, with defaults for what was left out."""

    type: Literal["function"] = "function"
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool


class UsedCustomTool(BaseModel):
    """A custom tool that the model may call."""

    type: Literal["custom"] = "custom"
    name: str
    description: Annotated[str | None, LeftOutIfNone] = None
    format: dict[str, Any]


class ResponseObject(WholeReply):
    """The reply. It repeats the request's settings, with defaults for those left out."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem] = Field([])
    usage: ResponseUsage | None = None

    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[UsedTool | UsedCustomTool]
    top_logprobs: int
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None

    background: Literal[False] = False
    previous_response_id: str | None = None
    max_tool_calls: None = None
    reasoning: ReasoningUsed = ReasoningUsed()
    service_tier: Literal["default"] = "default"
    store: bool = False
    truncation: Literal["auto", "disabled"] = "disabled"


class DeletedResponse(BaseModel):
    """A stored response that was deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


EventType = Literal[
    "response.created",
    "response.in_progress",
    "response.completed",
    "response.incomplete",
    "response.failed",
    "response.output_item.added",
    "response.output_item.done",
    "response.content_part.added",
    "response.content_part.done",
    "response.output_text.delta",
    "response.output_text.done",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.custom_tool_call_input.delta",
    "response.custom_tool_call_input.done",
]


class Event(NamedEvent):
    """One event of a streamed reply; they are numbered from 0. What it has depends on its type:

    created, in_progress, completed, incomplete, failed: `response`, the whole reply as far as it is.
    output_item: `item`, which begins or ends. content_part: `part` of a message or of reasoning, which
    begins or ends.
    output_text, reasoning_text, function_call_arguments, custom_tool_call_input: `delta`, what is new; when
    done, all of the `text` or `input`, or the function's `name` and all `arguments`.
    """

    type: EventType
    sequence_number: int = 0
    response: Annotated[ResponseObject | None, LeftOutIfNone] = None
    item_id: Annotated[str | None, LeftOutIfNone] = None
    output_index: Annotated[int | None, LeftOutIfNone] = None
    content_index: Annotated[int | None, LeftOutIfNone] = None
    item: Annotated[OutputItem | None, LeftOutIfNone] = None
    part: Annotated[OutputText | ReasoningText | None, LeftOutIfNone] = None
    delta: Annotated[str | None, LeftOutIfNone] = None
    text: Annotated[str | None, LeftOutIfNone] = None
    logprobs: Annotated[list[TokenLogprob] | None, LeftOutIfNone] = None
    name: Annotated[str | None, LeftOutIfNone] = None
    arguments: Annotated[str | None, LeftOutIfNone] = None
    input: Annotated[str | None, LeftOutIfNone] = None


class ErrorEvent(NamedEvent):
    """The end of a stream that cannot go on. `error` repeats it in an object, which the `openai` client recognizes."""

    type: Literal["error"] = "error"
    sequence_number: int = 0
    message: str
    code: str | None
    param: str | None
    error: ErrorDetail


class ResponsesEvent(RootModel[Event | ErrorEvent]):
    """One event of a streamed reply."""
