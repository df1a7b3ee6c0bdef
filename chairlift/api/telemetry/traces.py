"""Traces: a span for each request for tokens.

They go through OpenTelemetry if a tracer provider is set: by `opentelemetry-instrument chairlift serve`, by a program
that embeds the server, or by the variable OTEL_PYTHON_TRACER_PROVIDER. Otherwise nothing of it is imported. Attributes
follow its semantic conventions for HTTP servers and for generative AI; they hold no texts.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aiohttp import web

import chairlift
from chairlift.api.telemetry.observation import Observation, Outcome

if TYPE_CHECKING:  # otherwise it is imported only if it is configured
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer
    from opentelemetry.util.types import AttributeValue

logger = logging.getLogger(__name__)

_PROVIDER_VARIABLE = "OTEL_PYTHON_TRACER_PROVIDER"
_OPERATIONS = {"/v1/completions": "text_completion"} | dict.fromkeys(
    ("/v1/chat/completions", "/v1/responses", "/v1/messages"), "chat"
)
_FAILURES = {Outcome.TIMEOUT, Outcome.ERROR, Outcome.REJECTED}


class Tracing:
    """A span for each request for tokens; none if OpenTelemetry is not configured."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._tracer = _find_tracer()

    @contextmanager
    def span(self, request: web.Request, observation: Observation) -> Iterator[None]:
        """A child of the trace that the client's headers name. At its end it gets the observation's attributes."""
        operation = _OPERATIONS.get(observation.path)
        if self._tracer is None or operation is None:
            yield
            return
        from opentelemetry import trace

        with self._tracer.start_as_current_span(
            f"{operation} {self._model_name}",
            context=_context_of(request),
            kind=trace.SpanKind.SERVER,
            attributes={
                "http.request.method": request.method,
                "http.route": observation.path,
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "chairlift",
                "gen_ai.request.model": self._model_name,
            },
        ) as span:
            try:
                yield
            finally:
                span.set_attributes(_attributes_at_end(observation))
                failure = next((outcome for outcome in observation.outcomes if outcome in _FAILURES), None)
                if observation.status >= 500 or failure is not None:
                    span.set_status(trace.StatusCode.ERROR)
                    span.set_attribute("error.type", failure or str(observation.status))


def _context_of(request: web.Request) -> "Context | None":
    """The trace that the client's headers name; None, which begins a new one, if they cannot be read.

    The propagators for W3C's and other formats raise various exceptions: `baggage: a=\\xff` is a UnicodeEncodeError.
    """
    from opentelemetry import propagate

    try:
        return propagate.extract(request.headers)
    except Exception as error:
        logger.info("a request's trace begins here, because its headers cannot be read: %s", type(error).__name__)
        return None


def _find_tracer() -> "Tracer | None":
    if "opentelemetry" not in sys.modules and _PROVIDER_VARIABLE not in os.environ:
        return None
    from opentelemetry import trace

    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):  # a placeholder: none is set
        return None
    return trace.get_tracer("chairlift", chairlift.__version__)


def _attributes_at_end(observation: Observation) -> "dict[str, AttributeValue]":
    attributes: dict[str, AttributeValue | None] = {
        "http.response.status_code": observation.status,
        "chairlift.request_id": observation.request_id,
        "gen_ai.response.id": observation.reply_id,
        "chairlift.reason": observation.reason,
    }
    if observation.generations:
        params = observation.generations[0].params
        attributes |= {
            "gen_ai.request.stream": observation.is_streamed,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.response.finish_reasons": [str(outcome) for outcome in observation.outcomes],
            "gen_ai.usage.input_tokens": observation.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": observation.num_cached_tokens,
            "gen_ai.usage.output_tokens": sum(observation.output_lengths),
            "gen_ai.response.time_to_first_chunk": observation.first_token_seconds,
            "chairlift.queue_seconds": observation.queue_seconds,
        }
    return {name: value for name, value in attributes.items() if value is not None}
