"""Reads what a test replays: traces of requests and conversations, files with one JSON object per line.

A trace has the fields of the Mooncake traces (https://github.com/kvcache-ai/Mooncake): `timestamp` (milliseconds),
`input_length`, `output_length` (tokens), and optionally `hash_ids`: one id for each block of 512 prompt tokens, equal
where two prompts begin with the same blocks. A conversation is `{"messages": [{"role": "user", "content": "Hi"}]}`,
optionally with `output_tokens`, the length of its replies. Other fields are ignored; a message is sent with all its
fields.
"""

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, PositiveInt, ValidationError

from chairlift.loadtest.records import MS_PER_S, BenchError, one_line

BLOCK_TOKENS = 512

Message = dict[str, Any]
Line = TypeVar("Line", bound=BaseModel)
NumTokens = Annotated[int, Field(ge=1, strict=True)]
BlockId = Annotated[int, Field(ge=0, strict=True)]


class TraceLine(BaseModel, frozen=True):
    """One request of a trace."""

    timestamp: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    input_length: NumTokens
    output_length: NumTokens
    hash_ids: tuple[BlockId, ...] = ()


class ConversationLine(BaseModel, frozen=True):
    """One conversation. Other fields of a message are left to the server."""

    messages: list[Message]
    output_tokens: PositiveInt | None = None

    @property
    def turns(self) -> list[list[Message]]:
        """Splits the messages into turns, which end with one of the user. The assistant's are left out."""
        turns: list[list[Message]] = [[]]
        for message in self.messages:
            if message.get("role") != "assistant":
                turns[-1].append(message)
            if message.get("role") == "user":
                turns.append([])
        return turns[:-1]


def read_trace(path: Path, num_requests: int | None) -> list[TraceLine]:
    """The first `num_requests` of a trace, or all, in order of time. Raises `BenchError` if there are fewer."""
    lines = sorted(read_json_lines(path, TraceLine), key=lambda line: line.timestamp)
    if num_requests is not None and num_requests > len(lines):
        raise BenchError(f"{path} has {len(lines)} requests, not {num_requests}: lower --num-requests or leave it out")
    return lines[:num_requests]


def trace_offsets(lines: list[TraceLine], speedup: float) -> list[float]:
    """Seconds after the first request at which each is due, the recorded time passing `speedup` times as fast."""
    return [(line.timestamp - lines[0].timestamp) / MS_PER_S / speedup for line in lines]


def read_conversations(path: Path) -> list[ConversationLine]:
    """All lines of the file. Raises `BenchError` if one has no user message."""
    lines = read_json_lines(path, ConversationLine)
    for position, line in enumerate(lines, 1):
        if not line.turns:
            raise BenchError(f"{path}, conversation {position} has no message of role user, so it has no turn")
    return lines


def read_json_lines(path: Path, model: type[Line]) -> list[Line]:
    """Every line that is not blank. Raises `BenchError` if there is none, or one that does not fit the model."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as problem:
        raise BenchError(f"cannot read {path}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise BenchError(f"cannot read {path}: it must be text in UTF-8, one JSON object per line") from None
    # Not `splitlines`: a JSON string may hold such separators as U+2028.
    lines = [_parse(path, number, line, model) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise BenchError(f"{path} is empty: it must have one JSON object per line")
    return lines


def _parse(path: Path, number: int, line: str, model: type[Line]) -> Line:
    try:
        return model.model_validate_json(line)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        where = "".join(f"{part}: " for part in first["loc"])
        raise BenchError(f"{path}, line {number}: {where}{first['msg']}: {one_line(line)}") from None
