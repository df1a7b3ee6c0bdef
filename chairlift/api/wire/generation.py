"""The fields that all requests that generate have in common: sender, sampling and scheduling."""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    model_validator,
)

from chairlift.api.wire.body import Body, Label, Metadata, Texts, TokenIds, without_nulls
from chairlift.api.wire.checks import only
from chairlift.api.wire.extras import EngineExtras
from chairlift.api.wire.marks import Ignored, Refused
from chairlift.api.wire.scheduling import ScheduledRequest
from chairlift.errors import InvalidRequest
from chairlift.params import SamplingParams, StructuredOutputs

FOR_CACHING = Ignored("a hint about caching; prompts that begin alike are found without it")
FOR_STATISTICS = Ignored("labels a request for its sender's own statistics")
STATELESS = "use previous_response_id, or send the whole conversation as input"
SENDER = "the sender; users, or API keys if there are any, share the machine evenly"
_MADE_HERE = {"logprobs", "prompt_logprobs", "structured_outputs"}  # mean something else in requests


class PromptCacheOptions(Body):
    """Hints about caching."""

    mode: Annotated[str | None, FOR_CACHING] = None
    ttl: Annotated[str | None, FOR_CACHING] = None
    prewarm: Annotated[StrictBool | None, only(False, "every request is answered", "prompt_cache_options.prewarm")] = (
        None
    )
    comparison_response_id: Annotated[None, Refused(STATELESS)] = None


class ResponseStreamOptions(Body):
    """Options of a streamed reply that `/v1/responses` knows."""

    include_obfuscation: Annotated[StrictBool | None, Ignored("nothing is padded here")] = None


class Repetition(Body):
    """See RepetitionDetection, whose limits apply."""

    max_pattern_size: StrictInt
    min_pattern_size: StrictInt | None = None
    min_count: StrictInt


class GenerationRequest(ScheduledRequest):
    """A field without a description has that of its namesake in RequestOptions or SamplingParams, whose limits hold."""

    speculation: Literal["auto", "off"] | None = None
    stream: StrictBool | None = Field(None, description="send the answer as server-sent events while it is made")

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
    stop_token_ids: TokenIds | None = None
    ignore_eos: StrictBool | None = None
    bad_words: str | Texts | None = None
    allowed_token_ids: TokenIds | None = None
    repetition_detection: Repetition | None = None
    truncate_prompt_tokens: StrictInt | None = None
    structured_outputs: Annotated[StructuredOutputs | None, BeforeValidator(without_nulls)] = Field(
        None, description="one of json, json_object, regex, choice and grammar (Lark or GBNF), enforced token by token"
    )

    def sampling_params(self, defaults: SamplingParams, **given: Any) -> SamplingParams:
        """This request's settings, and those `given` that are not None, over the model's defaults.

        `pydantic.ValidationError` if one is out of range.
        """
        own = self.model_dump(include=set(SamplingParams.model_fields) - _MADE_HERE, exclude_none=True)
        own |= {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**{**defaults.model_dump(exclude_unset=True), **own})


class OpenAIRequest(EngineExtras, GenerationRequest):
    """Holds the fields that OpenAI's endpoints have in common."""

    user: Label | None = Field(None, description=SENDER)
    stop: str | Texts | None = None

    metadata: Annotated[Metadata | None, FOR_STATISTICS] = None
    safety_identifier: Annotated[Label | None, FOR_STATISTICS] = None
    store: Annotated[StrictBool | None, Ignored("nothing is stored here")] = None
    service_tier: Annotated[Label | None, Ignored("there is one tier")] = None
    prompt_cache_key: Annotated[Label | None, FOR_CACHING] = None
    prompt_cache_retention: Annotated[Label | None, FOR_CACHING] = None
    prompt_cache_options: Annotated[PromptCacheOptions | None, FOR_CACHING] = None
    stream_options: ResponseStreamOptions | None = Field(None, description="only with stream")

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream: true", "stream_options")
        return self

    @property
    def sender(self) -> str:
        return self.user or ""
