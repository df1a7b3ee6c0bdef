"""`/v1/completions`."""

from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    Field,
    StrictBool,
    StrictInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from chairlift.api.wire.base import LeftOutIfNone, Refused, Texts, TokenIds
from chairlift.api.wire.sampling import SamplingRequest, sampling_params
from chairlift.api.wire.usage import Usage
from chairlift.errors import InvalidRequest
from chairlift.params import FinishReason, SamplingParams


class CompletionRequest(SamplingRequest):
    """Continue a text, or several."""

    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)] = Field(
        description="a string, a list of strings, a list of token ids or a list of lists of them"
    )
    echo: StrictBool | None = Field(None, description="put the prompt before the answer")
    logprobs: StrictInt | None = Field(
        None,
        description="log-probabilities of the tokens and of this many likeliest ones (with echo, of the prompt's too)",
    )
    best_of: StrictInt | None = Field(None, description="only the value of n: none of several answers is picked")
    suffix: Annotated[None, Refused("the model continues texts, it does not fill gaps")] = None

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
        given = self.sampling_fields()
        if self.logprobs is not None:
            given |= {"logprobs": self.logprobs, "prompt_logprobs": self.logprobs if self.echo else None}
        return sampling_params(defaults, given)


class CompletionLogprobs(BaseModel):
    """Four lists, one entry per token."""

    text_offset: list[int] = Field(description="where the token's text begins, in characters")
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(BaseModel):
    """One continuation, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None


class Completion(BaseModel):
    """The reply, or one chunk of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Annotated[Usage | None, LeftOutIfNone] = None
