"""The structure of an answer in bodies: JSON, perhaps of a schema."""

from typing import Annotated, Any

from pydantic import (
    ConfigDict,
    Field,
    StrictBool,
)

from chairlift.api.answers.structure import make_structure
from chairlift.api.wire.body import Body
from chairlift.api.wire.marks import Ignored
from chairlift.params import StructuredOutputs


class AnswerSchema(Body):
    """A schema of an answer."""

    model_config = ConfigDict(protected_namespaces=())

    description: Annotated[str | None, Ignored("the model is not told")] = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="JSON Schema")
    strict: Annotated[StrictBool | None, Ignored("every schema is enforced")] = None


def structure_in(field: str, kind: str, schema: dict[str, Any] | None) -> StructuredOutputs | None:
    """The structure in the field of that name; `kind`: text, json_object or json_schema."""
    if kind == "text":
        return None
    return make_structure(field, json=schema, json_object=True if schema is None else None)
