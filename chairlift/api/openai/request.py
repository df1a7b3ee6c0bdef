"""The fields that the bodies of chat completions and completions have in common."""

from typing import Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    model_validator,
)

from chairlift.api.answers.structure import WantedStructure, make_structure, the_only_one
from chairlift.api.wire.body import Body, Texts
from chairlift.api.wire.formats import AnswerSchema, structure_in
from chairlift.api.wire.generation import OpenAIRequest, ResponseStreamOptions
from chairlift.errors import InvalidRequest
from chairlift.params import StructuredOutputs


class JsonSchema(AnswerSchema):
    """A schema."""

    name: str | None = Field(None, min_length=1, max_length=64, description="of the schema; not shown to the model")


class ResponseFormat(Body):
    """Prescribes what the answer must look like."""

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
        return structure_in("response_format", self.type, self.schema_ if named is None else named)


class StreamOptions(ResponseStreamOptions):
    """Options of a streamed reply."""

    include_usage: StrictBool | None = Field(None, description="end with a chunk that holds the usage and no choices")
    continuous_usage_stats: StrictBool | None = Field(
        None, description="every chunk with choices holds the usage so far"
    )


class CompletionsRequest(OpenAIRequest):
    """Holds the fields that chat completions and completions have in common."""

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
        """Returns the structure that the answer must have, whichever field says so. InvalidRequest if several do."""
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
