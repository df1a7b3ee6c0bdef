"""Tools that a model may call, as chat completions have them."""

from typing import Literal, Self

from pydantic import Field, model_validator

from chairlift.api.answers.custom import InputGrammar, custom_function
from chairlift.api.answers.functions import FunctionSpec
from chairlift.api.wire.body import Body
from chairlift.api.wire.custom_tools import CUSTOM_NAME, NEEDS_GRAMMAR, CalledWithText, GrammarText
from chairlift.api.wire.tools import Function, NamedFunction
from chairlift.errors import InvalidRequest


class Tool(Body):
    """A tool: here always a function."""

    type: Literal["function"]
    function: Function

    def spec(self) -> FunctionSpec:
        return self.function.spec()


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


class ChatInputFormat(Body):
    """Describes the input of a custom tool."""

    type: Literal["text", "grammar"]
    grammar: GrammarText | None = Field(None, description="only with type grammar")

    @model_validator(mode="after")
    def _check_grammar(self) -> Self:
        if (self.type == "grammar") != (self.grammar is not None):
            raise InvalidRequest(NEEDS_GRAMMAR, "tools")
        return self

    def given_grammar(self) -> InputGrammar | None:
        return None if self.grammar is None else InputGrammar(self.grammar.syntax, self.grammar.definition)


class CustomFunction(Body):
    """A tool that is called with a text."""

    name: str = Field(pattern=CUSTOM_NAME)
    description: str | None = None
    format: ChatInputFormat | None = Field(None, description="left out: any text")

    def given_grammar(self) -> InputGrammar | None:
        return None if self.format is None else self.format.given_grammar()

    def spec(self) -> FunctionSpec:
        return custom_function(self.name, self.description, self.given_grammar())


class ChatCustomTool(CalledWithText):
    """A tool that is called with a text, in chat completions."""

    type: Literal["custom"]
    custom: CustomFunction

    def given_grammar(self) -> InputGrammar | None:
        return self.custom.given_grammar()

    def spec(self) -> FunctionSpec:
        return self.custom.spec()
