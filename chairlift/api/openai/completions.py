"""`/v1/completions`: the request, and the whole reply or a chunk of it."""

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

from chairlift.api.openai.choices import Choice, ChoicesBody, PromptLogprobs
from chairlift.api.openai.request import CompletionsRequest
from chairlift.api.wire.body import LeftOutIfNone, Texts, TokenIds, let_others_run
from chairlift.api.wire.marks import Idle
from chairlift.errors import InvalidRequest
from chairlift.params import FinishReason, SamplingParams


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
        """Returns the sampling parameters of each prompt."""
        wanted = (self.logprobs if self.echo else None, self.prompt_logprobs)
        for_prompt = max((each for each in wanted if each is not None), default=None)
        return self.sampling_params(defaults, logprobs=self.logprobs, prompt_logprobs=for_prompt)


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

    @property
    def parts(self) -> list[Any]:
        """See `WholeReply`."""
        return self.choices
