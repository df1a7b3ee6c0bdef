"""The log-probability of a token, as chat completions and responses have it."""

from typing import Annotated

from pydantic import (
    PlainSerializer,
)
from typing_extensions import TypedDict

from chairlift.api.wire.body import let_others_run


class TopLogprob(TypedDict):
    """A token that might have stood there. No model: a reply may hold hundreds of thousands."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: Annotated[list[TopLogprob], PlainSerializer(let_others_run, return_type=list[TopLogprob])]
