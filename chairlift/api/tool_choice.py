"""What `tools`, `tool_choice` and a wanted structure together make of an answer: how it is read, and what it may be."""

from dataclasses import dataclass

from pydantic import ValidationError

from chairlift.api.replies.answer import ToolCalling
from chairlift.api.tools import FunctionSpec, ToolFamily, forced_calls_grammar, free_grammar
from chairlift.api.wire.structure import WantedStructure
from chairlift.errors import InvalidRequest
from chairlift.params import StructuredOutputs


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How an answer is read (None: it is all content), and what it must look like, as which field wants it."""

    calling: ToolCalling | None
    structure: WantedStructure | None


def plan_answer(
    family: ToolFamily | None,
    functions: list[FunctionSpec],
    is_forced: bool,
    is_parallel: bool,
    wanted: WantedStructure | None,
) -> AnswerPlan:
    """`functions`: those that the model may call, perhaps none. InvalidRequest if the wishes exclude each other."""
    if not functions:
        return AnswerPlan(None, wanted)
    if family is None:
        raise InvalidRequest(
            "this model's chat template writes no tool calls that are understood here; leave tools out, or start the"
            " server with --tool-call-parser",
            "tools",
        )
    calling = ToolCalling(family, None if is_parallel else 1)
    if is_forced:
        if wanted is not None:
            raise InvalidRequest(f"tool_choice asks for a call, {wanted.field} for something else", "tool_choice")
        return AnswerPlan(calling, _grammar(forced_calls_grammar(family, functions, is_parallel)))
    if wanted is None:
        grammar = free_grammar(family, functions, is_parallel, None)
        return AnswerPlan(calling, None if grammar is None else _grammar(grammar))
    if wanted.schema is None:
        raise InvalidRequest(
            f'with tools, {wanted.field} can only ask for JSON; or say tool_choice "none"', wanted.field
        )
    grammar = free_grammar(family, functions, is_parallel, wanted.schema)
    assert grammar is not None, "a schema is something to constrain"
    return AnswerPlan(calling, _grammar(grammar, wanted.field))


def _grammar(text: str, field: str = "tools") -> WantedStructure:
    try:
        return WantedStructure(field, StructuredOutputs(grammar=text))
    except ValidationError as error:
        raise InvalidRequest(f"{field}: the schemas are too large together", field) from error
