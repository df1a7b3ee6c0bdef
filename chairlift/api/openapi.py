"""`/openapi.json`, made from the routes and their pydantic models."""

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import chairlift
from chairlift.api.routes import ROUTES, Route
from chairlift.api.wire.base import ErrorBody

_JSON = "application/json"
_ERRORS = {
    "400": "the request cannot be served; the message says what to change",
    "401": "no valid API key",
    "404": "no such model or path",
    "408": "the body did not come in time",
    "413": "the body is too large",
    "429": "too many requests wait; try again after Retry-After",
    "500": "this request could not be computed, or the engine died",
    "503": "the request waited as long as it may, the server is going down, or its engine is dead",
}
_Mode = Literal["validation", "serialization"]


@cache
def describe() -> dict[str, Any]:
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
        "operationId": route.handler,
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
