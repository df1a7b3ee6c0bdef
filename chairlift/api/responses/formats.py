"""The structure of the answer, as `/v1/responses` has it."""

from typing import Literal, Self

from pydantic import (
    Field,
    model_validator,
)

from chairlift.api.wire.formats import AnswerSchema, structure_in
from chairlift.errors import InvalidRequest
from chairlift.params import StructuredOutputs


class TextFormat(AnswerSchema):
    """Prescribes what the answer must look like, as `/v1/responses` has it."""

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
        return structure_in("text", self.type, self.schema_)
