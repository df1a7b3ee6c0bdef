"""Tools that a model may call, as `/v1/responses` has them."""

from typing import Annotated, Literal, Self

from pydantic import Field, StrictBool, model_validator

from chairlift.api.answers.custom import InputGrammar, custom_function
from chairlift.api.answers.functions import FunctionSpec
from chairlift.api.answers.lark import MAX_CHARACTERS
from chairlift.api.wire.body import Body
from chairlift.api.wire.checks import only
from chairlift.api.wire.custom_tools import CUSTOM_NAME, NEEDS_GRAMMAR, CalledWithText
from chairlift.api.wire.marks import Refused
from chairlift.api.wire.tools import Function, NamedFunction
from chairlift.errors import InvalidRequest


class FunctionTool(Function):
    """A function that the model may call, as `/v1/responses` has it."""

    type: Literal["function"]
    allowed_callers: Annotated[list[str] | None, only(["direct"], "only the model itself calls tools")] = None
    async_: Annotated[StrictBool | None, only(False, "every call waits for its output", "async")] = Field(
        None, alias="async"
    )
    defer_loading: Annotated[StrictBool | None, only(False, "the model sees all tools from the beginning")] = None
    output_schema: Annotated[None, Refused("the model does not see it; describe it in description")] = None


class ChosenFunction(NamedFunction):
    """The one function or custom tool to call, as `/v1/responses` has it."""

    type: Literal["function", "custom"]


class InputFormat(Body):
    """Describes the input of a custom tool, as `/v1/responses` has it."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = Field(None, description="only with type grammar")
    definition: str | None = Field(
        None, max_length=MAX_CHARACTERS, description="the grammar, enforced token by token, if it is regular"
    )

    @model_validator(mode="after")
    def _check_grammar(self) -> Self:
        is_grammar = self.type == "grammar"
        if is_grammar != (self.syntax is not None) or is_grammar != (self.definition is not None):
            raise InvalidRequest(NEEDS_GRAMMAR, "tools")
        return self

    def given_grammar(self) -> InputGrammar | None:
        return None if self.syntax is None or self.definition is None else InputGrammar(self.syntax, self.definition)


class TextTool(CalledWithText):
    """A tool that is called with a text, in `/v1/responses`."""

    type: Literal["custom"]
    name: str = Field(pattern=CUSTOM_NAME)
    description: str | None = None
    format: InputFormat | None = Field(None, description="left out: any text")
    allowed_callers: Annotated[list[str] | None, only(["direct"], "only the model itself calls tools")] = None
    async_: Annotated[StrictBool | None, only(False, "every call waits for its output", "async")] = Field(
        None, alias="async"
    )
    defer_loading: Annotated[StrictBool | None, only(False, "the model sees all tools from the beginning")] = None

    def given_grammar(self) -> InputGrammar | None:
        return None if self.format is None else self.format.given_grammar()

    def spec(self) -> FunctionSpec:
        return custom_function(self.name, self.description, self.given_grammar())
