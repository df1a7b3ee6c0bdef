"""What is not generation: models, tokens, health, version."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, StrictBool, model_validator

from chairlift.api.wire.base import Body, LeftOutIfNone, TokenIds
from chairlift.api.wire.messages import AnyMessage, Rendering
from chairlift.errors import InvalidRequest


class TokenizeRequest(Rendering):
    """Either a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[AnyMessage] | None = None  # type: ignore[assignment]  # may be left out here
    add_special_tokens: StrictBool | None = Field(
        None, description="of a text, true if left out; in a conversation the chat template writes them"
    )
    return_token_strs: StrictBool | None = Field(None, description="tell each token's entry in the vocabulary as well")

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


class DetokenizeRequest(Body):
    """Tokens whose text is wanted."""

    model: str | None = None
    tokens: TokenIds


class DetokenizeReply(BaseModel):
    prompt: str


class AddedToken(BaseModel):
    content: str
    special: bool


class TokenizerInfo(BaseModel):
    """What clients need to know of the tokenizer beside what `/tokenize` and `/detokenize` do for them."""

    tokenizer_class: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    added_tokens_decoder: dict[int, AddedToken]
    model_max_length: int


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
