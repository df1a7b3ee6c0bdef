"""/openapi.json is a valid document, tells of every route, and describes what is really sent."""

import json
from typing import Any

import jsonschema_rs
import openapi_spec_validator
import pytest
from aiohttp import web

from chairlift.api.app import Api
from chairlift.api.pages import PAGE_PATHS, WATCH_PATH, fields_of, openapi_document
from chairlift.api.routes import ROUTES
from chairlift.api.wire import Fate
from tests.api.conftest import Server
from tests.api.contract import CHAT, COMPLETIONS, chunks_of, error_of, get, post, user

DOCUMENT: dict[str, Any] = json.loads(json.dumps(openapi_document()))
CONTINUE = {"prompt": "1 + 1 =", "logprobs": 1, "echo": True, "max_tokens": 3}
ANSWER = {"messages": user("Hi!"), "logprobs": True, "top_logprobs": 1, "max_tokens": 3}


def check(instance: object, reference: str) -> None:
    """Against a schema of the document, in which undeclared fields count as mistakes."""
    closed = {name: {"additionalProperties": False, **schema} for name, schema in schemas().items()}
    root = {"$ref": reference, "components": {"schemas": closed}}
    jsonschema_rs.validator_for(root).validate(instance)


def schemas() -> dict[str, Any]:
    found: dict[str, Any] = DOCUMENT["components"]["schemas"]
    return found


def reply_schema(method: str, path: str, kind: str = "application/json", status: str = "200") -> str:
    content = DOCUMENT["paths"][path][method]["responses"][status]["content"][kind]
    found: str = content["x-event" if kind == "text/event-stream" else "schema"]["$ref"]
    return found


def test_the_document_is_valid() -> None:
    openapi_spec_validator.validate(DOCUMENT)
    assert DOCUMENT["openapi"] == "3.1.0"
    for name, schema in schemas().items():
        assert jsonschema_rs.meta.is_valid({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}), name


async def test_every_route_of_the_application_is_in_it_and_no_other(server: Server) -> None:
    app: web.Application = Api(server.llm).make_app()
    served = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    served -= {("get", path) for path in (*PAGE_PATHS, WATCH_PATH)}  # the page and its feed are no part of the API
    told = {(method, path) for path, item in DOCUMENT["paths"].items() for method in item}
    assert {(method, path) for method, path in told} == {(method, path) for method, path in served}
    assert len(told) == len(ROUTES)
    assert await get(server, "/openapi.json") == DOCUMENT


def test_operations_have_names_of_their_own_and_every_status_has_the_error_body() -> None:
    operations = [operation for item in DOCUMENT["paths"].values() for operation in item.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    for operation in operations:
        assert operation["summary"]
        errors = {status: reply for status, reply in operation["responses"].items() if status != "200"}
        assert {"400", "401", "404", "413", "429", "500", "503"} <= set(errors)
        for reply in errors.values():
            assert reply["content"]["application/json"]["schema"]["$ref"].endswith("ErrorBody")


def test_every_field_says_what_becomes_of_it() -> None:
    for route in ROUTES:
        if route.body is None:
            continue
        schema = schemas()[route.body.__name__]
        assert schema["additionalProperties"] is False
        for row in fields_of(route.body):
            described = schema["properties"][row.name]
            if row.fate is Fate.REFUSED:
                assert described["description"].startswith("refused unless null: "), row.name
                assert described["type"] == "null"
            if row.fate is Fate.IGNORED:
                assert described["description"].startswith("accepted, changes nothing: "), row.name
            assert (row.name in schema.get("required", [])) == row.is_required


async def test_replies_are_as_described(server: Server) -> None:
    check(await post(server, CHAT, {**ANSWER, "n": 2}), reply_schema("post", CHAT))
    check(await post(server, COMPLETIONS, {**CONTINUE, "n": 2}), reply_schema("post", COMPLETIONS))
    check(await post(server, "/tokenize", {"prompt": "a"}), reply_schema("post", "/tokenize"))
    check(await post(server, "/detokenize", {"tokens": [65]}), reply_schema("post", "/detokenize"))
    for path, template in (
        ("/v1/models", "/v1/models"),
        ("/v1/models/bundled", "/v1/models/{model}"),
        ("/health", "/health"),
        ("/version", "/version"),
    ):
        check(await get(server, path), reply_schema("get", template))
    check({"error": await error_of(server, CHAT, {})}, reply_schema("post", CHAT, status="400"))


@pytest.mark.parametrize(("path", "body"), [(CHAT, ANSWER), (COMPLETIONS, CONTINUE)])
async def test_the_events_of_streams_are_as_described(server: Server, path: str, body: dict[str, Any]) -> None:
    for chunk in await chunks_of(server, path, {**body, "stream_options": {"include_usage": True}}):
        check(chunk, reply_schema("post", path, "text/event-stream"))


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("ChatCompletionRequest", {**ANSWER, "stop": "a", "n": None}, {**ANSWER, "reasoning_effort": "little"}),
        ("ChatCompletionRequest", {**ANSWER, "stop": ["a"]}, {**ANSWER, "unknown": 1}),
        ("CompletionRequest", {**CONTINUE, "prompt": [[1], [2]]}, {**CONTINUE, "prompt": {}}),
        ("CompletionRequest", {**CONTINUE, "logit_bias": {"5": 1}}, {**CONTINUE, "stream": "yes"}),
        ("TokenizeRequest", {"prompt": "a"}, {"prompt": 1}),
        ("DetokenizeRequest", {"tokens": [1]}, {"tokens": "a"}),
    ],
)
def test_requests_are_as_described(name: str, good: dict[str, Any], bad: dict[str, Any]) -> None:
    check(good, f"#/components/schemas/{name}")
    with pytest.raises(jsonschema_rs.ValidationError):
        check(bad, f"#/components/schemas/{name}")


def test_keys_are_asked_for_wherever_something_is_computed_or_told() -> None:
    is_open = {
        path: operation["security"] == [] for path, item in DOCUMENT["paths"].items() for operation in item.values()
    }
    assert {path for path, open_to_all in is_open.items() if open_to_all} == {
        *("/health", "/metrics", "/version", "/openapi.json", "/docs")
    }
    assert DOCUMENT["components"]["securitySchemes"] == {
        "key": {"type": "http", "scheme": "bearer"},
        "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
