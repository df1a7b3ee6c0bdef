"""Server-sent events as they go over the wire."""

from pydantic import BaseModel
from pydantic_core import to_json

DONE = "data: [DONE]\n\n"
BLANK = "\0"  # occurs in no name or id
_DUMPED_BLANK = r'"\u0000"'


class NamedEvent(BaseModel):
    """An event of a stream, named by its type."""

    type: str


def event(payload: BaseModel) -> str:
    """One event, as it goes over the wire."""
    data = f"data: {payload.model_dump_json()}\n\n"
    return f"event: {payload.type}\n{data}" if isinstance(payload, NamedEvent) else data


class TextEvent:
    """An event that is sent repeatedly with different texts: the rest of it is serialized once."""

    def __init__(self, payload: BaseModel) -> None:
        """`payload`: with `BLANK` in place of the text, once or more."""
        self._parts = event(payload).split(_DUMPED_BLANK)

    def of(self, text: str) -> str:
        """The event with this text, as it goes over the wire."""
        return to_json(text).decode().join(self._parts)
