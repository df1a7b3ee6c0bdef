"""Tools that a model may call: functions, those of unsupported types, and which of them a request chooses."""

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, StrictBool, model_validator

from chairlift.api.answers.functions import FunctionSpec
from chairlift.api.wire.body import Body
from chairlift.api.wire.checks import OneOf, only
from chairlift.api.wire.marks import Refused
from chairlift.errors import InvalidRequest


class Function(Body):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema of an object; left out: any arguments")
    strict: StrictBool | None = Field(None, description="true: calls are made to fit the schema, token by token")

    def spec(self) -> FunctionSpec:
        return FunctionSpec(self.name, self.parameters, self.strict, self.description)


class Tool(Body):
    """A tool: here always a function."""

    type: Literal["function"]
    function: Function

    def spec(self) -> FunctionSpec:
        return self.function.spec()


class FunctionTool(Function):
    """A function that the model may call, as `/v1/responses` has it."""

    type: Literal["function"]
    allowed_callers: Annotated[list[str] | None, only(["direct"], "only the model itself calls tools")] = None
    async_: Annotated[StrictBool | None, only(False, "every call waits for its output", "async")] = Field(
        None, alias="async"
    )
    defer_loading: Annotated[StrictBool | None, only(False, "the model sees all tools from the beginning")] = None
    output_schema: Annotated[None, Refused("the model does not see it; describe it in description")] = None


class LeftOutTool(Body):
    """A tool of an unsupported type. It is not shown to the model, and the client is warned."""

    model_config = ConfigDict(extra="ignore")

    type: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")


def known_or_left_out(form: type[Body], *types: str | None, **others: type[Body]) -> OneOf:
    """Picks a class for tools of these types, those that are named for theirs, and `LeftOutTool` for all others."""

    def pick(tool: Any) -> type[Body]:
        kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
        return form if kind in types or not isinstance(kind, str) else others.get(kind, LeftOutTool)

    return OneOf(pick)


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    """The one function or custom tool to call."""

    type: Literal["function", "custom"]
    function: NamedFunction | None = None
    custom: NamedFunction | None = Field(None, description="only with type custom")

    @model_validator(mode="after")
    def _check_named(self) -> Self:
        if (self.function is None) == (self.custom is None) or (self.custom is None) == (self.type == "custom"):
            raise InvalidRequest(
                'tool_choice: the name of the tool belongs into "function" or, with type custom, into "custom"',
                "tool_choice",
            )
        return self

    @property
    def name(self) -> str:
        named = self.custom or self.function
        return "" if named is None else named.name


class ChosenFunction(NamedFunction):
    """The one function or custom tool to call, as `/v1/responses` has it."""

    type: Literal["function", "custom"]
