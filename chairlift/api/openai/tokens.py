"""`/tokenize`, `/detokenize` and `/tokenizer_info`, as vLLM has them beside OpenAI's endpoints."""

from typing import Annotated, Self

from aiohttp import web
from pydantic import BaseModel, Field, StrictBool, model_validator

from chairlift.api.endpoints import json_reply
from chairlift.api.jobs import JobMaker
from chairlift.api.openai.rendering import AnyMessage, Rendering
from chairlift.api.routes import Route, at_once
from chairlift.api.service import Service
from chairlift.api.wire.body import LeftOutIfNone, ModelBody, TokenIds
from chairlift.engine.text.inputs import InputProcessor
from chairlift.errors import InvalidRequest


class TokenizeRequest(ModelBody, Rendering):
    """Either a text or a conversation."""

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


class DetokenizeRequest(ModelBody):
    """Tokens to be turned into text."""

    tokens: TokenIds


class DetokenizeReply(BaseModel):
    prompt: str


class AddedToken(BaseModel):
    content: str
    special: bool


class TokenizerInfo(BaseModel):
    """Tells clients what they need to know of the tokenizer beyond what `/tokenize` and `/detokenize` do for them."""

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


def _tokenize(jobs: JobMaker, body: TokenizeRequest) -> TokenizeReply:
    return TokenizeReply.of(jobs.inputs, body)


def _detokenize(jobs: JobMaker, body: DetokenizeRequest) -> DetokenizeReply:
    return DetokenizeReply(prompt=jobs.inputs.decode(body.tokens))


async def _tokenizer_info(service: Service, _: web.Request) -> web.Response:
    return json_reply(TokenizerInfo.of(service.llm.inputs))


_TOKENIZE = "Token ids of a text or of a conversation"
_INFO = "Special tokens and chat template of the tokenizer"
TOKEN_ROUTES = (
    Route(
        "POST", "/tokenize", "tokenize", _TOKENIZE, at_once(TokenizeRequest, _tokenize), TokenizeReply, TokenizeRequest
    ),
    Route(
        "POST",
        "/detokenize",
        "detokenize",
        "The text of token ids",
        at_once(DetokenizeRequest, _detokenize),
        DetokenizeReply,
        DetokenizeRequest,
    ),
    Route("GET", "/tokenizer_info", "tokenizer_info", _INFO, _tokenizer_info, TokenizerInfo),
)
