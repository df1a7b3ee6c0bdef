"""The shapes of requests and replies, OpenAI's specification plus vLLM's extensions. Unknown fields are refused."""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StrictBool,
    StrictFloat,
    StrictInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from chairlift.errors import InvalidRequest
from chairlift.params import FinishReason, RequestOutput, SamplingParams

_Optional = Field(exclude_if=lambda value: value is None)  # left out of the JSON where it is None

# One complaint is enough: a list of a million wrong elements must not become a million of them.
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[StrictInt], Field(fail_fast=True)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    include_usage: StrictBool = False


class SamplingRequest(BaseModel):
    """What completions and chat completions have in common. A field that is null counts as left out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # accepted: cannot change the answer

    # Checked by SamplingParams, so that a limit stands in one place; here only the types are.
    n: StrictInt | None = None
    max_tokens: StrictInt | None = None
    min_tokens: StrictInt | None = None
    temperature: StrictFloat | None = None
    top_p: StrictFloat | None = None
    top_k: StrictInt | None = None
    min_p: StrictFloat | None = None
    presence_penalty: StrictFloat | None = None
    frequency_penalty: StrictFloat | None = None
    repetition_penalty: StrictFloat | None = None
    logit_bias: dict[int, StrictFloat] | None = None
    seed: StrictInt | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[StrictInt] | None = None
    ignore_eos: StrictBool | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream: true", "stream_options")
        return self

    @property
    def has_usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """The request's own settings over the model's defaults. `pydantic.ValidationError` if one is out of range."""
        given = self.model_dump(include=set(SamplingParams.model_fields), exclude_none=True)
        return SamplingParams(**{**defaults.model_dump(exclude_unset=True), **given})


class CompletionRequest(SamplingRequest):
    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _say_what_a_prompt_is(cls, value: object, handler: ValidatorFunctionWrapHandler) -> object:
        """One complaint about all four forms, where pydantic would name the first only."""
        try:
            return handler(value)
        except ValidationError as error:
            raise InvalidRequest(
                "prompt must be a string, a list of strings, a list of token ids or a list of lists of them", "prompt"
            ) from error

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one, whichever of the four forms they came in. InvalidRequest if there is none."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidRequest("prompt is empty; give at least one", "prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # pydantic checked: all are
        return list(self.prompt)


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Annotated[str, Field(min_length=1)]
    content: str | list[TextPart]
    name: str | None = None

    def as_template_input(self) -> dict[str, JsonValue]:
        """What chat templates expect: the content as one text."""
        is_text = isinstance(self.content, str)
        content = self.content if is_text else "".join(part.text for part in self.content)  # type: ignore[union-attr]
        message: dict[str, Any] = {"role": self.role, "content": content}
        return message if self.name is None else {**message, "name": self.name}


class ChatCompletionRequest(SamplingRequest):
    messages: list[ChatMessage]
    max_completion_tokens: StrictInt | None = None

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """As for completions; `max_completion_tokens` is the newer name of `max_tokens`."""
        if self.max_completion_tokens is None:
            return super().sampling_params(defaults)
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise InvalidRequest("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
        renamed = self.model_copy(update={"max_tokens": self.max_completion_tokens, "max_completion_tokens": None})
        return renamed.sampling_params(defaults)


class TokenizeRequest(BaseModel):
    """Either a text or a conversation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: StrictBool = True  # of a text; in a conversation the chat template writes them

    @model_validator(mode="after")
    def _check_exactly_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages", "prompt")
        return self


class TokenizeReply(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None
    tokens: TokenIds


class DetokenizeReply(BaseModel):
    prompt: str


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, outputs: list[RequestOutput]) -> "Usage":
        """Summed over prompts; a prompt counts once, however many choices continue it."""
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        num_generated = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
        return cls(prompt_tokens=num_prompt, completion_tokens=num_generated, total_tokens=num_prompt + num_generated)


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: None = None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Annotated[Usage | None, _Optional] = None


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: None = None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(BaseModel):
    role: Annotated[Literal["assistant"] | None, _Optional] = None
    content: Annotated[str | None, _Optional] = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class ChatCompletionChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Annotated[Usage | None, _Optional] = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "chairlift"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    error: ErrorDetail
