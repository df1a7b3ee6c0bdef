"""The endpoints, once: what the application serves and what /openapi.json and docs/api.md tell."""

from dataclasses import dataclass

from pydantic import BaseModel

from chairlift.api.wire.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from chairlift.api.wire.completions import Completion, CompletionRequest
from chairlift.api.wire.response_object import ResponseObject, ResponsesEvent
from chairlift.api.wire.responses import ResponsesRequest
from chairlift.api.wire.service import (
    DetokenizeReply,
    DetokenizeRequest,
    Health,
    ModelCard,
    ModelList,
    TokenizeReply,
    TokenizeRequest,
    Version,
)


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint; `handler` names a method of `Api`."""

    method: str
    path: str
    handler: str
    summary: str
    reply: type[BaseModel] | None  # None: something else than JSON of a fixed shape
    body: type[BaseModel] | None = None
    chunk: type[BaseModel] | None = None  # of a streamed reply
    is_open: bool = False  # without a key: what load balancers ask, and what tells no secret


ROUTES = (
    Route(
        "POST",
        "/v1/chat/completions",
        "chat_completions",
        "Answer a conversation",
        ChatCompletion,
        ChatCompletionRequest,
        ChatCompletionChunk,
    ),
    Route(
        "POST",
        "/v1/responses",
        "responses",
        "Answer a conversation, in items and named events; nothing is stored",
        ResponseObject,
        ResponsesRequest,
        ResponsesEvent,
    ),
    Route("POST", "/v1/completions", "completions", "Continue texts", Completion, CompletionRequest, Completion),
    Route("GET", "/v1/models", "models", "The models that are served: one", ModelList),
    Route("GET", "/v1/models/{model}", "model", "One model", ModelCard),
    Route("POST", "/tokenize", "tokenize", "Token ids of a text or of a conversation", TokenizeReply, TokenizeRequest),
    Route("POST", "/detokenize", "detokenize", "The text of token ids", DetokenizeReply, DetokenizeRequest),
    Route("GET", "/health", "health", "Whether requests are served: 200 or 503", Health, is_open=True),
    Route("GET", "/metrics", "metrics_text", "Counts and durations for Prometheus", None, is_open=True),
    Route("GET", "/version", "version", "The version of Chairlift", Version, is_open=True),
    Route("GET", "/openapi.json", "openapi", "This description", None, is_open=True),
    Route("GET", "/docs", "docs", "This description for people", None, is_open=True),
)
