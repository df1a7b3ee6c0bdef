"""Custom tools, which the model calls with a text: their declarations, and their calls in a conversation."""

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from chairlift.api.answers.custom import InputGrammar, call_arguments
from chairlift.api.answers.lark import MAX_CHARACTERS
from chairlift.api.wire.body import Body, Written
from chairlift.errors import InvalidRequest

CUSTOM_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
NEEDS_GRAMMAR = "tools: the format of a custom tool has a grammar, with syntax and definition, if its type is grammar"


class GrammarText(Body):
    """A grammar that an input must match."""

    syntax: Literal["lark", "regex"]
    definition: str = Field(max_length=MAX_CHARACTERS, description="enforced token by token, if it is regular")


class CalledCustomTool(Written):
    """The custom tool that an assistant called, and with which input."""

    name: str
    input: str

    @property
    def arguments(self) -> str:
        """The arguments of the function that stands for it."""
        return call_arguments(self.input)


class CalledWithText(Body):
    """A tool that is called with a text."""

    def given_grammar(self) -> InputGrammar | None:
        """The grammar that the text must match; None: any text."""
        raise NotImplementedError


def check_definitions(tools: Iterable[object]) -> None:
    """InvalidRequest if the grammars of custom tools are too long together."""
    grammars = (tool.given_grammar() for tool in tools if isinstance(tool, CalledWithText))
    if sum(len(grammar.definition) for grammar in grammars if grammar is not None) > MAX_CHARACTERS:
        raise InvalidRequest(
            f"tools: the grammars of the custom tools have more than {MAX_CHARACTERS} characters; simplify them",
            "tools",
        )
