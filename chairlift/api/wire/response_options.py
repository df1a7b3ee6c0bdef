"""The parts of a request to `/v1/responses` that say how to answer."""

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, StrictBool, model_validator

from chairlift.api.wire.base import Body, Ignored, Refused
from chairlift.api.wire.checks import only
from chairlift.api.wire.messages import Function, Tool
from chairlift.errors import InvalidRequest
from chairlift.params import StructuredOutputs


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]
    allowed_callers: Annotated[list[str] | None, only(["direct"], "calls are made by the model itself")] = None
    async_: Annotated[StrictBool | None, only(False, "calls wait for their outputs", "async")] = Field(
        None, alias="async"
    )
    defer_loading: Annotated[StrictBool | None, only(False, "the model sees all tools from the beginning")] = None
    output_schema: Annotated[None, Refused("the model is not told; describe it in description")] = None

    def as_tool(self) -> Tool:
        """In the shape that chat completions and chat templates have."""
        return Tool(type="function", function=Function(**self.model_dump(include=set(Function.model_fields))))


class ChosenFunction(Body):
    """The one function to call."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """What the answer must look like."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, min_length=1, max_length=64, description="of the schema; not shown to the model")
    description: Annotated[str | None, Ignored("the model is not told")] = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="JSON Schema")
    strict: Annotated[StrictBool | None, Ignored("every schema is enforced")] = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        is_schema = self.type == "json_schema"
        if is_schema != (self.schema_ is not None) or is_schema != (self.name is not None):
            raise InvalidRequest("text.format: name and schema go with type json_schema", "text")
        return self

    def structure(self) -> StructuredOutputs | None:
        """None for plain text."""
        if self.type == "text":
            return None
        return StructuredOutputs(json_object=True) if self.schema_ is None else StructuredOutputs(json=self.schema_)


class TextOptions(Body):
    """What is asked of the answer's text."""

    format: TextFormat | None = Field(None, description="json_object and json_schema are enforced token by token")
    verbosity: Annotated[
        Literal["low", "medium", "high"] | None, only("medium", "ask for it in a message", "text.verbosity")
    ] = None


class ResponseStreamOptions(Body):
    """Options of a streamed reply."""

    include_obfuscation: Annotated[StrictBool | None, Ignored("nothing is padded here")] = None
