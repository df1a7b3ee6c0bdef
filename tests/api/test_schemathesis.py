"""Requests made up from /openapi.json, and around it: no 5xx, no hang, replies as declared, errors in OpenAI's body.

With `--hypothesis-profile=ci` also every boundary value of every field, some three thousand requests.
"""

import copy
import json
import re
import socket
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from chairlift.api.app import ROUTES
from chairlift.api.description import openapi_document
from tests.support.events import EventReader
from tests.support.server_process import SERVE, Process, running

IS_LARGE_RUN = settings().max_examples > 100
FAR_OUT = 1000  # limits beyond it are not tried: bodies of that size take long to make up
DEADLINE_S = 20.0
LAST_EVENTS = {"response.completed", "response.incomplete", "message_stop"}
OF_WHAT_IS_MADE_UP = {
    *("GET /v1/models/{model}", "GET /v1/responses/{id}", "DELETE /v1/responses/{id}"),
    *("POST /v1/files", "GET /v1/files/{id}", "GET /v1/files/{id}/content", "DELETE /v1/files/{id}"),
    *("POST /v1/batches", "GET /v1/batches/{id}", "POST /v1/batches/{id}/cancel"),
}

HELLO = {"messages": [{"role": "user", "content": "Hello!"}]}
# Without these hardly any made-up request would be answered, and only refusals would be tested.
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**HELLO, "max_tokens": 5},
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 5},
    "/v1/responses": {"input": "Hello!", "max_output_tokens": 16},
    "/v1/messages": {**HELLO, "max_tokens": 5},
    "/v1/messages/count_tokens": HELLO,
    "/v1/embeddings": {"input": ["Hello!", "Ho!"], "dimensions": 4},
    "/v1/rerank": {"query": "Hi", "documents": ["Ho", {"text": "He"}]},
    "/v1/score": {"text_1": "Hi", "text_2": ["Ho", "He"]},
    "/v1/batches": {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/tokenize": {"prompt": "Hello!"},
    "/detokenize": {"tokens": [72, 105]},
}


def forget_far_limits(node: Any) -> None:
    if isinstance(node, dict):
        for name in ("maxItems", "maxLength"):
            if isinstance(node.get(name), int) and node[name] > FAR_OUT:
                del node[name]
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        forget_far_limits(child)


OTHER_NAMES = ("/v2/rerank", "/rerank", "/score")  # of endpoints that are there under another path

described = copy.deepcopy(openapi_document(ROUTES))
for path in OTHER_NAMES:
    described["paths"].pop(path, None)
forget_far_limits(described)
for path, operations in described["paths"].items():
    if "requestBody" in operations.get("post", {}):
        operations["post"]["requestBody"]["content"]["application/json"]["example"] = EXAMPLES[path]
schema = schemathesis.openapi.from_dict(described)
schema.config.phases.coverage.enabled = IS_LARGE_RUN
schema.config.max_stream_events = 10_000  # all of them
schema.config.generation.with_security_parameters = False  # the server asks for no key
schema.config.checks.negative_data_rejection.expected_statuses.extend(["413", "415"])  # refusals, too


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    """The real server, with slots so short that no answer takes long. It must not log an error."""
    limits = ("--max-seq-len", "48", "--max-batch-size", "4", "--max-queue-size", "2", "--max-body-bytes", "300000")
    with running(SERVE, *limits) as process:
        yield process
        process.popen.terminate()
        assert process.exit_code() == 0
        assert [line for line in process.log if " ERROR " in line or " CRITICAL " in line] == []


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    """One connection for all."""
    with requests.Session() as session:
        yield session


@pytest.fixture(scope="module")
def statuses() -> Iterator[dict[str, set[int]]]:
    """Yields what each operation answered. At the end each must have answered something good as well."""
    seen: dict[str, set[int]] = defaultdict(set)
    yield seen
    assert {label for label, found in seen.items() if 200 not in found} <= OF_WHAT_IS_MADE_UP


def check_error_body(body: Any) -> None:
    if body.get("type") == "error":  # Anthropic's shape
        assert set(body) == {"type", "error", "request_id"}
        assert set(body["error"]) - {"details"} == {"message", "type"}
    else:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
    assert all(body["error"][name] for name in ("message", "type"))


def check_stream(content: bytes) -> None:
    """Every event is JSON, and the last one says that it is the last."""
    *events, last = EventReader().feed(content)
    parsed = [json.loads(event) for event in events]
    assert not any("error" in event for event in parsed if "type" not in event)
    assert last == b"[DONE]" or json.loads(last)["type"] in LAST_EVENTS


def ran_out_of_time(response: Any) -> bool:
    """As a request may that asks for a `timeout` of next to nothing."""
    error = response.json()["error"] if response.status_code == 503 else {}
    return error.get("code") == "queue_timeout" or error.get("type") == "overloaded_error"


@schema.parametrize()
@settings(max_examples=5, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_whatever_the_description_allows_or_not_is_answered_as_it_says(
    case: schemathesis.Case[Any], process: Process, session: requests.Session, statuses: dict[str, set[int]]
) -> None:
    response = case.call(base_url=process.url, session=session, timeout=DEADLINE_S)
    statuses[case.operation.label].add(response.status_code)
    is_stream = response.headers.get("content-type", [""])[0].startswith("text/event-stream")
    checks = [status_code_conformance, content_type_conformance, negative_data_rejection]
    checks += [] if ran_out_of_time(response) else [not_a_server_error]
    # The description of a stream gives the shape of each event's data, which is not what this check takes it for.
    checks += [unsupported_method] + ([] if is_stream else [response_schema_conformance])
    case.validate_response(response, checks=checks)
    if is_stream:
        check_stream(response.content)
    elif response.status_code >= 400:
        check_error_body(response.json())


@pytest.mark.parametrize("path", ["/v1", "/v1/nothing", "/v2/models", "/%00", "/v1/models/", "/..%2f..%2fetc", "//"])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_an_unknown_path_is_a_404_with_an_error_body(process: Process, method: str, path: str) -> None:
    response = httpx.request(method, process.url + path, timeout=DEADLINE_S)
    assert response.status_code == 404
    check_error_body(response.json())


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_an_unknown_method_is_a_405_that_names_the_right_one(process: Process, route: Any) -> None:
    path = re.sub("{.*}", "bundled", route.path)
    known = {each.method for each in ROUTES if each.path == route.path}
    for method in {"GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"} - known:
        response = httpx.request(method, process.url + path, timeout=DEADLINE_S)
        assert response.status_code == 405
        assert route.method in re.split(", ?", response.headers["Allow"])
        check_error_body(response.json())


POST, HEALTH = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
JSON = POST + b"Content-Type: application/json\r\n"
NO_HTTP = {
    "rubbish": b"rubbish\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "version": b"GET /health HTTP/9.9\r\n\r\n",
    "header": HEALTH + b"no header\r\n\r\n",
    "length": POST + b"Content-Length: many\r\n\r\n",
    "negative length": POST + b"Content-Length: -1\r\n\r\n",
    "two lengths": JSON + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "chunks": JSON + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
    "long path": b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "long header": HEALTH + b"Long: " + b"a" * 20_000 + b"\r\n\r\n",
    "expectation": POST + b"Connection: close\r\nExpect: miracles\r\nContent-Length: 2\r\n\r\n{}",
}


@pytest.mark.parametrize("name", NO_HTTP)
def test_what_is_no_http_has_an_error_body_and_ends_the_connection(process: Process, name: str) -> None:
    with socket.create_connection(("127.0.0.1", process.port), DEADLINE_S) as connection:
        connection.sendall(NO_HTTP[name])
        received = b"".join(iter(lambda: connection.recv(2**16), b""))
    head, _, body = received.partition(b"\r\n\r\n")
    assert re.match(rb"HTTP/1\.[01] 417 " if name == "expectation" else rb"HTTP/1\.[01] 400 ", head)
    check_error_body(json.loads(body))
