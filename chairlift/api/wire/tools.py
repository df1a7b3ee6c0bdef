"""Tools that a model may call: functions, those of unsupported types, and which of them a request chooses."""

from typing import Any

from pydantic import ConfigDict, Field, StrictBool

from chairlift.api.answers.functions import FunctionSpec
from chairlift.api.wire.body import Body
from chairlift.api.wire.checks import OneOf


class Function(Body):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema of an object; left out: any arguments")
    strict: StrictBool | None = Field(None, description="true: calls are made to fit the schema, token by token")

    def spec(self) -> FunctionSpec:
        return FunctionSpec(self.name, self.parameters, self.strict, self.description)


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
