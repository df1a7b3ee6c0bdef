"""The table of endpoints: what the application serves, what needs no key, and what the API's description says. Above it
are the bodies of endpoints that generate nothing: models, tokens, health, version.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, StrictBool, model_validator

from chairlift.api.errors import MESSAGES_PATH
from chairlift.api.wire.anthropic import CountTokensRequest, MessagesRequest
from chairlift.api.wire.anthropic_message import AnthropicErrorBody, AnthropicMessage, MessagesEvent, TokenCount
from chairlift.api.wire.body import Body, LeftOutIfNone, TokenIds
from chairlift.api.wire.completions import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
)
from chairlift.api.wire.errors import ErrorBody
from chairlift.api.wire.rendering import AnyMessage, Rendering
from chairlift.api.wire.response_object import DeletedResponse, ResponseObject, ResponsesEvent
from chairlift.api.wire.responses import ResponsesRequest
from chairlift.engine.text.inputs import InputProcessor
from chairlift.errors import InvalidRequest


class TokenizeRequest(Rendering):
    """Either a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[AnyMessage] | None = None  # type: ignore[assignment]  # may be left out here
    add_special_tokens: StrictBool | None = Field(
        None,
        description="add special tokens to a text (default: true); the chat template writes those of a conversation",
    )
    return_token_strs: StrictBool | None = Field(None, description="also return each token's entry in the vocabulary")

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages", "prompt")
        given = [name for name in Rendering.model_fields if name != "messages" and getattr(self, name) is not None]
        if self.prompt is not None and given:
            raise InvalidRequest(f"{given[0]} goes with messages, not with prompt", given[0])
        return self


class TokenizeReply(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: Annotated[list[str] | None, LeftOutIfNone] = None

    @classmethod
    def of(cls, inputs: InputProcessor, body: TokenizeRequest) -> Self:
        if body.messages is not None:
            tokens = inputs.encode_chat(body.template_messages(), body.chat_options())
        else:
            tokens = inputs.tokenize(body.prompt or "", body.add_special_tokens is not False)
        strs = inputs.tokenizer.entries(tokens) if body.return_token_strs else None
        return cls(tokens=tokens, count=len(tokens), max_model_len=inputs.max_seq_len, token_strs=strs)


class DetokenizeRequest(Body):
    """Tokens to be turned into text."""

    model: str | None = None
    tokens: TokenIds


class DetokenizeReply(BaseModel):
    prompt: str


class AddedToken(BaseModel):
    content: str
    special: bool


class TokenizerInfo(BaseModel):
    """What clients need to know about the tokenizer in addition to what `/tokenize` and `/detokenize` do for them."""

    tokenizer_class: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    added_tokens_decoder: dict[int, AddedToken]
    model_max_length: int

    @classmethod
    def of(cls, inputs: InputProcessor) -> Self:
        tokenizer = inputs.tokenizer
        template = tokenizer.chat_template or None
        return cls(chat_template=template, model_max_length=inputs.max_seq_len, **tokenizer.describe())


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "chairlift"
    root: str
    parent: None = None
    max_model_len: int
    permission: list[Any] = []


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class Version(BaseModel):
    version: str


# --- the table


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint. With a `chunk` it generates; otherwise `name` is the method of `Api` that handles it."""

    method: str
    path: str
    name: str
    summary: str
    reply: type[BaseModel] | None  # None: not JSON of a fixed shape
    body: type[BaseModel] | None = None
    chunk: type[BaseModel] | None = None  # of a streamed reply
    error: type[BaseModel] = ErrorBody
    is_open: bool = False  # needs no key: load balancers ask for it, or it reveals no secret


_CHAT = "Answer a conversation"
_RESPONSES = "Answer a conversation, in items and named events"
_MESSAGES = "Answer a conversation, in the format of Anthropic's clients"
_COUNT = "Count the tokens of such a conversation's prompt"
_TOKENIZE = "Token ids of a text or of a conversation"
_INFO = "Special tokens and chat template of the tokenizer"
_RESET = "Empty the prefix cache, so that a benchmark starts cold; no body"
_CHAT_SHAPES = (ChatCompletion, ChatCompletionRequest, ChatCompletionChunk)
_RESPONSES_SHAPES = (ResponseObject, ResponsesRequest, ResponsesEvent)
_COUNT_SHAPES = (TokenCount, CountTokensRequest, None, AnthropicErrorBody)
_MESSAGES_SHAPES = (AnthropicMessage, MessagesRequest, MessagesEvent, AnthropicErrorBody)

ROUTES = (
    Route("POST", "/v1/chat/completions", "chat_completions", _CHAT, *_CHAT_SHAPES),
    Route("POST", "/v1/responses", "responses", _RESPONSES, *_RESPONSES_SHAPES),
    Route("GET", "/v1/responses/{id}", "stored_response", "A stored response", ResponseObject),
    Route("DELETE", "/v1/responses/{id}", "delete_response", "Forget a stored response", DeletedResponse),
    Route("POST", MESSAGES_PATH, "messages", _MESSAGES, *_MESSAGES_SHAPES),
    Route("POST", f"{MESSAGES_PATH}/count_tokens", "count_tokens", _COUNT, *_COUNT_SHAPES),
    Route("POST", "/v1/completions", "completions", "Continue texts", Completion, CompletionRequest, Completion),
    Route("GET", "/v1/models", "models", "The served model, under each of its names", ModelList),
    Route("GET", "/v1/models/{model}", "model", "The model under one of its names", ModelCard),
    Route("POST", "/tokenize", "tokenize", _TOKENIZE, TokenizeReply, TokenizeRequest),
    Route("POST", "/detokenize", "detokenize", "The text of token ids", DetokenizeReply, DetokenizeRequest),
    Route("GET", "/tokenizer_info", "tokenizer_info", _INFO, TokenizerInfo),
    Route("POST", "/reset_prefix_cache", "reset_prefix_cache", _RESET, Health),
    Route("GET", "/health", "health", "Whether requests are served: 200 or 503", Health, is_open=True),
    Route("GET", "/metrics", "metrics_text", "Counts and durations for Prometheus", None, is_open=True),
    Route("GET", "/version", "version", "The version of Chairlift", Version, is_open=True),
    Route("GET", "/openapi.json", "openapi", "This description", None, is_open=True),
    Route("GET", "/docs", "docs", "This description for people", None, is_open=True),
)
