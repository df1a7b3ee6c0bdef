"""The text of a call's region as calls: the content parser of its field, the transform, and the tools' types."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import regex

from chairlift.api.answers.declared.anchors import MAX_CPU_S
from chairlift.api.answers.declared.template import ContentParser, TemplateField, placeholder
from chairlift.api.answers.formats import Schemas
from chairlift.api.answers.mending import json_of_container
from chairlift.api.answers.text import is_sendable, json_of_literal, parsed

Arguments = Mapping[str, Any]
_OPEN, _CLOSE = "\x01", "\x02"  # around the number of a string that was set aside
_JSON_STRING = regex.compile(r'"(?:[^"\\]|\\.)*"')
_BARE_KEY = regex.compile(r"(?<=[{,]\s*)([^\W\d][\w-]*)(?=\s*:)")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_PYTHON_TYPES: Mapping[str, Any] = {
    "integer": (int, float),
    "number": (int, float),
    "object": (dict,),
    "array": (list,),
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call; `arguments` is JSON."""

    name: str
    arguments: str


class _Raw(str):
    """A value as it was written, whose type only the tool's schema knows."""


def calls_in(field: TemplateField, body: str, captures: Mapping[str, str], schemas: Schemas) -> list[ToolCall]:
    """The calls that a region's text is. ValueError if it is none; TimeoutError if a pattern takes too long."""
    try:
        value = _transformed(field, _parsed(body, field.content, field.content_args), captures)
        return [_call(each, schemas) for each in (value if isinstance(value, list) else [value])]
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def check_parsers(name: str, field: TemplateField) -> None:
    """ValueError, of one line, if the field's parser cannot work with its arguments."""
    where, args = f"fields.{name}.content_args", field.content_args
    try:
        if field.content is ContentParser.XML_INLINE and "key" not in regex.compile(args["tag_pattern"]).groupindex:
            raise ValueError(f"{where}: tag_pattern has no group named key")
        parser = args.get("value_parser")
        if parser is not None and parser.get("name", "text") not in _PARSERS:
            raise ValueError(f"{where}: value_parser names an unknown parser")
        for begin, end in args.get("string_delims") or []:
            if not begin or not end:
                raise ValueError(f"{where}: string_delims has an empty mark")
    except regex.error as error:
        raise ValueError(f"{where}: tag_pattern is not a regular expression: {error}") from error
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{where}: value_parser must be an object, and string_delims a list of pairs") from error


def _transformed(field: TemplateField, content: Any, captures: Mapping[str, str]) -> Any:
    if field.transform is None:
        return content
    if not field.transform_each:
        return _filled(field.transform, {**captures, "content": content})
    if not isinstance(content, list):
        raise ValueError("it is not a list")
    return [_filled(field.transform, {**captures, **each}) for each in content]


def _filled(form: Any, scope: Mapping[str, Any]) -> Any:
    """The transform with values for its placeholders."""
    if isinstance(form, dict):
        return {key: _filled(value, scope) for key, value in form.items()}
    if isinstance(form, list):
        return [_filled(value, scope) for value in form]
    path = placeholder(form)
    if path is None:
        return form
    value: Any = scope
    for key in path:
        value = value[key]
    return value


def _call(value: Any, schemas: Schemas) -> ToolCall:
    function = value.get("function", value)
    name, arguments = function["name"], function.get("arguments", function.get("parameters"))
    name = name.strip()
    if not name or not is_sendable(name):
        raise ValueError("there is no name")
    if isinstance(arguments, str):
        arguments = parsed(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("the arguments are not an object")
    properties = schemas.get(name, {}).get("properties")
    schema_of = properties if isinstance(properties, dict) else {}
    typed = {key: _typed(each, schema_of.get(key)) for key, each in arguments.items()}
    return ToolCall(name, json.dumps(typed, ensure_ascii=False, allow_nan=False))


# How a text becomes a value


def _parsed(text: str, parser: ContentParser, args: Arguments) -> Any:
    return _PARSERS[parser](text, args)


def _text(text: str, args: Arguments) -> str:
    return text if args.get("strip", True) is False else text.strip()


def _json(text: str, args: Arguments) -> Any:
    try:
        value: object = json.loads(_plain_json(text, args), strict=False)
    except ValueError:
        if args.get("allow_non_json"):
            return _text(text, args)
        raise
    return value


def _plain_json(text: str, args: Arguments) -> str:
    """The text without the declared liberties: strings between other marks, keys without quotes."""
    set_aside: list[str] = []

    def put_aside(written: str) -> str:
        set_aside.append(written)
        return f"{_OPEN}{len(set_aside) - 1}{_CLOSE}"

    def put_aside_quoted(match: "regex.Match[str]") -> str:
        return put_aside(json.dumps(match[1], ensure_ascii=False))

    marks, has_bare_keys = args.get("string_delims") or [], args.get("unquoted_keys")
    if (marks or has_bare_keys) and (_OPEN in text or _CLOSE in text):
        raise ValueError("it has control characters")
    for begin, end in marks:
        pattern = f"(?s){regex.escape(begin)}(.*?){regex.escape(end)}"
        text = regex.sub(pattern, put_aside_quoted, text, timeout=MAX_CPU_S)
    if has_bare_keys:
        text = _JSON_STRING.sub(lambda match: put_aside(match[0]), text, timeout=MAX_CPU_S)
        text = _BARE_KEY.sub(r'"\1"', text, timeout=MAX_CPU_S)
    return re.sub(f"{_OPEN}(\\d+){_CLOSE}", lambda match: set_aside[int(match[1])], text)


def _xml_inline(text: str, args: Arguments) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for match in regex.finditer(args["tag_pattern"], text, regex.DOTALL, timeout=MAX_CPU_S):
        groups = match.groupdict()
        key, value = groups["key"], _value(groups.get("value") or "", args)
        if args.get("merge_duplicates") and key in found:
            before = found[key]
            found[key] = [*(before if isinstance(before, list) else [before]), value]
        else:
            found[key] = value
    return found


def _kv_lines(text: str, args: Arguments) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in text.split(args.get("line_sep", "\n")):
        key, mark, value = _text(line, args).partition(args.get("kv_sep", ":"))
        if mark:
            found[_text(key, args)] = _value(_text(value, args), args)
    return found


def _value(raw: str, args: Arguments) -> Any:
    parser = args.get("value_parser")
    return (
        _Raw(raw) if parser is None else _parsed(raw, ContentParser(parser.get("name", "text")), parser.get("args", {}))
    )


_PARSERS: Mapping[ContentParser, Callable[[str, Arguments], Any]] = {
    ContentParser.TEXT: _text,
    ContentParser.INT: lambda text, args: int(_text(text, args)),
    ContentParser.FLOAT: lambda text, args: float(_text(text, args)),
    ContentParser.BOOL: lambda text, args: _text(text, args).lower() in ("true", "1"),
    ContentParser.JSON: _json,
    ContentParser.XML_INLINE: _xml_inline,
    ContentParser.KV_LINES: _kv_lines,
}


# Types


def _typed(value: Any, schema: object) -> Any:
    """The value, and where only its text is known, as a value of a type that the schema allows."""
    if isinstance(value, list):
        return [_typed(each, schema) for each in value]
    if not isinstance(value, _Raw):
        return value
    kinds = _types_of(schema)
    if not kinds:
        written = json_of_literal(value.strip())
        return str(value) if written is None else json.loads(written)
    may_be_text = "string" in kinds
    return next((found for kind in kinds for found in _as_type(value.strip(), kind, may_be_text)), str(value))


def _as_type(raw: str, kind: str, may_be_text: bool) -> Iterator[Any]:
    """The text as a value of this type; nothing if it is none."""
    if kind == "boolean" and raw.lower() in _BOOLEANS:
        yield _BOOLEANS[raw.lower()]
    elif kind == "null" and raw in ("null", "None"):
        yield None
    elif kind in _PYTHON_TYPES:
        is_container = kind in ("object", "array") and not may_be_text
        written = json_of_container(raw) if is_container else json_of_literal(raw)
        value: Any = None if written is None else json.loads(written)
        if not isinstance(value, _PYTHON_TYPES[kind]) or isinstance(value, bool):
            return
        if kind != "integer" or value == int(value):
            yield int(value) if kind == "integer" else value


def _types_of(schema: object) -> list[str]:
    """The types that a schema names, in order; text comes last, because every text is one."""
    if not isinstance(schema, dict):
        return []
    kinds = schema.get("type")
    found = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)]
    values = schema.get("enum")
    if not found and isinstance(values, list) and all(isinstance(value, str) for value in values):
        found.append("string")
    for name in ("anyOf", "oneOf", "allOf"):
        alternatives = schema.get(name)
        for each in alternatives if isinstance(alternatives, list) else []:
            found += _types_of(each)
    if schema.get("nullable") is True:
        found.append("null")
    return found
