"""Files of chat messages: one JSON object per line, `{"messages": [{"role": "user", "content": "Hello"}]}`.

`output_tokens` beside the messages, where given, is the length of that line's replies. Other fields of the object are
not looked at; a message is sent with all its fields.
"""

from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from chairlift.bench.failures import BenchError
from chairlift.bench.json_lines import read_json_lines

Message = dict[str, Any]


class MessageShape(BaseModel):
    """What every message must have: the rest of it is the server's to judge."""

    model_config = ConfigDict(extra="allow")

    role: str


class MessagesLine(BaseModel):
    """One chat."""

    model_config = ConfigDict(frozen=True)

    messages: Annotated[list[MessageShape], Field(min_length=1)]
    output_tokens: PositiveInt | None = None

    @property
    def as_sent(self) -> list[Message]:
        """The messages, with all fields they came with."""
        return [message.model_dump() for message in self.messages]

    @property
    def turns(self) -> list[list[Message]]:
        """What each turn adds: messages up to and with one of the user. Assistants' are left out."""
        turns: list[list[Message]] = [[]]
        for message in self.as_sent:
            if message["role"] == "assistant":
                continue
            turns[-1].append(message)
            if message["role"] == "user":
                turns.append([])
        return turns[:-1]


def read_messages(path: Path, num_requests: int | None) -> list[MessagesLine]:
    """So many lines of the file, from the start again where it has fewer; or all of them."""
    lines = read_json_lines(path, MessagesLine)
    return lines if num_requests is None else list(islice(cycle(lines), num_requests))


def read_conversations(path: Path) -> list[MessagesLine]:
    """All lines of the file. Raises `BenchError` if one has no message of a user."""
    lines = read_json_lines(path, MessagesLine)
    for position, line in enumerate(lines, 1):
        if not line.turns:
            raise BenchError(f"{path}, conversation {position} has no message of role user, so it has no turn")
    return lines
