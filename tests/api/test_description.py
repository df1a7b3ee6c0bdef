"""Every field of the specifications is known and described, in the documentation's tables and in /openapi.json."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import jsonschema_rs
import openapi_spec_validator
import pytest
from aiohttp import web
from anthropic.types import message_count_tokens_params
from anthropic.types import message_create_params as message_params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_message_params
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.embedding_create_params import EmbeddingCreateParams
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from chairlift.api.app import ROUTES, Api
from chairlift.api.description import fields_of, openapi_document, page_with_tables
from chairlift.api.errors import error_reply
from chairlift.api.pages import PAGE_PATHS, WATCH_PATH
from chairlift.api.wire.marks import Fate, Refused
from tests.api.conftest import Server
from tests.api.contract import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    MESSAGES,
    RESPONSES,
    body_of,
    chunks_of,
    error_of,
    get,
    post,
    user,
)

VLLM_FIELDS = {
    *("prompt_logprobs", "return_token_ids", "truncate_prompt_tokens", "bad_words", "allowed_token_ids", "min_tokens"),
    *("repetition_detection", "repetition_penalty", "top_k", "min_p", "ignore_eos", "stop_token_ids", "priority"),
    *("cache_salt", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
}
VLLM_CHAT_FIELDS = {*VLLM_FIELDS, "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
BODIES = [route.body for route in ROUTES if route.body is not None]
GENERATING: dict[str, dict[str, Any]] = {
    CHAT: {"messages": user("hi")},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
}
EMBEDDINGS = "/v1/embeddings"
VALUES: list[Any] = [0, "", [], {}, "auto", {"type": "x"}, [{}], False]
HINTS = {"metadata", "safety_identifier", "service_tier", "prompt_cache_key"}
HINTS |= {"prompt_cache_retention", "prompt_cache_options"}
EXTRAS = {"spaces_between_special_tokens", "guided_decoding_backend", "n_keep", "repeat_last_n", "mirostat_tau"}
EXTRAS |= {"mirostat_eta", "dynatemp_exponent", "xtc_threshold", "dry_base", "dry_allowed_length", "dry_penalty_last_n"}
FATES: dict[str, tuple[set[str], set[str]]] = {  # accepted without an effect, and refused
    CHAT: (
        {*HINTS, *EXTRAS, "store", "modalities"},
        {"audio", "web_search_options", "moderation"},
    ),
    COMPLETIONS: ({*HINTS, *EXTRAS, "store"}, set()),
    RESPONSES: (
        {*HINTS, *EXTRAS, "client_metadata", "max_tool_calls"},
        {"conversation", "prompt", "moderation", "access_programs", "image"},
    ),
    MESSAGES: (
        {*("cache_control", "context_management", "speed", "user_profile_id", "workspace_id", "billing_policy")}
        | {"service_tier", "inference_geo", "diagnostics"},
        {"mcp_servers", "container", "compaction", "fallbacks", "fallback_credit_token", "thread"},
    ),
}
# The client writes the first two into headers, and turns the third into another field.
LEFT_TO_THE_CLIENT = {"betas", "workspace_id", "output_format"}

# What comes back has in it what other servers and clients have added.
WRITTEN_BY_A_MODEL = {
    *("AssistantTurn", "WrittenPart", "ToolCall", "CalledFunction", "CalledCustomTool"),
    *("WrittenMessage", "WrittenText", "InputCall", "InputCustomCall", "Reasoning", "ReasoningText"),
    *("ModelTurn", "WrittenTextBlock", "ThinkingBlock", "RedactedThinkingBlock", "ToolUseBlock"),
    *("LeftOutTool", "Attachment"),  # of which nothing is read but the type
}

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


@pytest.mark.parametrize(
    ("path", "params", "others"),
    [
        (CHAT, get_args(chat_params.CompletionCreateParams), VLLM_CHAT_FIELDS),
        (COMPLETIONS, get_args(completion_params.CompletionCreateParams), VLLM_FIELDS),
        (EMBEDDINGS, (EmbeddingCreateParams,), {"priority", "truncate_prompt_tokens", "cache_salt"}),
        (MESSAGES, get_args(message_params.MessageCreateParams), set()),
        (MESSAGES, get_args(beta_message_params.MessageCreateParams), set()),
        (COUNT_TOKENS, [message_count_tokens_params.MessageCountTokensParams], set()),
        (COUNT_TOKENS, [beta_count_params.MessageCountTokensParams], set()),
    ],
)
def test_every_field_that_the_clients_can_send_is_known(path: str, params: Sequence[type], others: set[str]) -> None:
    assert params
    sent = set().union(*map(get_type_hints, params)) - LEFT_TO_THE_CLIENT
    assert sent | others <= {row.name for row in fields_of(body_of(path))}


@pytest.mark.parametrize("path", FATES)
def test_a_field_changes_its_fate_only_where_somebody_decides_it(path: str) -> None:
    body = body_of(path)
    fates = [{row.name for row in fields_of(body) if row.fate is fate} for fate in (Fate.IGNORED, Fate.REFUSED)]
    assert fates == [*FATES[path]]


@pytest.mark.parametrize("path", GENERATING)
def test_a_null_counts_as_left_out_and_a_refused_field_names_itself(path: str) -> None:
    body = body_of(path)
    bare = body.model_validate(GENERATING[path])
    for row in fields_of(body):
        if not row.is_required:
            assert body.model_validate({**GENERATING[path], row.name: None}) == bare, row.name
        for value in VALUES if row.fate is Fate.REFUSED else []:
            with pytest.raises(ValidationError) as caught:
                body.model_validate({**GENERATING[path], row.name: value})
            failure = error_reply(caught.value)
            assert (failure.status, failure.detail.param) == (400, row.name)
            assert failure.detail.message.startswith(f"{row.name} is not supported: ")


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
def test_parts_of_a_request_take_null_and_no_unknown_field_but_in_what_a_model_wrote(body: type[BaseModel]) -> None:
    for path, field in parts_of(body).items():
        kinds = get_args(field.annotation) or (field.annotation,)
        assert field.is_required() or not {type(None), Any}.isdisjoint(kinds), path  # null counts as left out
    owners = {path.rpartition(".")[0] for path in parts_of(body)}
    schemas = {body.__name__: body.model_json_schema(), **body.model_json_schema().get("$defs", {})}
    assert owners == set(schemas)
    lenient = {name for name, schema in schemas.items() if schema.get("additionalProperties") is not False}
    assert lenient == owners & WRITTEN_BY_A_MODEL


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


MANY: list[dict[str, Any]] = [
    *({name: [1] * 10_000} for name in ("messages", "stop", "tools")),
    *({name: {f"x{i}": 1 for i in range(10_000)}} for name in ("logit_bias", "metadata")),
    {"messages": [{"role": "user", "content": [1] * 10_000}]},
    {"structured_outputs": {"choice": [1] * 10_000}},
]


@pytest.mark.parametrize("fields", MANY)
def test_many_wrong_elements_make_few_complaints(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        body_of(CHAT).model_validate_json(json.dumps({"messages": user("a"), **fields}))
    assert caught.value.error_count() <= 4  # one for each form that a field may have
    assert error_reply(caught.value).detail.param == next(iter(fields))


def test_labels_are_as_long_as_openai_has_them() -> None:
    body: dict[str, Any] = {"prompt": "a"}
    fits = {f"{i:064}": "x" * 512 for i in range(16)}
    body_of(COMPLETIONS).model_validate({**body, "metadata": fits, "user": "x" * 512})
    metadata: list[Any] = [{**fits, "one more": "a"}, {"x" * 65: "a"}, {"a": "x" * 513}]
    labels: list[Any] = [{name: "x" * 513} for name in ("user", "safety_identifier", "prompt_cache_key")]
    for wrong in [*({"metadata": each} for each in metadata), *labels]:
        with pytest.raises(ValidationError):
            body_of(COMPLETIONS).model_validate({**body, **wrong})


@pytest.mark.parametrize("body", BODIES)
def test_every_field_of_a_request_is_described(body: type[BaseModel]) -> None:
    for row in fields_of(body):
        assert row.type != "any", row.name
        assert row.description or row.fate is Fate.WORKS, row.name
        assert (row.type == "null") == (row.fate is Fate.REFUSED), row.name
    for path, field in parts_of(body).items():
        for mark in field.metadata:
            assert not isinstance(mark, Refused) or mark.why, path


def test_the_documentations_tables_are_those_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page_with_tables(page, ROUTES) == page, "run python tools/write_api_reference.py"


DOCUMENT: dict[str, Any] = json.loads(json.dumps(openapi_document(ROUTES)))
CONTINUE = {"prompt": "1 + 1 =", "logprobs": 1, "echo": True, "max_tokens": 3}
ANSWER = {"messages": user("Hi!"), "logprobs": True, "top_logprobs": 1, "max_tokens": 3}


SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]


def check(instance: object, reference: str) -> None:
    """Against a schema of the document, in which undeclared fields count as mistakes."""
    closed = {name: {"additionalProperties": False, **schema} for name, schema in SCHEMAS.items()}
    root = {"$ref": reference, "components": {"schemas": closed}}
    jsonschema_rs.validator_for(root).validate(instance)


def reply_schema(method: str, path: str, kind: str = "application/json", status: str = "200") -> str:
    content = DOCUMENT["paths"][path][method]["responses"][status]["content"][kind]
    found: str = content["x-event" if kind == "text/event-stream" else "schema"]["$ref"]
    return found


def test_the_document_is_valid() -> None:
    openapi_spec_validator.validate(DOCUMENT)
    assert DOCUMENT["openapi"] == "3.1.0"
    for name, schema in SCHEMAS.items():
        assert jsonschema_rs.meta.is_valid({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}), name


async def test_every_route_of_the_application_is_in_it_and_no_other(server: Server) -> None:
    app: web.Application = Api(server.llm).make_app()
    routes = {(route.method.lower(), route.resource.canonical) for route in app.router.routes() if route.resource}
    unlisted = (*PAGE_PATHS, WATCH_PATH)  # the page and its feed are no part of the API
    told = {(method, path) for path, item in DOCUMENT["paths"].items() for method in item}
    assert told == {(method, path) for method, path in routes if method != "head" and path not in unlisted}
    assert len(told) == len(ROUTES)
    assert await get(server, "/openapi.json") == DOCUMENT


def test_operations_have_names_of_their_own_the_error_body_and_ask_for_keys_where_something_is_told() -> None:
    operations = [(path, operation) for path, item in DOCUMENT["paths"].items() for operation in item.values()]
    assert len({operation["operationId"] for _, operation in operations}) == len(operations)
    for _, operation in operations:
        assert operation["summary"]
        errors = {status: reply for status, reply in operation["responses"].items() if status != "200"}
        assert {"400", "401", "404", "413", "429", "500", "503"} <= set(errors)
        for reply in errors.values():
            assert reply["content"]["application/json"]["schema"]["$ref"].endswith("ErrorBody")
    is_open = {path for path, operation in operations if operation["security"] == []}
    assert is_open == {"/health", "/metrics", "/version", "/openapi.json", "/docs"}
    x_api_key = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    ways = {"key": {"type": "http", "scheme": "bearer"}, "x_api_key": x_api_key}
    assert DOCUMENT["components"]["securitySchemes"] == ways


async def test_replies_and_the_events_of_streams_are_as_described(server: Server) -> None:
    asked: dict[str, dict[str, Any]] = {CHAT: ANSWER, COMPLETIONS: CONTINUE}
    for path, body in asked.items():
        check(await post(server, path, {**body, "n": 2}), reply_schema("post", path))
        for chunk in await chunks_of(server, path, {**body, "stream_options": {"include_usage": True}}):
            check(chunk, reply_schema("post", path, "text/event-stream"))
    check(await post(server, "/tokenize", {"prompt": "a"}), reply_schema("post", "/tokenize"))
    check(await post(server, "/detokenize", {"tokens": [65]}), reply_schema("post", "/detokenize"))
    check(await get(server, "/v1/models/bundled"), reply_schema("get", "/v1/models/{model}"))
    for path in ("/v1/models", "/health", "/version"):
        check(await get(server, path), reply_schema("get", path))
    check({"error": await error_of(server, CHAT, {})}, reply_schema("post", CHAT, status="400"))


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
