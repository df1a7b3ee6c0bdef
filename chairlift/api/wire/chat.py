"""`/v1/chat/completions`."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, StrictBool, StrictInt, model_validator

from chairlift.api.tools import FunctionSpec
from chairlift.api.wire.base import Body, Ignored, LeftOutIfNone, Refused
from chairlift.api.wire.checks import only_types
from chairlift.api.wire.messages import Rendering
from chairlift.api.wire.sampling import SamplingRequest, sampling_params
from chairlift.api.wire.usage import Usage
from chairlift.errors import InvalidRequest
from chairlift.params import MAX_LOGPROBS, FinishReason, SamplingParams

_TEXT_ONLY = "this server makes text only"


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    """The one function to call."""

    type: Literal["function"]
    function: NamedFunction


class ChatCompletionRequest(Rendering, SamplingRequest):
    """Answer a conversation."""

    max_completion_tokens: StrictInt | None = Field(None, ge=1, description="newer name of max_tokens")
    logprobs: StrictBool | None = Field(None, description="report the log-probability of each token")
    top_logprobs: StrictInt | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="and of this many likeliest ones, 0 to 20; only with logprobs"
    )
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | None, only_types("tool_choice", "function")
    ] = Field(
        None, description="whether to call a tool, or which; required and named calls are enforced token by token"
    )
    parallel_tool_calls: StrictBool | None = Field(None, description="false: at most one call")

    prediction: Annotated[dict[str, Any] | None, Ignored("it could only make the same answer faster")] = None
    modalities: Annotated[list[Literal["text"]] | None, Ignored(_TEXT_ONLY)] = None
    audio: Annotated[None, Refused(_TEXT_ONLY)] = None
    functions: Annotated[None, Refused("deprecated; use tools")] = None
    function_call: Annotated[None, Refused("deprecated; use tool_choice")] = None
    reasoning_effort: Annotated[
        None, Refused("set what the model's own template knows through chat_template_kwargs")
    ] = None
    verbosity: Annotated[None, Refused("ask for it in a message")] = None
    web_search_options: Annotated[None, Refused("there is no web search here")] = None
    moderation: Annotated[None, Refused("there is no moderation here")] = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs is only allowed with logprobs: true", "top_logprobs")
        if self.max_completion_tokens is not None and self.max_tokens not in (None, self.max_completion_tokens):
            raise InvalidRequest("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
        if self.max_tokens == 0:
            raise InvalidRequest("max_tokens must be at least 1", "max_tokens")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise InvalidRequest("tool_choice is only allowed with tools", "tool_choice")
        if isinstance(self.tool_choice, NamedTool) and not self._named():
            raise InvalidRequest(f"tool_choice: there is no tool {self.tool_choice.function.name!r}", "tool_choice")
        return self

    def functions_to_call(self) -> list[FunctionSpec]:
        """Those that the model may call, as `tool_choice` has it; empty if it must not."""
        if self.tool_choice == "none" or not self.tools:
            return []
        return (
            self._named() if isinstance(self.tool_choice, NamedTool) else [tool.function.spec() for tool in self.tools]
        )

    @property
    def field_names(self) -> dict[str, str]:
        """See `Conversation`."""
        return {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}

    @property
    def is_call_forced(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """How to answer; what the answer must look like is not in it yet, since tools have a say in it."""
        given = self.sampling_fields()
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return sampling_params(defaults, given)

    def _named(self) -> list[FunctionSpec]:
        assert isinstance(self.tool_choice, NamedTool), "asked of named choices only"
        name = self.tool_choice.function.name
        return [tool.function.spec() for tool in self.tools or [] if tool.function.name == name]


class TopLogprob(BaseModel):
    """A token that might have stood there."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(BaseModel):
    name: str
    arguments: str


class MessageToolCall(BaseModel):
    """A call that the model made."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: Annotated[list[MessageToolCall] | None, LeftOutIfNone] = None


WireFinishReason = FinishReason | Literal["tool_calls"]


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: WireFinishReason | None
    stop_reason: int | str | None = None


class ChatCompletion(BaseModel):
    """The whole reply."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(BaseModel):
    name: Annotated[str | None, LeftOutIfNone] = None
    arguments: Annotated[str | None, LeftOutIfNone] = None


class ToolCallDelta(BaseModel):
    """What is new of a call; id, type and name only in its first."""

    index: int
    id: Annotated[str | None, LeftOutIfNone] = None
    type: Annotated[Literal["function"] | None, LeftOutIfNone] = None
    function: FunctionDelta


class Delta(BaseModel):
    role: Annotated[Literal["assistant"] | None, LeftOutIfNone] = None
    content: Annotated[str | None, LeftOutIfNone] = None
    tool_calls: Annotated[list[ToolCallDelta] | None, LeftOutIfNone] = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: WireFinishReason | None = None
    stop_reason: int | str | None = None


class ChatCompletionChunk(BaseModel):
    """One chunk of a streamed reply."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Annotated[Usage | None, LeftOutIfNone] = None
