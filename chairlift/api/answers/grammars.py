"""Grammars of calls, in llguidance's dialect of Lark.

The dialect: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md. Calls are written as chat templates
show them to the model, and JSON as `json.dumps(value, ensure_ascii=False)` writes it: whitespace is bounded, and
characters that need no escape cannot be escaped. Keys and parameters come in the order of the schema. llguidance
decides whether it can enforce a schema (`LLMatcher.validate_grammar`).

Where calls are not JSON, each parameter has a schema of its own. Only `enum` constrains text in an element. A mark that
is a special token of the vocabulary is matched as that token, since its characters are others.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from chairlift.api.answers.code_calls import is_text
from chairlift.api.answers.families import FORMATS, ToolFamily
from chairlift.api.answers.functions import Arguments, Parameter

_SCHEMA_RULE = re.compile(r"(?:call_(?P<index>\d+)(?:_\d+)?|answer): ")
_JSON_SEPARATORS = {"item_separator": ", ", "key_separator": ": "}
_JSON_STYLE: dict[str, Any] = {
    **_JSON_SEPARATORS,
    "whitespace_flexible": False,
    "coerce_one_of": True,  # see `schemas`
}
_SPACE = r"[ \t\n\r]*"
_SHARED_RULES = {
    "any_argument": rf"any_argument: /[A-Za-z_][A-Za-z0-9_]*=/ %json {json.dumps({'x-guidance': _JSON_STYLE})}",
    "any_padded": r'any_padded: /<parameter=[^<>\n]+>\n/ text_value "\n"',
    "any_element": r'any_element: /<parameter=[^<>\n]+>/ text_value "\n"',
    "text_value": r"text_value[lazy]: /(?s:.*)<\/parameter>/",
}

MarkTokens = Mapping[str, int]
"""The special tokens that are marks of calls."""


def forced_calls_grammar(
    family: ToolFamily, functions: Sequence[Arguments], is_parallel: bool, tokens: MarkTokens
) -> str:
    """One call of one of these functions (`is_parallel`: or several, of any of them) and nothing else."""
    return "\n".join(["start: calls", *_Writing(family, tokens).rules(functions, is_parallel)]) + "\n"


def free_grammar(
    family: ToolFamily,
    functions: Sequence[Arguments],
    is_parallel: bool,
    answer_schema: dict[str, Any] | None,
    tokens: MarkTokens,
) -> str:
    """Free text in which every call is to one of these functions. With `answer_schema`: calls only, or such JSON."""
    writing = _Writing(family, tokens)
    if answer_schema is not None:
        start = f"start: answer | calls\nanswer: {json_rule(answer_schema)}"
    else:
        start = writing.free_text()
    return "\n".join([start, *writing.rules(functions, is_parallel)]) + "\n"


def schema_lines(grammar: str) -> dict[int, int | None]:
    """The lines of such a grammar that have schemas, and the function of each; None: the answer's."""
    rules = ((number, _SCHEMA_RULE.match(line)) for number, line in enumerate(grammar.split("\n"), 1))
    return {number: int(rule["index"]) if rule["index"] else None for number, rule in rules if rule is not None}


class _Writing:
    """Composes calls as a family writes them: opening, bracket, calls with separators, bracket."""

    def __init__(self, family: ToolFamily, tokens: MarkTokens) -> None:
        self._form = form = FORMATS[family]
        self._tokens = tokens
        self._lead, self._between, self._tail = form.brackets[0], form.between, form.brackets[1]
        self._call: Callable[[str, Arguments], list[str]] = self._json_call
        match family:
            case ToolFamily.QWEN3_CODER | ToolFamily.SEED_OSS:
                self._call = self._element_call
            case ToolFamily.PYTHONIC:
                self._call = self._python_call
            case ToolFamily.MISTRAL if "[ARGS]" in tokens:
                self._call, self._lead, self._between, self._tail = self._named_call, "", "", ""
        self._again = "" if form.is_bare or self._lead else form.opening  # before each further call

    def rules(self, functions: Sequence[Arguments], is_parallel: bool) -> list[str]:
        """Rules: `calls` is all of them; `body` lacks the opening; `after_lead` also the bracket; `call` is one."""
        assert functions
        more = f"({self._literals(self._between, self._again, then='call')})*" if is_parallel else '""'
        opening = "" if self._form.is_bare else self._form.opening
        lines = [
            f"calls: {self._literals(opening, then='body')}",
            f"body: {self._literals(self._lead, then='after_lead')}",
            f"after_lead: call more_calls {self._literals(self._tail)}".rstrip(),
            f"more_calls: {more}",
            "call: " + " | ".join(f"call_{index}" for index in range(len(functions))),
        ]
        for index, each in enumerate(functions):
            lines += self._call(f"call_{index}", each)
        for name, shared in _SHARED_RULES.items():
            if any(name in line for line in lines):
                lines.append(shared)
        return lines

    def free_text(self) -> str:
        """Text that is free up to an opening, so that only a call can follow an opening."""
        form = self._form
        token = self._tokens.get(form.opening)
        spelled = "|".join(re.escape(mark).replace("/", r"\/") for mark in (form.opening, *form.other_openings))
        excluded = [] if token is None else [rf"~/(?s:.*)({spelled})(?s:.*)/"]
        bare = ""
        if form.is_bare:
            # One lexeme with the bracket, because text may go on with it, and lexers prefer long ones.
            bare = rf"/{_SPACE}\[/ after_lead | " if self._lead else f"(/{_SPACE}/) calls | "
            begins = rf"\[{_SPACE}[A-Za-z0-9_.-]" if self._lead else r"\{"
            excluded.append(rf"~/{_SPACE}({begins}|{spelled})(?s:.*)/")
        lexeme = f"text_and_opening[lazy]: TEXT {json.dumps(form.opening)}"
        return "\n".join(
            (
                f"start: TEXT | {bare}text_and_opening body",
                lexeme if token is None else f"text_and_opening: TEXT? <[{token}]>",
                " & ".join(["TEXT: /(?s:.*)/", *excluded]),
            )
        )

    def _json_call(self, rule: str, arguments: Arguments) -> list[str]:
        # JSON tokens one by one, as in %json: the lexer takes the longest literal that matches, so a single literal for
        # all of them would exclude every other object that begins with `{"` (the answer's).
        padding = "\n" if self._form.closing else ""
        key = "parameters" if self._form.is_bare else "arguments"
        head = self._literals(padding, "{", '"name"', ": ", _quoted(arguments.name), ", ", f'"{key}"', ": ")
        return [f"{rule}: {head} {_json_of(arguments)} {self._literals('}', padding, self._form.closing)}"]

    def _named_call(self, rule: str, arguments: Arguments) -> list[str]:
        return [f"{rule}: {self._literals(arguments.name, '[ARGS]')} {_json_of(arguments)}"]

    def _element_call(self, rule: str, arguments: Arguments) -> list[str]:
        parameters, padding = arguments.parameters(), self._form.padding
        if parameters is None:
            inner, lines = "any_padded*" if padding else "any_element*", []
        else:
            inner = " ".join(f"{rule}_{i}" + ("" if each.is_required else "?") for i, each in enumerate(parameters))
            lines = [
                f"{rule}_{i}: {self._literals(f'<parameter={each.name}>' + padding)} {self._element(each, arguments)}"
                for i, each in enumerate(parameters)
            ]
        head = self._literals("\n", f"<function={arguments.name}>", "\n")
        return [f"{rule}: {head} {inner} {self._literals('</function>', chr(10), self._form.closing)}", *lines]

    def _element(self, parameter: Parameter, arguments: Arguments) -> str:
        end = self._literals(self._form.padding + "</parameter>\n")
        if arguments.input_pattern is not None:  # one lexeme with its end, because lexers prefer long ones
            padding = r"\n" if self._form.padding else ""
            return f"/(?:{lark_pattern(arguments.input_pattern)}){padding}<\\/parameter>\\n/"
        if not is_text(parameter.schema):
            return f"{json_rule(parameter.schema, arguments.is_lenient)} {end}"
        values = parameter.schema.get("enum")
        return 'text_value "\\n"' if not values else f"({' | '.join(map(self._literals, map(str, values)))}) {end}"

    def _python_call(self, rule: str, arguments: Arguments) -> list[str]:
        parameters = arguments.parameters()
        if parameters is None:
            more = self._literals(", ", then="any_argument")
            return [f"{rule}: {self._literals(arguments.name, '(')} (any_argument ({more})*)? {self._literals(')')}"]
        first_required = next((i for i, each in enumerate(parameters) if each.is_required), len(parameters))
        starts = [f"{rule}_{i} {rule}_after_{i + 1}" for i in range(min(first_required + 1, len(parameters)))]
        starts += ['""'] if first_required == len(parameters) else []
        lines = [f"{rule}: {self._literals(arguments.name, '(')} ({' | '.join(starts)}) {self._literals(')')}"]
        for i, each in enumerate(parameters):
            value = json_rule(each.schema, arguments.is_lenient)
            lines.append(f"{rule}_{i}: {self._literals(f'{each.name}=')} {value}")
            sign = "" if each.is_required else "?"
            more = self._literals(", ", then=f"{rule}_{i}")
            lines += [f"{rule}_after_{i}: ({more}){sign} {rule}_after_{i + 1}"] if i else []
        return [*lines, f'{rule}_after_{len(parameters)}: ""']

    def _literals(self, *texts: str, then: str = "") -> str:
        """Lark strings and special tokens in a row, then rules."""
        return " ".join([*(self._literal(text) for text in texts if text), then]).strip()

    def _literal(self, text: str) -> str:
        """Lark's escapes are those of JSON, but DEL has to be escaped as well."""
        token = self._tokens.get(text)
        return json.dumps(text).replace("\x7f", "\\u007f") if token is None else f"<[{token}]>"


def _json_of(arguments: Arguments) -> str:
    return json_rule(arguments.schema, arguments.is_lenient)


def lark_pattern(pattern: str) -> str:
    """A regular expression as it may stand in one of Lark's."""
    return re.sub(
        r"\\.|/|\n", lambda match: {"/": r"\/", "\n": r"\n"}.get(match[0], match[0]), pattern, flags=re.DOTALL
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_rule(
    schema: dict[str, Any], is_lenient: bool = False, separators: Mapping[str, str] = _JSON_SEPARATORS
) -> str:
    """One block per schema, because `$ref`s count from a block's root. Our style overrides that of the schema."""
    return "%json " + json.dumps({**schema, "x-guidance": {**_JSON_STYLE, **separators, "lenient": is_lenient}})
