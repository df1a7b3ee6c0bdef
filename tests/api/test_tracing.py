"""Spans of requests for tokens, exported to memory by OpenTelemetry's own SDK; and none where it is not configured."""

import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from tests.api.conftest import Server, in_loop
from tests.api.contract import CHAT, COMPLETIONS, post, user
from tests.api.fault_support import connect, serving
from tests.support.server_process import start_python

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
BODY = {"prompt": [5, 6, 7, 8], "max_tokens": 6, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """The spans of a provider that is everybody's as long as the test lasts."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter
    provider.shutdown()


@in_loop
async def traced(exporter: InMemorySpanExporter) -> AsyncIterator[Server]:  # noqa: ARG001
    async with serving(max_queue_size=0) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_a_span_under_the_clients_with_what_the_conventions_name(
    traced: Server, exporter: InMemorySpanExporter, stream: bool
) -> None:
    headers = {**PARENT, "X-Request-Id": "mine"}
    async with aiohttp.ClientSession(headers=headers) as http:
        await (await http.post(traced.url + COMPLETIONS, json={**BODY, "stream": stream})).read()
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.kind, span.status.is_unset) == ("text_completion bundled", trace.SpanKind.SERVER, True)
    assert span.parent
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE_ID, PARENT_ID)
    attributes: dict[str, Any] = dict(span.attributes or {})
    assert str(attributes.pop("gen_ai.response.id")).startswith("cmpl-")
    first: Any = attributes.pop("gen_ai.response.time_to_first_chunk")
    assert 0 <= attributes.pop("chairlift.queue_seconds") < first
    assert attributes == {
        "http.request.method": "POST",
        "http.route": COMPLETIONS,
        "http.response.status_code": 200,
        "chairlift.request_id": "mine",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "chairlift",
        "gen_ai.request.model": "bundled",
        "gen_ai.request.stream": stream,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 6,
    }


async def test_a_conversation_is_a_chat_and_holds_no_text(traced: Server, exporter: InMemorySpanExporter) -> None:
    await post(traced, CHAT, {"messages": user("What is 17 + 25?"), "temperature": 0})
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.parent) == ("chat bundled", None)
    assert "17 + 25" not in str(span.attributes)
    assert "42" not in str(dict(span.attributes or {}).get("gen_ai.output.messages", ""))


@pytest.mark.parametrize("header", [b"baggage: a=\xff", b"traceparent: \xff", b"tracestate: \xff=\xff", b"baggage: %"])
async def test_headers_that_cannot_be_read_begin_a_new_trace(
    traced: Server, exporter: InMemorySpanExporter, header: bytes
) -> None:
    async with await connect(traced.url) as client:
        body = json.dumps(BODY).encode()
        lead = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
        client.send(lead.encode() + header + f"\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        head, _ = await client.answer()
    assert head.startswith("HTTP/1.1 200 ")
    (span,) = exporter.get_finished_spans()
    assert span.parent is None


async def test_only_what_is_the_servers_fault_is_an_error(traced: Server, exporter: InMemorySpanExporter) -> None:
    await post(traced, COMPLETIONS, {"nonsense": 1}, status=400)
    await post(traced, "/tokenize", {"prompt": "a"})
    traced.api.is_draining = True
    await post(traced, COMPLETIONS, BODY, status=503)
    refused, down = exporter.get_finished_spans()
    assert (refused.attributes or {})["http.response.status_code"] == 400
    assert refused.status.is_unset
    assert down.status.status_code is trace.StatusCode.ERROR
    assert (down.attributes or {})["error.type"] == "503"


def test_where_nobody_has_configured_it_nothing_of_it_is_imported() -> None:
    code = (
        "import sys; from chairlift.api.telemetry.traces import Tracing; import chairlift.api.app;"
        "assert Tracing('m')._tracer is None; sys.exit('opentelemetry' in sys.modules)"
    )
    assert start_python(code, [], os.environ, sys.stderr.fileno()).wait(60) == 0


async def test_a_provider_that_stands_for_none_costs_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    async with serving() as server:
        monkeypatch.setattr(trace, "get_tracer", lambda *_: pytest.fail("a tracer was asked for"))
        await post(server, COMPLETIONS, BODY)
