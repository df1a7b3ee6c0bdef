"""What completions and chat completions have in common."""

from typing import Annotated, Any, Self

from pydantic import Field, StrictBool, StrictFloat, StrictInt, ValidationError, model_validator

from chairlift.api.wire.base import Body, Ignored
from chairlift.api.wire.request import GenerationRequest
from chairlift.api.wire.structure import ResponseFormat, WantedStructure
from chairlift.errors import InvalidRequest
from chairlift.params import SamplingParams, StructuredOutputs

_FOR_STATISTICS = Ignored("labels a request for its sender's own statistics")


class StreamOptions(Body):
    """Options of a streamed reply."""

    include_usage: StrictBool | None = Field(None, description="end with a chunk that holds the usage and no choices")
    include_obfuscation: Annotated[StrictBool | None, Ignored("nothing is padded here")] = None


class SamplingRequest(GenerationRequest):
    """Fields whose limits are those of SamplingParams, so that a limit stands in one place; here only types are."""

    stream_options: StreamOptions | None = Field(None, description="only with stream")

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

    response_format: ResponseFormat | None = Field(
        None, description="text, json_object or json_schema; the last two are enforced token by token"
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="one of json, json_object, regex, choice and grammar (Lark or GBNF), enforced token by token"
    )
    guided_json: str | dict[str, Any] | None = Field(None, description="older name of structured_outputs.json")
    guided_regex: str | None = Field(None, description="older name of structured_outputs.regex")
    guided_choice: list[str] | None = Field(None, description="older name of structured_outputs.choice")
    guided_grammar: str | None = Field(None, description="older name of structured_outputs.grammar")

    metadata: Annotated[dict[str, str] | None, _FOR_STATISTICS] = None
    safety_identifier: Annotated[str | None, _FOR_STATISTICS] = None
    store: Annotated[StrictBool | None, Ignored("nothing is stored here")] = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream: true", "stream_options")
        return self

    @property
    def has_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def wanted_structure(self) -> WantedStructure | None:
        """What the answer must look like, whichever field says so. InvalidRequest if several do."""
        wanted = [
            WantedStructure(name, structure)
            for name, structure in (
                ("response_format", None if self.response_format is None else self.response_format.structure()),
                ("structured_outputs", self.structured_outputs),
                ("guided_json", _structure("guided_json", json=self.guided_json)),
                ("guided_regex", _structure("guided_regex", regex=self.guided_regex)),
                ("guided_choice", _structure("guided_choice", choice=self.guided_choice)),
                ("guided_grammar", _structure("guided_grammar", grammar=self.guided_grammar)),
            )
            if structure is not None
        ]
        if len(wanted) > 1:
            raise InvalidRequest(f"give only one of {' and '.join(each.field for each in wanted)}", wanted[1].field)
        return wanted[0] if wanted else None

    def sampling_fields(self) -> dict[str, Any]:
        """What this request sets of SamplingParams."""
        return self.model_dump(include=set(SamplingParams.model_fields) - _MADE_HERE, exclude_none=True)


_MADE_HERE = {"logprobs", "prompt_logprobs", "structured_outputs"}  # their fields of the wire mean something else


def sampling_params(defaults: SamplingParams, given: dict[str, Any]) -> SamplingParams:
    """A request's own settings over the model's defaults. `pydantic.ValidationError` if one is out of range."""
    return SamplingParams(**{**defaults.model_dump(exclude_unset=True), **given})


def _structure(field: str, **given: Any) -> StructuredOutputs | None:
    if next(iter(given.values())) is None:
        return None
    try:
        return StructuredOutputs(**given)
    except ValidationError as error:
        raise InvalidRequest(f"{field}: {error.errors(include_url=False)[0]['msg']}", field) from error
