"""The API's description, read off the table of endpoints and the models of bodies: /openapi.json for programs, /docs
for people (one page, without scripts or outside resources), and the tables of docs/api.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from html import escape
from typing import Any, Literal, get_args

from aiohttp import web
from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic.json_schema import models_json_schema

import chairlift
from chairlift.api.routes import ROUTES, Route
from chairlift.api.wire.base import ErrorBody, Ignored, Refused
from chairlift.params import RequestOptions, SamplingParams

_JSON = "application/json"
_ERRORS = {
    "400": "the request cannot be served; the message says what to change",
    "401": "no valid API key",
    "403": "a foreign web page, or another name for a server that asks for no key",
    "404": "no such model or path",
    "408": "the body did not come in time",
    "413": "the body is too large",
    "415": "the body is not sent as JSON, or in an unknown encoding",
    "429": "too many requests wait; try again after Retry-After",
    "500": "this request could not be computed, or the engine died",
    "503": "the request waited as long as it may, too many wait, the server is going down, or its engine is dead",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #8886; } h2 code { font-size: 1em; }
.table { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 0.9em; }
th, td { text-align: left; vertical-align: top; padding: 0.3rem 0.8rem 0.3rem 0; border-bottom: 1px solid #8883; }
.refused, .accepted { opacity: 0.65; }
"""
_BEGIN, _END = "<!-- tables -->\n", "<!-- end of tables -->"

_Mode = Literal["validation", "serialization"]


class Fate(StrEnum):
    """What becomes of a field."""

    WORKS = "works"
    IGNORED = "accepted, changes nothing"
    REFUSED = "refused unless null"


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One field of a request's body."""

    name: str
    type: str
    fate: Fate
    is_required: bool
    description: str

    @property
    def status(self) -> str:
        return "required" if self.is_required else self.fate.value


def fields_of(body: type) -> list[FieldRow]:
    """Every field of a body or of a part of one: those that must be there first, then those that work."""
    properties = TypeAdapter(body).json_schema()["properties"]
    rows = [
        FieldRow(
            name=field.alias or name,
            type=_type_of(properties[field.alias or name]),
            fate=_fate(field),
            is_required=field.is_required(),
            description=_description(name, field),
        )
        for name, field in _declared(body).items()
    ]
    return sorted(rows, key=lambda row: (not row.is_required, list(Fate).index(row.fate)))


@cache
def openapi_document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    refs, definitions = models_json_schema(_models(), ref_template="#/components/schemas/{model}")
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Chairlift",
            "version": chairlift.__version__,
            "description": "A small LLM serving engine with an OpenAI-style API.",
        },
        "paths": {route.path: {route.method.lower(): _operation(route, refs)} for route in ROUTES},
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def docs_page() -> web.Response:
    """`/docs` as a reply."""
    return web.Response(text=_html(), content_type="text/html", charset="utf-8", headers=_HEADERS)


def page_with_tables(page: str) -> str:
    """docs/api.md with its tables as the code has them now."""
    before, rest = page.split(_BEGIN)
    _, after = rest.split(_END)
    lines = [""]
    for route in ROUTES:
        lines += [f"## {route.method} {route.path}", "", f"{route.summary}.", ""]
        lines += [] if route.body is None else _markdown_table(route.body)
    lines += ["## Parts of bodies", ""]
    for part in _parts():
        lines += [f"### {part.__name__}", "", *_markdown_table(part)]
    return before + _BEGIN + "\n".join([*lines, ""]) + _END + after


def _models() -> list[tuple[type[BaseModel], _Mode]]:
    models: list[tuple[type[BaseModel], _Mode]] = [(ErrorBody, "serialization")]
    for route in ROUTES:
        models += [(route.body, "validation")] if route.body is not None else []
        models += [(model, "serialization") for model in (route.reply, route.chunk) if model is not None]
    return list(dict.fromkeys(models))


def _operation(route: Route, refs: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.reply is not None:
        content[_JSON] = {"schema": refs[route.reply, "serialization"]}
    if route.chunk is not None:
        # A stream is not one JSON document; this is the shape of each of its events.
        content["text/event-stream"] = {"schema": {"type": "string"}, "x-event": refs[route.chunk, "serialization"]}
    error = {_JSON: {"schema": refs[ErrorBody, "serialization"]}}
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "security": [] if route.is_open else [{"key": []}],
        "responses": {
            "200": {"description": "as asked", **({"content": content} if content else {})},
            **{status: {"description": text, "content": error} for status, text in _ERRORS.items()},
        },
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": refs[route.body, "validation"]}}}
    if "{model}" in route.path:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


@cache
def _html() -> str:
    sections = ""
    for route in ROUTES:
        sections += f"<h2><code>{route.method} {escape(route.path)}</code></h2><p>{escape(route.summary)}.</p>\n"
        sections += "" if route.body is None else _html_table(route.body)
    for part in _parts():
        sections += f"<h2><code>{part.__name__}</code></h2>{_html_table(part)}\n"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Chairlift: the HTTP API</title><style>{_STYLE}</style></head><body><main>"
        "<h1>Chairlift: the HTTP API</h1><p>As OpenAI specifies it, with vLLM's extensions. A field that is not listed"
        ' is refused with a 400 that names it. The same for programs: <a href="openapi.json">openapi.json</a>.</p>'
        f"{sections}</main></body></html>"
    )


def _html_table(body: type) -> str:
    rows = "".join(
        f'<tr class="{row.fate.value.split()[0].strip(",")}"><td><code>{escape(row.name)}</code></td>'
        f"<td>{escape(row.type)}</td><td>{escape(': '.join(filter(None, (row.status, row.description))))}</td></tr>"
        for row in fields_of(body)
    )
    head = "<tr><th>Field</th><th>Type</th><th>What becomes of it</th></tr>"
    return f'<div class="table"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>'


def _markdown_table(body: type) -> list[str]:
    lines = []
    for row in fields_of(body):
        described = f"**{row.status}**: {row.description}" if row.description else f"**{row.status}**"
        lines.append(f"| `{row.name}` | {row.type.replace('|', 'or')} | {described} |")
    return ["| Field | Type | |", "|---|---|---|", *lines, ""]


def _parts() -> list[type]:
    """The parts that bodies are made of, and theirs, each once."""
    parts: dict[type, None] = {}
    bodies = [route.body for route in ROUTES if route.body is not None]
    left = [field.annotation for body in bodies for field in _declared(body).values()]
    while left:
        annotation = left.pop(0)
        if isinstance(annotation, type) and _declared(annotation):
            if annotation not in parts:
                parts[annotation] = None
                left += [field.annotation for field in _declared(annotation).values()]
        else:
            left += [each for each in get_args(annotation) if isinstance(each, type) or get_args(each)]
    return list(parts)


def _declared(body: type) -> dict[str, FieldInfo]:
    """The fields of a pydantic model or dataclass; none for other types."""
    fields: dict[str, FieldInfo] = getattr(body, "__pydantic_fields__", {})
    return fields


def _fate(field: FieldInfo) -> Fate:
    if any(isinstance(mark, Refused) for mark in field.metadata):
        return Fate.REFUSED
    return Fate.IGNORED if any(isinstance(mark, Ignored) for mark in field.metadata) else Fate.WORKS


def _description(name: str, field: FieldInfo) -> str:
    """The field's own; or its mark's reason; or what is said of its namesake in the parameters, which check it."""
    for mark in field.metadata:
        if isinstance(mark, (Ignored, Refused)):
            return mark.why
    if field.description is not None:
        return field.description
    namesake = {**_declared(RequestOptions), **_declared(SamplingParams)}.get(name)
    return "" if namesake is None or namesake.description is None else namesake.description


def _type_of(schema: dict[str, Any]) -> str:
    """A JSON Schema's type in a few words; that null is allowed goes without saying."""
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[-1]
    if "enum" in schema:
        return " | ".join(f'"{value}"' for value in schema["enum"])
    if "const" in schema:
        return f'"{schema["const"]}"'
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if alternatives:
        return " | ".join(_type_of(each) for each in alternatives if each.get("type") != "null")
    if schema.get("type") == "array":
        return f"list of {_type_of(schema.get('items', {}))}"
    return str(schema.get("type", "any"))
