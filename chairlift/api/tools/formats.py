"""The ways of writing a tool call that are understood, which of them a chat template teaches, and their grammars.

HERMES       `<tool_call>{"name": "f", "arguments": {...}}</tool_call>` anywhere in a text (Hermes 2, 3; Qwen 2.5, 3)
LLAMA3_JSON  `{"name": "f", "parameters": {...}}` as the whole answer, or after `<|python_tag|>` (Llama 3.1, 3.2, 3.3)

Grammars are in llguidance's dialect of Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md). Calls
are written as `json.dumps(call, ensure_ascii=False)` writes them, which is what chat templates show the model; there is
no room for endless whitespace, and characters that need no escape cannot be escaped. An object's keys come in the order
of its schema. llguidance decides whether it can enforce a schema (`LLMatcher.validate_grammar`).
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from chairlift.errors import InvalidRequest
from chairlift.params import find_excess

# Qwen3-Coder and GLM-4.5 write something else than JSON between the marks of Hermes.
_NOT_JSON_INSIDE = ("<function=", "<arg_key>")


class ToolFamily(StrEnum):
    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A call is `opening`, a JSON object with the function's name and arguments, `closing`.

    Whitespace may stand between these anywhere; `padding` and `separator` are what chat templates show.
    """

    opening: str
    closing: str
    arguments_key: str
    padding: str  # between the marks and the object
    separator: str  # between two calls; one without its whitespace may be left out
    is_bare: bool  # a call needs no opening where an answer begins and after another call

    @property
    def marks(self) -> tuple[str, ...]:
        """What marks a call: often a special token of the vocabulary, which is otherwise no part of a text."""
        return tuple(mark for mark in (self.opening, self.closing) if mark)


FORMATS = {
    ToolFamily.HERMES: CallFormat(
        opening="<tool_call>",
        closing="</tool_call>",
        arguments_key="arguments",
        padding="\n",
        separator="\n",
        is_bare=False,
    ),
    ToolFamily.LLAMA3_JSON: CallFormat(
        opening="<|python_tag|>",
        closing="",
        arguments_key="parameters",
        padding="",
        separator="; ",
        is_bare=True,
    ),
}


def family_of_template(template: str) -> ToolFamily | None:
    """The family whose calls this chat template (Jinja source) writes; None if it is not understood here."""
    if FORMATS[ToolFamily.HERMES].opening in template:
        is_json = not any(mark in template for mark in _NOT_JSON_INSIDE)
        return ToolFamily.HERMES if is_json else None
    # "parameters" alone would not do: other families' templates describe their tools with that key.
    is_llama = "ipython" in template and '"parameters":' in template
    if is_llama or FORMATS[ToolFamily.LLAMA3_JSON].opening in template:
        return ToolFamily.LLAMA3_JSON
    return None


_SCHEMA_RULE = re.compile(r"(?:call_(?P<index>\d+)|answer): ")
_ANY_OBJECT = {"type": "object"}
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """A function that the model may call. `parameters` is a JSON schema of an object; {} lets any object pass."""

    name: str
    parameters: dict[str, Any]
    strict: bool
    description: str | None


def forced_calls_grammar(family: ToolFamily, functions: Sequence[FunctionSpec], is_parallel: bool) -> str:
    """One call of one of these functions (`is_parallel`: or several, of any of them) and nothing else.

    Every function's arguments follow its schema. What llguidance does not know in the schema of a function that is not
    strict counts for nothing. InvalidRequest for a schema that is not of an object.
    """
    _check_size(functions)
    blocks = [_json(_arguments_schema(function), is_lenient=not function.strict) for function in functions]
    return "\n".join(["start: calls", *_call_rules(family, functions, blocks, is_parallel)]) + "\n"


def free_grammar(
    family: ToolFamily, functions: Sequence[FunctionSpec], is_parallel: bool, answer_schema: dict[str, Any] | None
) -> str | None:
    """Text in which a call, once begun, is one of these functions'. With `answer_schema`: calls only, or such JSON.

    The arguments of a function that is not strict are any JSON object. None where nothing has to be constrained: no
    function is strict, and there is no schema. InvalidRequest for a strict function's schema that is not of an object.
    """
    if answer_schema is None and not any(function.strict for function in functions):
        return None
    _check_size([function for function in functions if function.strict])
    blocks = [_json(_arguments_schema(function) if function.strict else _ANY_OBJECT) for function in functions]
    if answer_schema is not None:
        start = f"start: answer | calls\nanswer: {_json(answer_schema)}"
    else:
        start = _free_text(FORMATS[family])
    return "\n".join([start, *_call_rules(family, functions, blocks, is_parallel)]) + "\n"


def schema_lines(grammar: str) -> dict[int, int | None]:
    """In which lines of such a grammar schemas stand: of which function, or None: of the answer."""
    rules = ((number, _SCHEMA_RULE.match(line)) for number, line in enumerate(grammar.split("\n"), 1))
    return {number: int(rule["index"]) if rule["index"] else None for number, rule in rules if rule is not None}


def _free_text(form: CallFormat) -> str:
    """Text up to and with the first opening mark is one lexeme, so nothing but a call can follow the mark."""
    begins_bare = r"[ \t\n\r]*(\{|" + form.opening.replace("|", "[|]") + r")(?s:.*)"
    return "\n".join(
        (
            f"start: TEXT | {'calls | ' if form.is_bare else ''}call_after_text more_calls",
            "call_after_text: text_and_opening call",
            f"text_and_opening[lazy]: TEXT {json.dumps(form.opening)}",
            "TEXT: /(?s:.*)/" + (f" & ~/{begins_bare}/" if form.is_bare else ""),
        )
    )


def _call_rules(
    family: ToolFamily, functions: Sequence[FunctionSpec], arguments: Sequence[str], is_parallel: bool
) -> list[str]:
    """`calls`, whole; `call`, without its opening; `more_calls` after a call. `arguments` are %json blocks."""
    assert functions
    form = FORMATS[family]
    opening = "" if form.is_bare else form.opening
    more_calls = f"({_literals(form.separator, opening, then='call')})*" if is_parallel else '""'
    rules = [
        f"calls: {_literals(opening, then='call more_calls')}",
        f"more_calls: {more_calls}",
        "call: " + " | ".join(f"call_{index}" for index in range(len(functions))),
    ]
    for index, (function, block) in enumerate(zip(functions, arguments, strict=True)):
        # The tokens of JSON one by one, as %json has them: the lexer takes the longest literal that fits, so one for
        # all of this would shut out every other object that begins with `{"` (the answer's).
        name = json.dumps(function.name, ensure_ascii=False)
        head = _literals(form.padding, "{", '"name"', ": ", name, ", ", f'"{form.arguments_key}"', ": ")
        rules.append(f"call_{index}: {head} {block} {_literals('}', form.padding + form.closing)}")
    return rules


def _literals(*texts: str, then: str = "") -> str:
    """Lark strings in a row, then rules. Lark's escapes are those of JSON, but DEL has to be escaped as well."""
    strings = [json.dumps(text).replace("\x7f", "\\u007f") for text in texts if text]
    return " ".join([*strings, then]).strip()


def _json(schema: dict[str, Any], is_lenient: bool = False) -> str:
    """One block per schema, because `$ref`s count from a block's root. The style is ours, whatever the schema says."""
    return "%json " + json.dumps({**schema, "x-guidance": {**_JSON_STYLE, "lenient": is_lenient}})


def _check_size(functions: Sequence[FunctionSpec]) -> None:
    """Before anything is made of schemas that are too large to be enforced."""
    for function in functions:
        excess = find_excess(function.parameters)
        if excess is not None:
            message = f"tools: the schema of the parameters of function {function.name!r} {excess}; simplify it"
            raise InvalidRequest(message, "tools")
    if find_excess([function.parameters for function in functions]) is not None:
        raise InvalidRequest("tools: the schemas are too large together; leave out some tools", "tools")


def _arguments_schema(function: FunctionSpec) -> dict[str, Any]:
    kind = function.parameters.get("type", "object")
    if kind != "object":
        message = f"the parameters of function {function.name!r} must be a JSON schema of type object, not {kind!r}"
        raise InvalidRequest(message, "tools")
    return {**function.parameters, "type": "object"}
