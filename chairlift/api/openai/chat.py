"""`/v1/chat/completions`: the request, the whole reply, and the chunks of a streamed one."""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    Field,
    StrictBool,
    StrictInt,
    model_validator,
)

from chairlift.api.openai.choices import Choice, ChoicesBody, PromptLogprobs
from chairlift.api.openai.rendering import Rendering
from chairlift.api.openai.request import CompletionsRequest
from chairlift.api.openai.tools import NamedTool
from chairlift.api.wire.body import Body, LeftOutIfNone
from chairlift.api.wire.checks import only_types
from chairlift.api.wire.conversation import Effort, ParallelToolUse, ToolChoiceMode
from chairlift.api.wire.marks import Idle, Ignored, LeftOut, Refused
from chairlift.api.wire.scores import TokenLogprob
from chairlift.api.wire.usage import Usage
from chairlift.errors import InvalidRequest
from chairlift.params import MAX_LOGPROBS, FinishReason, RequestOptions, SamplingParams


class PredictedPart(Body):
    """A piece of a prediction."""

    type: Literal["text"]
    text: str


class Prediction(Body):
    """A text that much of the answer may repeat, such as a file in which a little is to change."""

    type: Literal["content"]
    content: str | list[PredictedPart] = Field(description="the text, or its pieces")


class ChatCompletionRequest(Rendering, ParallelToolUse, CompletionsRequest):
    """Answer a conversation."""

    max_completion_tokens: StrictInt | None = Field(None, ge=1, description="newer name of max_tokens")
    logprobs: StrictBool | None = Field(None, description="report the log-probability of each token")
    top_logprobs: StrictInt | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="also this many of the likeliest tokens, 0 to 20; only with logprobs",
    )
    tool_choice: Annotated[ToolChoiceMode | NamedTool | None, only_types("tool_choice", "function", "custom")] = Field(
        None, description="whether to call a tool, or which; required and named calls are enforced token by token"
    )
    reasoning_effort: Effort | None = Field(
        None, description="how much to think, if the chat template supports it; none: not at all"
    )
    prediction: Prediction | None = Field(
        None, description="text that the answer is likely to repeat; with --speculation, guesses are taken from it"
    )
    modalities: Annotated[list[Literal["text"]] | None, Ignored("this server makes text only")] = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, LeftOut("ask for it in a message", ("medium",))] = (
        None
    )
    functions: Annotated[list[Any] | None, Idle("deprecated; use tools", ([],))] = None
    function_call: Annotated[str | dict[str, Any] | None, Idle("deprecated; use tool_choice", ("none", "auto"))] = None
    echo: Annotated[StrictBool | None, Idle("the last message is not part of an answer", (False,))] = None
    include_reasoning: Annotated[StrictBool | None, Idle("thoughts have a field of their own", (True,))] = None
    documents: Annotated[list[Any] | None, Idle("put them into a message", ([],))] = None
    audio: Annotated[None, Refused("this server reads and writes text only")] = None
    web_search_options: Annotated[None, Refused("there is no web search here")] = None
    moderation: Annotated[None, Refused("there is no moderation here")] = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs is only allowed with logprobs: true", "top_logprobs")
        if self.max_completion_tokens is not None and self.max_tokens not in (None, self.max_completion_tokens):
            raise InvalidRequest("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
        if self.max_tokens == 0:
            raise InvalidRequest("max_tokens must be at least 1", "max_tokens")
        return self

    effort_field = "reasoning_effort"

    @property
    def field_names(self) -> dict[str, str]:
        return {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}

    @property
    def effort(self) -> Effort | None:
        return self.reasoning_effort

    def request_options(self, key_tenant: str | None, **more: Any) -> RequestOptions:
        content = "" if self.prediction is None else self.prediction.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return super().request_options(key_tenant, prediction=text, **more)

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """The sampling parameters, without the answer's structure, which also depends on tools."""
        return self.sampling_params(
            defaults,
            max_tokens=self.max_completion_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )


class ChoiceLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(BaseModel):
    name: Annotated[str | None, LeftOutIfNone] = None
    arguments: str


class CustomCall(BaseModel):
    name: Annotated[str | None, LeftOutIfNone] = None
    input: str


class MessageToolCall(BaseModel):
    """A call that the model made. In a stream: what is new of call `index`; id, type and name only in its first."""

    index: Annotated[int | None, LeftOutIfNone] = None
    id: Annotated[str | None, LeftOutIfNone] = None
    type: Annotated[Literal["function", "custom"] | None, LeftOutIfNone] = None
    function: Annotated[FunctionCall | None, LeftOutIfNone] = None
    custom: Annotated[CustomCall | None, LeftOutIfNone] = None


class Thoughts(BaseModel):
    """Holds what the model thought before its answer, under the two names by which clients know it."""

    reasoning: Annotated[str | None, LeftOutIfNone] = None
    reasoning_content: Annotated[str | None, LeftOutIfNone] = None


class AssistantMessage(Thoughts):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: Annotated[list[MessageToolCall] | None, LeftOutIfNone] = None


class Delta(Thoughts):
    role: Annotated[Literal["assistant"] | None, LeftOutIfNone] = None
    content: Annotated[str | None, LeftOutIfNone] = None
    tool_calls: Annotated[list[MessageToolCall] | None, LeftOutIfNone] = None


WireFinishReason = FinishReason | Literal["tool_calls"]


class ChatChoice(Choice):
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: WireFinishReason | None


class ChatChunkChoice(Choice):
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: WireFinishReason | None = None


class ChatCompletion(ChoicesBody):
    """The whole reply."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: Annotated[list[int] | None, LeftOutIfNone] = None
    prompt_logprobs: Annotated[PromptLogprobs | None, LeftOutIfNone] = None

    @property
    def parts(self) -> list[Any]:
        """See `WholeReply`."""
        return self.choices


class ChatCompletionChunk(ChoicesBody):
    """One chunk of a streamed reply."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    prompt_token_ids: Annotated[list[int] | None, LeftOutIfNone] = None
