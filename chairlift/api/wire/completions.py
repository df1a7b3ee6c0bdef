"""`/v1/completions`, and what its replies share with those to chats."""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

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

from chairlift.api.wire.base import LeftOutIfNone, Texts, TokenIds, let_others_run
from chairlift.api.wire.generation import CompletionsRequest
from chairlift.errors import InvalidRequest
from chairlift.params import FinishReason, RequestOutput, SamplingParams


class CompletionRequest(CompletionsRequest, refuses=("suffix",)):
    """Continue a text, or several."""

    prompt: str | Texts | TokenIds | list[TokenIds] = Field(
        description="a string, a list of strings, a list of token ids or a list of lists of them"
    )
    echo: StrictBool | None = Field(None, description="put the prompt before the answer")
    logprobs: StrictInt | None = Field(
        None,
        description="log-probabilities of the tokens and of this many likeliest ones (with echo, of the prompt's too)",
    )
    best_of: StrictInt | None = Field(None, description="only the value of n: none of several answers is picked")

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
        wanted = (self.logprobs if self.echo else None, self.prompt_logprobs)
        for_prompt = max((each for each in wanted if each is not None), default=None)
        return self.sampling_params(defaults, logprobs=self.logprobs, prompt_logprobs=for_prompt)


class PromptTokensDetails(BaseModel):
    """How many tokens of the prompts had been computed for other requests."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """How many of the generated tokens are thoughts, how many were guessed rightly, and how many guesses were wrong."""

    reasoning_tokens: int
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(BaseModel):
    """Summed over prompts; a prompt counts once, however many choices continue it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput]) -> Self:
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        choices = [choice for output in outputs for choice in output.outputs]
        num_generated = sum(len(choice.token_ids) for choice in choices)
        num_reasoning = sum(choice.num_reasoning_tokens for choice in choices)
        return cls(
            prompt_tokens=num_prompt,
            completion_tokens=num_generated,
            total_tokens=num_prompt + num_generated,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(each.num_cached_tokens for each in outputs)),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=num_reasoning,
                accepted_prediction_tokens=sum(choice.num_accepted_tokens for choice in choices),
                rejected_prediction_tokens=sum(choice.num_rejected_tokens for choice in choices),
            ),
        )


class PromptLogprob(BaseModel):
    """A token of the prompt, or one that might have stood there."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""By token id at each position: the token that stands there, then the likeliest ones; None for the first."""


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
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


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
