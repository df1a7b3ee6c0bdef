"""What is not generation: models, tokens, health, version."""

from typing import Literal, Self

from pydantic import BaseModel, Field, StrictBool, model_validator

from chairlift.api.wire.base import Body, TokenIds
from chairlift.api.wire.messages import ChatMessage, Rendering
from chairlift.errors import InvalidRequest

_OF_CONVERSATIONS = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class TokenizeRequest(Rendering):
    """Either a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None  # type: ignore[assignment]  # may be left out here
    add_special_tokens: StrictBool | None = Field(
        None, description="of a text, true if left out; in a conversation the chat template writes them"
    )

    @model_validator(mode="after")
    def _check_exactly_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages", "prompt")
        return self

    @model_validator(mode="after")
    def _check_rendering(self) -> Self:
        given = [name for name in _OF_CONVERSATIONS if getattr(self, name) is not None]
        if self.prompt is not None and given:
            raise InvalidRequest(f"{given[0]} goes with messages, not with prompt", given[0])
        return self


class TokenizeReply(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeRequest(Body):
    """Tokens whose text is wanted."""

    model: str | None = None
    tokens: TokenIds


class DetokenizeReply(BaseModel):
    prompt: str


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "chairlift"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class Version(BaseModel):
    version: str
