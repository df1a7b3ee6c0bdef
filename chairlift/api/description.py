"""The description of the API, generated from the routes and the models of bodies: /openapi.json for programs, /docs for
people (one page, without scripts or outside resources), and the tables of docs/api.md.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import Any, Literal

from aiohttp import web
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

import chairlift
from chairlift.api.routes import Route
from chairlift.api.service import Service
from chairlift.api.wire.marks import Fate
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
    "429": "the queue is full; try again after Retry-After",
    "500": "this request could not be computed, or the engine died",
    "503": "the request waited too long, the queue is full, the server is shutting down, or its engine is dead",
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
.refused, .ignored { opacity: 0.65; }
"""
_BEARER = {"type": "http", "scheme": "bearer"}
_BEGIN, _END = "<!-- tables -->\n", "<!-- end of tables -->"

_Schema = Mapping[str, Any]
_Mode = Literal["validation", "serialization"]

Routes = tuple[Route, ...]


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


@dataclass(frozen=True, slots=True)
class _Section:
    """An endpoint with the fields of its body, or a part of bodies."""

    title: str
    summary: str
    rows: list[FieldRow]


def fields_of(body: type) -> list[FieldRow]:
    """Every field of a body or of a part of one: required fields first, then those that work."""
    return _rows(TypeAdapter(body).json_schema())


def described(routes: Routes) -> Routes:
    """These routes, and those of their description."""

    async def openapi(service: Service, _: web.Request) -> web.Response:
        return await service.render(lambda: _openapi_reply(whole, service.root_path))

    async def docs(service: Service, _: web.Request) -> web.Response:
        return await service.render(lambda: _docs_page(whole))

    whole = (
        *routes,
        Route("GET", "/openapi.json", "openapi", "This description", openapi, is_open=True),
        Route("GET", "/docs", "docs", "This description for people", docs, is_open=True),
    )
    return whole


@cache
def openapi_document(routes: Routes, root_path: str = "") -> dict[str, Any]:
    """`root_path`: prefix of all paths."""
    models: list[tuple[type[BaseModel], _Mode]] = []
    for route in routes:
        models += [(route.body, "validation")] if route.body is not None else []
        models += [(model, "serialization") for model in (route.error, route.reply, route.chunk) if model is not None]
    paths: dict[str, dict[str, Any]] = {route.path: {} for route in routes}
    refs, definitions = models_json_schema(list(dict.fromkeys(models)), ref_template="#/components/schemas/{model}")
    headers = {route.key_header for route in routes if route.key_header is not None}
    keys = {_key_name(header): {"type": "apiKey", "in": "header", "name": header} for header in sorted(headers)}
    for route in routes:
        paths[route.path][route.method.lower()] = _operation(route, refs)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Chairlift",
            "version": chairlift.__version__,
            "description": "A small LLM serving engine with APIs in the style of OpenAI and Anthropic.",
        },
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": _BEARER, **keys},
        },
    }


def _openapi_reply(routes: Routes, root_path: str) -> web.Response:
    """The reply for `/openapi.json`. The first call takes about 0.1 s, as it does for `/docs`."""
    return web.Response(text=_openapi_text(routes, root_path), content_type=_JSON)


@cache
def _openapi_text(routes: Routes, root_path: str) -> str:
    return json.dumps(openapi_document(routes, root_path))


def _docs_page(routes: Routes) -> web.Response:
    return web.Response(text=_html(routes), content_type="text/html", charset="utf-8", headers=_HEADERS)


def page_with_tables(page: str, routes: Routes) -> str:
    """docs/api.md with its tables regenerated from the code."""
    before, rest = page.split(_BEGIN)
    _, after = rest.split(_END)
    lines = []
    for each in _sections(routes):
        lines += ["", f"## {each.title}", "", f"{each.summary}."]
        lines += ["", "| Field | Type | |", "|---|---|---|"] if each.rows else []
        for row in each.rows:
            described = f"**{row.status}**{': ' if row.description else ''}{row.description}"
            lines.append(f"| `{row.name}` | {row.type.replace('|', 'or')} | {described} |")
    return before + _BEGIN + "\n".join([*lines, "", ""]) + _END + after


def _operation(route: Route, refs: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.reply is not None:
        content[_JSON] = {"schema": refs[route.reply, "serialization"]}
    if route.chunk is not None:
        # A stream is not one JSON document; this is the shape of each of its events.
        content["text/event-stream"] = {"schema": {"type": "string"}, "x-event": refs[route.chunk, "serialization"]}
    error = {_JSON: {"schema": refs[route.error, "serialization"]}}
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "security": [] if route.is_open else [{key: []} for key in _keys_for(route)],
        "responses": {
            "200": {"description": "as asked", **({"content": content} if content else {})},
            **{status: {"description": text, "content": error} for status, text in _ERRORS.items()},
        },
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": refs[route.body, "validation"]}}}
    names = re.findall(r"{(\w+)}", route.path)
    if names:
        schema = {"type": "string"}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]
    return operation


def _keys_for(route: Route) -> list[str]:
    return ["key"] if route.key_header is None else ["key", _key_name(route.key_header)]


def _key_name(header: str) -> str:
    return header.replace("-", "_")


@cache
def _html(routes: Routes) -> str:
    head = "<tr><th>Field</th><th>Type</th><th>What becomes of it</th></tr>"
    sections = ""
    for each in _sections(routes):
        sections += f"<h2><code>{escape(each.title)}</code></h2><p>{escape(each.summary)}.</p>"
        rows = "".join(
            f'<tr class="{row.fate.name.lower()}"><td><code>{escape(row.name)}</code></td><td>{escape(row.type)}</td>'
            f"<td>{escape(': '.join(filter(None, (row.status, row.description))))}</td></tr>"
            for row in each.rows
        )
        sections += (
            f'<div class="table"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>' if rows else ""
        )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Chairlift: the HTTP API</title><style>{_STYLE}</style></head><body><main>"
        "<h1>Chairlift: the HTTP API</h1><p>As OpenAI and Anthropic specify it, with vLLM's extensions. A field that is"
        " not listed is refused with a 400 that names it. The same for programs:"
        ' <a href="openapi.json">openapi.json</a>.</p>'
        f"{sections}</main></body></html>"
    )


def _sections(routes: Routes) -> Iterator[_Section]:
    """The endpoints, then the parts of their bodies, each once."""
    bodies = [route.body for route in routes if route.body is not None]
    for route in routes:
        yield _Section(f"{route.method} {route.path}", route.summary, fields_of(route.body) if route.body else [])
    _, definitions = models_json_schema([(body, "validation") for body in bodies])
    names = {body.__name__ for body in bodies}
    for name, schema in definitions["$defs"].items():
        if name not in names and "properties" in schema:
            yield _Section(name, "A part of bodies", _rows(schema))


@cache
def _namesakes() -> dict[str, _Schema]:
    """Schemas of the engine's parameters, which check and describe the fields without a description of their own."""
    return {
        name: schema
        for each in (SamplingParams, RequestOptions)
        for name, schema in TypeAdapter(each).json_schema()["properties"].items()
    }


def _rows(schema: _Schema) -> list[FieldRow]:
    rows = []
    for name, each in schema["properties"].items():
        text = each.get("description", "")
        fate = next((fate for fate in Fate if text.startswith(f"{fate.value}: ")), Fate.WORKS)
        described = text.removeprefix(f"{fate.value}: ") or _namesakes().get(name, {}).get("description", "")
        rows.append(FieldRow(name, _type_of(each), fate, name in schema.get("required", ()), described))
    return sorted(rows, key=lambda row: (not row.is_required, list(Fate).index(row.fate)))


def _type_of(schema: _Schema) -> str:
    """A JSON Schema's type in a few words; null is allowed everywhere and left out."""
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
