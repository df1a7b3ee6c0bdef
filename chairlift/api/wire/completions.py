"""`/v1/completions` and `/v1/chat/completions`."""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    Field,
    PlainSerializer,
    StrictBool,
    StrictInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from typing_extensions import TypedDict

from chairlift.api.wire.body import Body, LeftOutIfNone, Texts, TokenIds, let_others_run
from chairlift.api.wire.checks import only_types
from chairlift.api.wire.generation import CompletionsRequest
from chairlift.api.wire.marks import Idle, Ignored, LeftOut, Refused
from chairlift.api.wire.messages import Effort, ParallelToolUse, ToolChoiceMode
from chairlift.api.wire.rendering import Rendering
from chairlift.api.wire.tools import NamedTool
from chairlift.api.wire.usage import Usage
from chairlift.errors import InvalidRequest
from chairlift.params import MAX_LOGPROBS, FinishReason, RequestOptions, SamplingParams


class CompletionRequest(CompletionsRequest):
    """Continue a text, or several."""

    prompt: str | Texts | TokenIds | list[TokenIds] = Field(
        description="a string, a list of strings, a list of token ids or a list of lists of them"
    )
    echo: StrictBool | None = Field(None, description="put the prompt before the answer")
    logprobs: StrictInt | None = Field(
        None,
        description="log-probabilities of the tokens and of this many likeliest ones (with echo, of the prompt's too)",
    )
    best_of: StrictInt | None = Field(None, description="must be the value of n: all answers are returned")
    suffix: Annotated[str | None, Idle("the model continues texts, it does not fill gaps", ("",))] = None
    add_special_tokens: Annotated[StrictBool | None, Idle("send token ids to have none added", (True,))] = None

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _say_what_a_prompt_is(cls, value: object, handler: ValidatorFunctionWrapHandler) -> object:
        """One error about all four forms, where pydantic would name only the first."""
        try:
            return handler(value)
        except ValidationError as error:
            raise InvalidRequest(
                "prompt must be a string, a list of strings, a list of token ids or a list of lists of them", "prompt"
            ) from error

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of not in (None, self.n or 1):
            raise InvalidRequest("best_of is not supported: leave it out, or give it the value of n", "best_of")
        return self

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one, whichever of the four forms they came in. InvalidRequest if there is none."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidRequest("prompt is empty; give at least one", "prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # pydantic checked: all are
        return list(self.prompt)

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """How to continue each prompt."""
        wanted = (self.logprobs if self.echo else None, self.prompt_logprobs)
        for_prompt = max((each for each in wanted if each is not None), default=None)
        return self.sampling_params(defaults, logprobs=self.logprobs, prompt_logprobs=for_prompt)


class PromptLogprob(BaseModel):
    """A token of the prompt, or one that might have stood there."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""At each position by token id: the prompt's token, then the likeliest ones; None for the first position."""


class Choice(BaseModel):
    """One answer, or what is new of it."""

    index: int
    stop_reason: int | str | None = None
    token_ids: Annotated[list[int] | None, LeftOutIfNone] = None


class ChoicesBody(BaseModel):
    """A whole reply, or one chunk of a streamed one."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None = None
    usage: Annotated[Usage | None, LeftOutIfNone] = None


class CompletionLogprobs(BaseModel):
    """Four lists, one entry per token."""

    text_offset: list[int] = Field(description="where the token's text begins, in characters")
    token_logprobs: list[float | None]
    tokens: list[str] = Field(description='texts; "bytes:\\xe6" where the bytes are no whole character')
    top_logprobs: list[dict[str, float] | None] = Field(
        description="by text, as in tokens; of several with one text, less likely ones by bytes or as token_id:7"
    )


class CompletionChoice(Choice):
    text: str
    logprobs: Annotated[
        CompletionLogprobs | None, PlainSerializer(let_others_run, return_type=CompletionLogprobs | None)
    ] = None
    finish_reason: FinishReason | None
    prompt_token_ids: Annotated[list[int] | None, LeftOutIfNone] = None
    prompt_logprobs: Annotated[PromptLogprobs | None, LeftOutIfNone] = None


class Completion(ChoicesBody):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


# --- chats


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


class TopLogprob(TypedDict):
    """A token that might have stood there. No model: a reply may hold hundreds of thousands."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: Annotated[list[TopLogprob], PlainSerializer(let_others_run, return_type=list[TopLogprob])]


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
    """What the model thought before its answer, under the two names by which clients know it."""

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


class ChatCompletionChunk(ChoicesBody):
    """One chunk of a streamed reply."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    prompt_token_ids: Annotated[list[int] | None, LeftOutIfNone] = None
