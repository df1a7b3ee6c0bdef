"""Grammars of Gemma 4's calls, whose arguments are a kind of JSON: keys without quotes, and texts between own quotes.

    <|tool_call>call:weather{city:<|"|>Rome<|"|>,days:3}<tool_call|>

Arguments are written as the chat template shows them to the model, without spaces, and keys in the order of the schema.
What a schema asks for beyond types, keys, choices and items, such as a text's pattern, is written as JSON, which the
format allows as well; then llguidance enforces it. See `grammars` for the dialect, and for how marks that are special
tokens are matched.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from chairlift.api.answers.functions import Arguments
from chairlift.api.answers.grammars import MarkTokens, json_rule, lark_pattern

MARKS = OPENING, CLOSING, QUOTE = ("<|tool_call>", "<tool_call|>", '<|"|>')
SAMPLE = f"{OPENING}call:f{{a:{QUOTE}b{QUOTE}}}{CLOSING}"
SAMPLE_CALL = "f", '{"a": "b"}'
"""The function and the arguments of the sample."""

_CHARACTER = r"[^\x01\x02]"  # of a text: with the others a call is not read
_END_OF_TEXT = lark_pattern(re.escape(QUOTE))
_BARE_NAME = "[A-Za-z_][A-Za-z0-9_-]*"
_BARE_KEY = re.compile(r"[^\W\d][\w-]*")
_SEPARATORS = {"item_separator": ",", "key_separator": ":"}
_DEFINITIONS, _REFERENCES = ("$defs", "definitions"), ("#/$defs/", "#/definitions/")
_NOTES = {*_DEFINITIONS, "title", "description", "default", "examples", "$schema", "$comment", "deprecated"}
_PLAIN_TYPES = ("number", "boolean", "null")


def forced_calls_grammar(functions: Sequence[Arguments], is_parallel: bool, tokens: MarkTokens) -> str:
    """One call of one of these functions (`is_parallel`: or several, of any of them) and nothing else."""
    return "\n".join(["start: calls", *_Writing(tokens).rules(functions, is_parallel)]) + "\n"


def free_grammar(
    functions: Sequence[Arguments], is_parallel: bool, answer_schema: dict[str, Any] | None, tokens: MarkTokens
) -> str:
    """Free text in which every call is to one of these functions. With `answer_schema`: calls only, or such JSON."""
    writing = _Writing(tokens)
    if answer_schema is not None:
        start = [f"start: answer | calls\nanswer: {json_rule(answer_schema)}"]
    else:
        start = writing.free_text()
    return "\n".join([*start, *writing.rules(functions, is_parallel)]) + "\n"


class _Writing:
    """Composes calls, and the values in them that have no schema."""

    def __init__(self, tokens: MarkTokens) -> None:
        self._tokens = tokens

    def rules(self, functions: Sequence[Arguments], is_parallel: bool) -> list[str]:
        """Rules: `calls` is all of them; `body` lacks the first opening."""
        assert functions
        opening, closing = self._mark(OPENING), self._mark(CLOSING)
        more = f" ({opening} call {closing})*" if is_parallel else ""
        lines = [
            f"calls: {opening} body",
            f"body: call {closing}{more}",
            "call: " + " | ".join(f"call_{index}" for index in range(len(functions))),
        ]
        for index, each in enumerate(functions):
            values = _Values(f"call_{index}", self, each)
            arguments = values.of_all()
            lines += [f"call_{index}: {_literal(f'call:{each.name}')} {arguments}", *values.lines]
        return [*lines, *self._shared()]

    def free_text(self) -> list[str]:
        """Text that is free up to an opening, so that only a call can follow an opening."""
        token = self._tokens.get(OPENING)
        if token is None:
            return ["start: TEXT | text_and_opening body", *self._up_to_opening()]
        return ["start: TEXT | text_and_opening body", f"text_and_opening: TEXT? <[{token}]>", "TEXT: /(?s:.*)/"]

    def text(self, pattern: str | None = None) -> str:
        """A text between quotes, which a regular expression of llguidance's dialect matches as a whole."""
        token = self._tokens.get(QUOTE)
        if token is None:  # one lexeme with its end, because lexers prefer long ones
            return (
                f"{_literal(QUOTE)} any_text" if pattern is None else f"{_literal(QUOTE)} /(?:{pattern}){_END_OF_TEXT}/"
            )
        return f"<[{token}]> " + ("ANY_TEXT?" if pattern is None else f"/(?:{pattern})/") + f" <[{token}]>"

    def chosen_text(self, value: str) -> str:
        """Exactly that text between quotes."""
        return " ".join((self._mark(QUOTE), *([_literal(value)] if value else []), self._mark(QUOTE)))

    def _shared(self) -> list[str]:
        plain = json_rule({"type": list(_PLAIN_TYPES)}, separators=_SEPARATORS)
        return [
            f"any_value: {self.text()} | any_object | any_list | any_plain",
            'any_object: "{" (any_member ("," any_member)*)? "}"',
            f'any_member: /{_BARE_NAME}/ ":" any_value',
            'any_list: "[" (any_value ("," any_value)*)? "]"',
            f"any_plain: {plain}",
            f"ANY_TEXT: /{_CHARACTER}+/" if QUOTE in self._tokens else f"any_text[lazy]: /{_CHARACTER}*{_END_OF_TEXT}/",
        ]

    def _up_to_opening(self) -> list[str]:
        mark = lark_pattern(re.escape(OPENING))
        return [f"text_and_opening[lazy]: TEXT {_literal(OPENING)}", f"TEXT: /(?s:.*)/ & ~/(?s:.*){mark}(?s:.*)/"]

    def _mark(self, mark: str) -> str:
        token = self._tokens.get(mark)
        return _literal(mark) if token is None else f"<[{token}]>"


class _Unwritable(Exception):
    """Tells that a part of a schema can only be JSON, and only with all of the schema around it."""


class _Values:
    """Composes the values of one function's schema. `lines` are the rules that they refer to, named after the call."""

    def __init__(self, rule: str, writing: _Writing, arguments: Arguments) -> None:
        self.lines: list[str] = []
        self._rule, self._writing = rule, writing
        self._pattern, self._is_lenient = arguments.input_pattern, arguments.is_lenient
        self._root = arguments.schema
        self._num_rules = 0
        self._referred: dict[str, str] = {}  # rules by what references say

    def of_all(self) -> str:
        """Lark of the arguments."""
        try:
            return self._of(self._root)
        except _Unwritable:
            self.lines.clear()
            return self._add(json_rule(self._root, self._is_lenient, _SEPARATORS))

    def _of(self, schema: object) -> str:
        if not isinstance(schema, dict) or not schema.keys() - _NOTES:
            return "any_value"
        asked = schema.keys() - _NOTES
        if asked == {"$ref"}:
            return self._of_reference(schema)
        if asked in ({"anyOf"}, {"oneOf"}) and isinstance(either := schema[next(iter(asked))], list) and either:
            return self._any_of(map(self._of, either))
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list) and asked in ({"enum"}, {"const"}, {"type", "enum"}, {"type", "const"}):
            return self._chosen(values, schema)
        kinds = schema.get("type")
        if isinstance(kinds, list) and kinds and asked == {"type"}:
            return self._any_of(self._of({"type": kind}) for kind in kinds)
        return self._of_type(kinds, schema, asked - {"type"})

    def _of_type(self, kind: object, schema: dict[str, Any], asked: set[str]) -> str:
        if kind == "string" and self._pattern is not None:  # the one text of a custom tool
            return self._writing.text(lark_pattern(self._pattern))
        if kind == "string" and not asked:
            return self._writing.text()
        if kind == "array" and asked <= {"items"}:
            item = self._of(schema.get("items"))
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind == "object" and asked <= {"properties", "required", "additionalProperties"}:
            return self._object(schema)
        return self._json(schema)

    def _object(self, schema: dict[str, Any]) -> str:
        others, properties = schema.get("additionalProperties", True), schema.get("properties", {})
        required = schema.get("required", [])
        are_known = isinstance(properties, dict) and isinstance(required, list) and set(required) <= properties.keys()
        if not are_known or others not in (True, False):
            return self._json(schema)
        if others and not properties:
            return "any_object"
        members = [(f"{_key(name)} {self._of(each)}", name in required) for name, each in properties.items()]
        return f'"{{" {self._in_order(members, self._other(properties) if others else None)} "}}"'

    def _other(self, properties: Iterable[str]) -> str:
        """A member with another name: one of these would escape its own schema."""
        declared = [name for name in properties if _BARE_KEY.fullmatch(name)]
        name = self._next_name()
        excluded = f" & ~/{'|'.join(map(lark_pattern, map(re.escape, declared)))}/" if declared else ""
        self.lines.append(f"{name.upper()}: /{_BARE_NAME}/{excluded}")
        return self._add(f'{name.upper()} ":" any_value')

    def _in_order(self, members: Sequence[tuple[str, bool]], other: str | None) -> str:
        """Members, each with whether it must be there, with commas between those that are. `other`: may follow them."""
        rest = self._add(f'("," {other})*' if other else '""')  # what follows a member
        first = self._add(f'({other} ("," {other})*)?' if other else '""')
        for member, is_required in reversed(members):
            own = self._add(member)
            first = self._add(f"{own} {rest}" if is_required else f"{own} {rest} | {first}")
            rest = self._add(f'"," {own} {rest}' if is_required else f'("," {own})? {rest}')
        return first

    def _chosen(self, values: Sequence[Any], schema: dict[str, Any]) -> str:
        if schema.get("type", "string") != "string" or not all(isinstance(each, str) for each in values) or not values:
            return self._json(schema)
        return self._any_of(map(self._writing.chosen_text, values))

    def _of_reference(self, schema: dict[str, Any]) -> str:
        reference = str(schema["$ref"])
        if reference not in self._referred:
            found: object = self._root
            for part in reference.removeprefix("#").split("/")[1:]:
                found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
            if found is None or not reference.startswith("#"):
                raise _Unwritable
            name = self._referred[reference] = self._next_name()
            self.lines.append(f"{name}: {self._of(found)}")
        return self._referred[reference]

    def _any_of(self, values: Iterable[str]) -> str:
        return f"({' | '.join(values)})"

    def _json(self, schema: dict[str, Any]) -> str:
        """A rule of its own, so that an error is told by its line."""
        if any(_references_in(schema)):
            schema = {**{key: self._root[key] for key in _DEFINITIONS if key in self._root}, **schema}
            if not all(each.startswith(_REFERENCES) for each in _references_in(schema)):
                raise _Unwritable
        return self._add(json_rule(schema, self._is_lenient, _SEPARATORS))

    def _add(self, body: str) -> str:
        name = self._next_name()
        self.lines.append(f"{name}: {body}")
        return name

    def _next_name(self) -> str:
        self._num_rules += 1
        return f"{self._rule}_{self._num_rules}"


def _references_in(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for each in schema.values():
            yield from _references_in(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from _references_in(each)


def _key(name: str) -> str:
    return _literal(f"{name if _BARE_KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False)}:")


def _literal(text: str) -> str:
    """Lark's escapes are those of JSON, but DEL has to be escaped as well."""
    return json.dumps(text).replace("\x7f", "\\u007f")
