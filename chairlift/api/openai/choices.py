"""The parts that chat completions and completions share."""

from typing import Annotated

from pydantic import (
    BaseModel,
)

from chairlift.api.wire.body import LeftOutIfNone, WholeReply
from chairlift.api.wire.usage import Usage


class PromptLogprob(BaseModel):
    """A token of the prompt, or one that might have stood there."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""At each position by token id: the prompt's token, then the likeliest ones; None for the first position."""


class Choice(BaseModel):
    """One answer, or what is new of it."""

    index: int
    stop_reason: int | str | None = None
    token_ids: Annotated[list[int] | None, LeftOutIfNone] = None


class ChoicesBody(WholeReply):
    """A whole reply, or one chunk of a streamed one."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None = None
    usage: Annotated[Usage | None, LeftOutIfNone] = None
