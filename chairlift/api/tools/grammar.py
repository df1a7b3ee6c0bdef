"""Grammars for tool calls, in llguidance's dialect of Lark: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md

Calls are written as `json.dumps(call, ensure_ascii=False)` writes them, which is what chat templates show the model; no
room is left for endless whitespace, and of characters that need no escape none can be escaped.
An object's keys come in the order of its schema. Whether llguidance can enforce a schema is for it to say: it is asked
with `LLMatcher.validate_grammar`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chairlift.api.tools.family import CALL_CLOSING, CALL_OPENING, PYTHON_TAG, ToolFamily
from chairlift.errors import InvalidRequest

_ANY_OBJECT = {"type": "object"}
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """A function that the model may call. `parameters` is a JSON schema of an object; {} lets any object pass."""

    name: str
    parameters: dict[str, Any]
    strict: bool
    description: str | None


@dataclass(frozen=True, slots=True)
class _CallStyle:
    """`opening`, before_object, {"name": ..., `arguments_key`: ...}, after_object; `separator` between two of them."""

    opening: str
    before_object: str
    arguments_key: str
    after_object: str
    separator: str


_STYLES = {
    ToolFamily.HERMES: _CallStyle(CALL_OPENING, "\n", "arguments", "\n" + CALL_CLOSING, "\n"),
    ToolFamily.LLAMA3_JSON: _CallStyle("", "", "parameters", "", "; "),
}

# Text up to and with the first opening marker is one lexeme, so what follows the marker can be nothing but a call.
_HERMES_FREE = f"""start: TEXT | call_after_text more_calls
call_after_text: text_and_opening call
text_and_opening[lazy]: TEXT {json.dumps(CALL_OPENING)}
TEXT: /(?s:.*)/"""

_LLAMA3_FREE = rf"""start: TEXT | calls
TEXT: /(?s:.*)/ & ~/[ \t\n\r]*(\{{|{PYTHON_TAG.replace("|", "[|]")})(?s:.*)/"""


def forced_calls_grammar(family: ToolFamily, functions: Sequence[FunctionSpec], is_parallel: bool) -> str:
    """One call of one of these functions (`is_parallel`: or several, of any of them) and nothing else.

    Every function's arguments follow its schema. What llguidance does not know in the schema of a function that is not
    strict counts for nothing. InvalidRequest for a schema that is not of an object.
    """
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
    blocks = [_json(_arguments_schema(function) if function.strict else _ANY_OBJECT) for function in functions]
    if answer_schema is not None:
        start = f"start: answer | calls\nanswer: {_json(answer_schema)}"
    else:
        start = _HERMES_FREE if family is ToolFamily.HERMES else _LLAMA3_FREE
    return "\n".join([start, *_call_rules(family, functions, blocks, is_parallel)]) + "\n"


def _call_rules(
    family: ToolFamily, functions: Sequence[FunctionSpec], arguments: Sequence[str], is_parallel: bool
) -> list[str]:
    """`calls`, whole; `call`, without its opening; `more_calls` after a call. `arguments` are %json blocks."""
    assert functions
    style = _STYLES[family]
    more_calls = f"({_literals(style.separator, style.opening, then='call')})*" if is_parallel else '""'
    rules = [
        f"calls: {_literals(style.opening, then='call more_calls')}",
        f"more_calls: {more_calls}",
        "call: " + " | ".join(f"call_{index}" for index in range(len(functions))),
    ]
    for index, (function, block) in enumerate(zip(functions, arguments, strict=True)):
        # The tokens of JSON one by one, as %json has them: the lexer takes the longest literal that fits, so one for
        # all of this would shut out every other object that begins with `{"` (the answer's).
        name = json.dumps(function.name, ensure_ascii=False)
        head = _literals(style.before_object, "{", '"name"', ": ", name, ", ", f'"{style.arguments_key}"', ": ")
        rules.append(f"call_{index}: {head} {block} {_literals('}', style.after_object)}")
    return rules


def _literals(*texts: str, then: str = "") -> str:
    """Lark strings in a row, then rules. Lark's escapes are those of JSON, but DEL has to be escaped as well."""
    strings = [json.dumps(text).replace("\x7f", "\\u007f") for text in texts if text]
    return " ".join([*strings, then]).strip()


def _json(schema: dict[str, Any], is_lenient: bool = False) -> str:
    """One block per schema, because `$ref`s count from a block's root. The style is ours, whatever the schema says."""
    return "%json " + json.dumps({**schema, "x-guidance": {**_JSON_STYLE, "lenient": is_lenient}})


def _arguments_schema(function: FunctionSpec) -> dict[str, Any]:
    kind = function.parameters.get("type", "object")
    if kind != "object":
        message = f"the parameters of function {function.name!r} must be a JSON schema of type object, not {kind!r}"
        raise InvalidRequest(message, "tools")
    return {**function.parameters, "type": "object"}
