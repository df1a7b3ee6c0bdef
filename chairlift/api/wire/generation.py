"""What all requests that generate have in common: sender, sampling, scheduling, and the structure of the answer."""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    field_validator,
    model_validator,
)

from chairlift.api.answers.structure import WantedStructure, make_structure, the_only_one
from chairlift.api.wire.body import Body, Label, Metadata, Texts, TokenIds, without_nulls
from chairlift.api.wire.checks import only
from chairlift.api.wire.extras import EngineExtras
from chairlift.api.wire.marks import Ignored, Refused
from chairlift.errors import InvalidRequest
from chairlift.params import RequestOptions, SamplingParams, StructuredOutputs

FOR_CACHING = Ignored("a hint about caching; prompts that begin alike are found without it")
FOR_STATISTICS = Ignored("labels a request for its sender's own statistics")
STATELESS = "use previous_response_id, or send the whole conversation as input"
SENDER = "the sender; users, or API keys if there are any, share the machine evenly"
_MADE_HERE = {"logprobs", "prompt_logprobs", "structured_outputs"}  # mean something else in requests


class _Schema(Body):
    model_config = ConfigDict(protected_namespaces=())

    description: Annotated[str | None, Ignored("the model is not told")] = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="JSON Schema")
    strict: Annotated[StrictBool | None, Ignored("every schema is enforced")] = None


class JsonSchema(_Schema):
    """A schema."""

    name: str | None = Field(None, min_length=1, max_length=64, description="of the schema; not shown to the model")


class ResponseFormat(Body):
    """What the answer must look like."""

    model_config = ConfigDict(protected_namespaces=())

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = Field(
        None, description="only with type json_schema; without a schema: any JSON object"
    )
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="JSON Schema, as llama.cpp and others have it; not with json_schema or text"
    )

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        has_two = self.json_schema is not None and self.schema_ is not None
        if has_two or (self.type == "text" and self.schema_ is not None):
            raise InvalidRequest(
                "response_format: schema goes with json_object or instead of json_schema", "response_format"
            )
        is_given = self.json_schema is not None or (self.type == "json_schema" and self.schema_ is not None)
        if (self.type == "json_schema") != is_given:
            raise InvalidRequest("response_format.json_schema goes with type json_schema", "response_format")
        return self

    def structure(self) -> StructuredOutputs | None:
        """None for plain text."""
        named = None if self.json_schema is None else self.json_schema.schema_
        return _structure_of("response_format", self.type, self.schema_ if named is None else named)


class TextFormat(_Schema):
    """What the answer must look like, as `/v1/responses` has it."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, min_length=1, max_length=64, description="of the schema; not shown to the model")

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if self.type == "json_schema" and self.schema_ is None:
            raise InvalidRequest("text.format: type json_schema needs a schema", "text")
        if self.type == "text" and (self.schema_ is not None or self.name is not None):
            raise InvalidRequest("text.format: name and schema go with type json_schema or json_object", "text")
        return self

    def structure(self) -> StructuredOutputs | None:
        """None for plain text."""
        return _structure_of("text", self.type, self.schema_)


def _structure_of(field: str, kind: str, schema: dict[str, Any] | None) -> StructuredOutputs | None:
    if kind == "text":
        return None
    return make_structure(field, json=schema, json_object=True if schema is None else None)


# --- requests


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


class StreamOptions(ResponseStreamOptions):
    """Options of a streamed reply."""

    include_usage: StrictBool | None = Field(None, description="end with a chunk that holds the usage and no choices")
    continuous_usage_stats: StrictBool | None = Field(
        None, description="every chunk with choices holds the usage so far"
    )


class Repetition(Body):
    """See RepetitionDetection, whose limits apply."""

    max_pattern_size: StrictInt
    min_pattern_size: StrictInt | None = None
    min_count: StrictInt


class GenerationRequest(Body):
    """A field without a description has that of its namesake in RequestOptions or SamplingParams, whose limits hold."""

    model: str | None = Field(None, description="the served model's name; left out: the one there is")
    priority: StrictInt | None = None
    timeout: StrictFloat | None = None
    cache_salt: str | None = Field(None, max_length=256)
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

    @field_validator("cache_salt")
    @classmethod
    def _check_salt(cls, salt: str | None) -> str | None:
        if salt == "":  # a client that lacks its secret must not share its prompts with all others
            raise InvalidRequest("cache_salt is empty; leave it out, or give at least one character", "cache_salt")
        return salt

    @property
    def sender(self) -> str:
        """The sender, as the client names it; empty if it names none."""
        raise NotImplementedError

    def request_options(self, key_tenant: str | None, **more: Any) -> RequestOptions:
        """How the request is served. `pydantic.ValidationError` if a field is out of range.

        `key_tenant`: the tenant of the API key, None where there are no keys. A key has one share, whatever `sender`
        its requests name.
        """
        given = self.model_dump(include={"priority", "cache_salt", "timeout", "speculation"}, exclude_none=True)
        tenant = self.sender if key_tenant is None else key_tenant
        return RequestOptions(tenant=tenant, **given, **more)

    def sampling_params(self, defaults: SamplingParams, **given: Any) -> SamplingParams:
        """This request's settings, and those `given` that are not None, over the model's defaults.

        `pydantic.ValidationError` if one is out of range.
        """
        own = self.model_dump(include=set(SamplingParams.model_fields) - _MADE_HERE, exclude_none=True)
        own |= {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**{**defaults.model_dump(exclude_unset=True), **own})


class OpenAIRequest(EngineExtras, GenerationRequest):
    """What OpenAI's endpoints have in common."""

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


class CompletionsRequest(OpenAIRequest):
    """What chat completions and completions have in common."""

    stream_options: StreamOptions | None = Field(None, description="only with stream")
    n: StrictInt | None = None
    max_tokens: StrictInt | None = None
    prompt_logprobs: StrictInt | None = Field(None, description="log-probabilities of the prompt; not with stream")
    return_token_ids: StrictBool | None = Field(None, description="also return the token ids of prompt and answer")

    response_format: ResponseFormat | None = Field(
        None, description="text, json_object or json_schema; the last two are enforced token by token"
    )
    guided_json: str | dict[str, Any] | None = Field(None, description="older name of structured_outputs.json")
    guided_regex: str | None = Field(None, description="older name of structured_outputs.regex")
    guided_choice: Texts | None = Field(None, description="older name of structured_outputs.choice")
    guided_grammar: str | None = Field(None, description="older name of structured_outputs.grammar")
    json_schema: dict[str, Any] | None = Field(None, description="llama.cpp's name of structured_outputs.json")
    grammar: str | None = Field(None, description="llama.cpp's name of structured_outputs.grammar")

    @model_validator(mode="after")
    def _check_prompt_logprobs(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs is not available in streams; leave out stream", "prompt_logprobs")
        return self

    def wanted_structure(self) -> WantedStructure | None:
        """What the answer must look like, whichever field says so. InvalidRequest if several do."""
        return the_only_one(
            response_format=None if self.response_format is None else self.response_format.structure(),
            structured_outputs=self.structured_outputs,
            guided_json=make_structure("guided_json", json=self.guided_json),
            guided_regex=make_structure("guided_regex", regex=self.guided_regex),
            guided_choice=make_structure("guided_choice", choice=self.guided_choice),
            guided_grammar=make_structure("guided_grammar", grammar=self.guided_grammar),
            json_schema=make_structure("json_schema", json=self.json_schema),
            grammar=make_structure("grammar", grammar=self.grammar),
        )
