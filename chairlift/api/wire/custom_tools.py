"""Custom tools, which the model calls with a text: their declarations, and their calls in a conversation."""

from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Field, StrictBool, model_validator

from chairlift.api.answers.custom import InputGrammar, call_arguments, custom_function
from chairlift.api.answers.functions import FunctionSpec
from chairlift.api.answers.lark import MAX_CHARACTERS
from chairlift.api.wire.body import Body, Written
from chairlift.api.wire.checks import only
from chairlift.errors import InvalidRequest

_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
_NEEDS_GRAMMAR = "tools: the format of a custom tool has a grammar, with syntax and definition, if its type is grammar"


class GrammarText(Body):
    """A grammar that an input must match."""

    syntax: Literal["lark", "regex"]
    definition: str = Field(max_length=MAX_CHARACTERS, description="enforced token by token, if it is regular")


def check_definitions(tools: Iterable[object]) -> None:
    """InvalidRequest if the grammars of custom tools are too long together."""
    specs = (tool.custom if isinstance(tool, ChatCustomTool) else tool for tool in tools)
    forms = (spec.format for spec in specs if isinstance(spec, CustomFunction | TextTool))
    grammars = (form.given_grammar() for form in forms if form is not None)
    if sum(len(grammar.definition) for grammar in grammars if grammar is not None) > MAX_CHARACTERS:
        raise InvalidRequest(
            f"tools: the grammars of the custom tools have more than {MAX_CHARACTERS} characters; simplify them",
            "tools",
        )


class ChatInputFormat(Body):
    """What the input of a custom tool looks like."""

    type: Literal["text", "grammar"]
    grammar: GrammarText | None = Field(None, description="only with type grammar")

    @model_validator(mode="after")
    def _check_grammar(self) -> Self:
        if (self.type == "grammar") != (self.grammar is not None):
            raise InvalidRequest(_NEEDS_GRAMMAR, "tools")
        return self

    def given_grammar(self) -> InputGrammar | None:
        return None if self.grammar is None else InputGrammar(self.grammar.syntax, self.grammar.definition)


class CustomFunction(Body):
    """A tool that is called with a text."""

    name: str = Field(pattern=_NAME)
    description: str | None = None
    format: ChatInputFormat | None = Field(None, description="left out: any text")

    def spec(self) -> FunctionSpec:
        return custom_function(
            self.name, self.description, None if self.format is None else self.format.given_grammar()
        )


class ChatCustomTool(Body):
    """A tool that is called with a text, in chat completions."""

    type: Literal["custom"]
    custom: CustomFunction

    def spec(self) -> FunctionSpec:
        return self.custom.spec()


class InputFormat(Body):
    """What the input of a custom tool looks like, as `/v1/responses` has it."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = Field(None, description="only with type grammar")
    definition: str | None = Field(
        None, max_length=MAX_CHARACTERS, description="the grammar, enforced token by token, if it is regular"
    )

    @model_validator(mode="after")
    def _check_grammar(self) -> Self:
        is_grammar = self.type == "grammar"
        if is_grammar != (self.syntax is not None) or is_grammar != (self.definition is not None):
            raise InvalidRequest(_NEEDS_GRAMMAR, "tools")
        return self

    def given_grammar(self) -> InputGrammar | None:
        return None if self.syntax is None or self.definition is None else InputGrammar(self.syntax, self.definition)


class TextTool(Body):
    """A tool that is called with a text, in `/v1/responses`."""

    type: Literal["custom"]
    name: str = Field(pattern=_NAME)
    description: str | None = None
    format: InputFormat | None = Field(None, description="left out: any text")
    allowed_callers: Annotated[list[str] | None, only(["direct"], "only the model itself calls tools")] = None
    async_: Annotated[StrictBool | None, only(False, "every call waits for its output", "async")] = Field(
        None, alias="async"
    )
    defer_loading: Annotated[StrictBool | None, only(False, "the model sees all tools from the beginning")] = None

    def spec(self) -> FunctionSpec:
        return custom_function(
            self.name, self.description, None if self.format is None else self.format.given_grammar()
        )


# What a model called, in the history of a conversation.


class CalledCustomTool(Written):
    """The custom tool that an assistant called, and with which input."""

    name: str
    input: str

    @property
    def arguments(self) -> str:
        """The arguments of the function that stands for it."""
        return call_arguments(self.input)
