"""Every field of the specifications is known and described, in the documentation's tables and in /openapi.json."""

import json
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import jsonschema_rs
import openapi_spec_validator
import pytest
from aiohttp import web
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from chairlift.api.app import Api
from chairlift.api.errors import error_reply
from chairlift.api.pages import PAGE_PATHS, WATCH_PATH, fields_of, openapi_document, page_with_tables
from chairlift.api.routes import ROUTES
from chairlift.api.wire import REFUSED, Body, Fate, Refused
from chairlift.api.wire.completions import ChatCompletionRequest, CompletionRequest
from chairlift.api.wire.responses import ResponsesRequest
from tests.api.conftest import Server
from tests.api.contract import CHAT, COMPLETIONS, chunks_of, error_of, get, post, user

# --- fields


VLLM_FIELDS = {
    *("prompt_logprobs", "return_token_ids", "truncate_prompt_tokens"),
    *("bad_words", "allowed_token_ids", "repetition_detection"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"),
    *("priority", "cache_salt"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
}

VLLM_CHAT_FIELDS = {*VLLM_FIELDS, "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
BODIES = [route.body for route in ROUTES if route.body is not None]

GENERATING: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (ChatCompletionRequest, {"messages": [{"role": "user", "content": "hi"}]}),
    (CompletionRequest, {"prompt": "hi"}),
    (ResponsesRequest, {"input": "hi"}),
]

# What comes back has in it what other servers and clients have added.
WRITTEN_BY_A_MODEL = {
    *("AssistantTurn", "WrittenPart", "ToolCall", "CalledFunction"),
    *("WrittenMessage", "WrittenText", "InputCall", "Reasoning", "ReasoningText"),
    *("ModelTurn", "WrittenTextBlock", "ThinkingBlock", "RedactedThinkingBlock", "ToolUseBlock"),
    "LeftOutTool",  # of which nothing is read but the type
}

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def client_fields(params: type) -> set[str]:
    return set(get_type_hints(params))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            ChatCompletionRequest,
            client_fields(chat_params.CompletionCreateParamsStreaming)
            | client_fields(chat_params.CompletionCreateParamsNonStreaming)
            | VLLM_CHAT_FIELDS,
        ),
        (
            CompletionRequest,
            client_fields(completion_params.CompletionCreateParamsStreaming)
            | client_fields(completion_params.CompletionCreateParamsNonStreaming)
            | VLLM_FIELDS,
        ),
    ],
)
def test_every_field_that_the_client_can_send_is_known(body: type[BaseModel], expected: set[str]) -> None:
    assert expected - {row.name for row in fields_of(body)} == set()


@pytest.mark.parametrize(
    ("body", "accepted", "refused"),
    [
        (
            ChatCompletionRequest,
            {
                *("metadata", "safety_identifier", "store", "service_tier", "prompt_cache_key"),
                *("prompt_cache_retention", "prompt_cache_options", "modalities"),
            },
            {*("audio", "functions", "function_call", "verbosity"), *("web_search_options", "moderation")},
        ),
        (
            CompletionRequest,
            {
                *("metadata", "safety_identifier", "store", "service_tier", "prompt_cache_key"),
                *("prompt_cache_retention", "prompt_cache_options"),
            },
            {"suffix"},
        ),
        (
            ResponsesRequest,
            {
                *("metadata", "client_metadata", "safety_identifier", "service_tier"),
                *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
            },
            {
                *("conversation", "prompt", "max_tool_calls"),
                *("moderation", "context_management", "access_programs", "image"),
            },
        ),
    ],
)
def test_a_field_changes_its_fate_only_where_somebody_decides_it(
    body: type[BaseModel], accepted: set[str], refused: set[str]
) -> None:
    rows = fields_of(body)
    assert {row.name for row in rows if row.fate is Fate.IGNORED} == accepted
    assert {row.name for row in rows if row.fate is Fate.REFUSED} == refused


@pytest.mark.parametrize(("body", "required"), GENERATING)
def test_a_field_that_is_null_counts_as_left_out(body: type[BaseModel], required: dict[str, Any]) -> None:
    bare = body.model_validate(required)
    for row in fields_of(body):
        if not row.is_required:
            assert body.model_validate({**required, row.name: None}) == bare, row.name


def parts_of(body: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a request and of everything inside it, by path. A dataclass counts as a model."""
    found: dict[str, FieldInfo] = {}
    waiting: list[Any] = [body]
    while waiting:
        annotation = waiting.pop()
        waiting += get_args(annotation)
        if get_origin(annotation) is not None:
            continue
        fields = getattr(annotation, "model_fields", None) or getattr(annotation, "__pydantic_fields__", None) or {}
        for name, field in fields.items():
            path = f"{annotation.__name__}.{name}"
            if path not in found:
                found[path] = field
                waiting.append(field.annotation)
    return found


@pytest.mark.parametrize("body", BODIES)
def test_null_counts_as_left_out_at_every_depth(body: type[BaseModel]) -> None:
    """Every field that may be left out says so of null as well."""
    parts = parts_of(body)
    denying = [
        path
        for path, field in parts.items()
        if not field.is_required() and {type(None), Any}.isdisjoint(get_args(field.annotation) or (field.annotation,))
    ]
    assert denying == []


@pytest.mark.parametrize("body", BODIES)
def test_no_part_of_a_request_lets_unknown_fields_pass_but_what_a_model_wrote(body: type[BaseModel]) -> None:
    owners = {path.rpartition(".")[0] for path in parts_of(body)}
    schemas = {body.__name__: body.model_json_schema(), **body.model_json_schema().get("$defs", {})}
    assert owners == set(schemas)
    assert {name for name, schema in schemas.items() if schema.get("additionalProperties") is not False} == (
        owners & WRITTEN_BY_A_MODEL
    )


def collections_in(schema: Any) -> list[dict[str, Any]]:
    """Every list, set, tuple and dictionary of a core schema."""
    if isinstance(schema, dict):
        own = getattr(schema.get("cls"), "__pydantic_core_schema__", schema)  # by which parts are really checked
        if schema.get("type") == "dataclass" and own is not schema:
            return collections_in({**own, "cls": None})
        is_one = schema.get("type") in ("list", "set", "frozenset", "tuple", "dict") and "schema" not in schema
        return [schema] * is_one + [each for part in schema.values() for each in collections_in(part)]
    return [each for part in schema for each in collections_in(part)] if isinstance(schema, list | tuple) else []


@pytest.mark.parametrize("body", BODIES)
def test_every_collection_of_a_request_stops_at_its_first_error(body: type[BaseModel]) -> None:
    found = collections_in(body.__pydantic_core_schema__)
    assert found
    assert [each for each in found if not each.get("fail_fast")] == []


MANY: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": [1] * 10_000}),
    ("messages", {"messages": [{"role": "user", "content": [1] * 10_000}]}),
    ("stop", {"stop": [1] * 10_000}),
    ("logit_bias", {"logit_bias": {f"x{i}": 1 for i in range(10_000)}}),
    ("metadata", {"metadata": {f"x{i}": 1 for i in range(10_000)}}),
    ("structured_outputs", {"structured_outputs": {"choice": [1] * 10_000}}),
    ("tools", {"tools": [1] * 10_000}),
]


@pytest.mark.parametrize(("name", "fields"), MANY)
def test_many_wrong_elements_make_few_complaints(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate_json(
            json.dumps({"messages": [{"role": "user", "content": "a"}], **fields})
        )
    assert caught.value.error_count() <= 4  # one for each form that a field may have
    assert error_reply(caught.value).detail.param == name


def test_labels_are_as_long_as_openai_has_them() -> None:
    body: dict[str, Any] = {"prompt": "a"}
    fits = {f"{i:064}": "x" * 512 for i in range(16)}
    CompletionRequest.model_validate({**body, "metadata": fits, "user": "x" * 512})
    for wrong in (
        {"metadata": {**fits, "one more": "a"}},
        {"metadata": {"x" * 65: "a"}},
        {"metadata": {"a": "x" * 513}},
        {"user": "x" * 513},
        {"safety_identifier": "x" * 513},
        {"prompt_cache_key": "x" * 513},
    ):
        with pytest.raises(ValidationError):
            CompletionRequest.model_validate({**body, **wrong})


@pytest.mark.parametrize("value", [0, "", [], {}, "auto", {"type": "x"}, [{}], False])
@pytest.mark.parametrize(("body", "required"), GENERATING)
def test_a_refused_field_names_itself_whatever_its_value(
    body: type[BaseModel], required: dict[str, Any], value: object
) -> None:
    for row in fields_of(body):
        if row.fate is Fate.REFUSED:
            with pytest.raises(ValidationError) as caught:
                body.model_validate({**required, row.name: value})
            failure = error_reply(caught.value)
            assert (failure.status, failure.detail.param) == (400, row.name)
            assert failure.detail.message.startswith(f"{row.name} is not supported: ")


def test_every_reason_for_a_refusal_is_used() -> None:
    parts = {path: field for body in BODIES for path, field in parts_of(body).items()}
    refusing = {path for path, field in parts.items() if any(isinstance(mark, Refused) for mark in field.metadata)}
    assert {path.rpartition(".")[2] for path in refusing} == {name for refused in REFUSED.values() for name in refused}
    assert set(REFUSED) <= {each.__name__ for each in descendants(Body)}


def descendants(parent: type[BaseModel]) -> set[type[BaseModel]]:
    return {parent}.union(*map(descendants, parent.__subclasses__()))


@pytest.mark.parametrize("body", BODIES)
def test_every_field_of_a_request_is_described(body: type[BaseModel]) -> None:
    for row in fields_of(body):
        assert row.type != "any", row.name
        if row.fate is not Fate.WORKS:
            assert row.description, row.name
        assert (row.type == "null") == (row.fate is Fate.REFUSED), row.name
    for path, field in parts_of(body).items():
        for mark in field.metadata:
            assert not isinstance(mark, Refused) or mark.why, path


def test_the_documentations_tables_are_those_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page_with_tables(page) == page, "run python tools/write_api_reference.py"


# --- /openapi.json


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
