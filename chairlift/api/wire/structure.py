"""What an answer must look like."""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, StrictBool, model_validator

from chairlift.api.wire.base import Body, Ignored
from chairlift.errors import InvalidRequest
from chairlift.params import StructuredOutputs


@dataclass(frozen=True, slots=True)
class WantedStructure:
    """What an answer must look like, and the field that says so."""

    field: str
    outputs: StructuredOutputs

    @property
    def schema(self) -> dict[str, Any] | None:
        """As JSON Schema; None if it is something else."""
        if self.outputs.json_object:
            return {"type": "object"}
        try:
            return json.loads(self.outputs.json) if isinstance(self.outputs.json, str) else self.outputs.json
        except ValueError as error:
            raise InvalidRequest(f"{self.field}: not valid JSON: {error}", self.field) from error


class JsonSchema(Body):
    """A named schema."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    name: str = Field(min_length=1, max_length=64, description="what the schema is called; not shown to the model")
    description: Annotated[str | None, Ignored("the model is not told")] = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="JSON Schema; left out: any JSON object")
    strict: Annotated[StrictBool | None, Ignored("every schema is enforced")] = None


class ResponseFormat(Body):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = Field(None, description="only with type json_schema")

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequest("response_format.json_schema goes with type json_schema", "response_format")
        return self

    def structure(self) -> StructuredOutputs | None:
        """None for plain text."""
        if self.type == "text":
            return None
        schema = None if self.json_schema is None else self.json_schema.schema_
        return StructuredOutputs(json_object=True) if schema is None else StructuredOutputs(json=schema)
