"""Recorded traffic to replay: when requests came, how long prompts and replies were, which beginnings were shared.

The fields are those of the Mooncake traces (https://github.com/kvcache-ai/Mooncake), one JSON object per line:
`timestamp` (milliseconds since the trace began), `input_length`, `output_length` (tokens), and `hash_ids`, which may be
left out: one id for each block of 512 prompt tokens, equal where two prompts begin with the same blocks. Other fields
are not looked at.
"""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from chairlift.bench.failures import BenchError
from chairlift.bench.json_lines import read_json_lines
from chairlift.bench.records import MS_PER_S

BLOCK_TOKENS = 512

Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
NumTokens = Annotated[int, Field(ge=1, strict=True)]
BlockId = Annotated[int, Field(ge=0, strict=True)]


class TraceLine(BaseModel):
    """One request of a trace."""

    model_config = ConfigDict(frozen=True)

    timestamp: Milliseconds
    input_length: NumTokens
    output_length: NumTokens
    hash_ids: tuple[BlockId, ...] = ()


def read_trace(path: Path, num_requests: int | None) -> list[TraceLine]:
    """The first `num_requests` of a trace, or all, in order of time. Raises `BenchError` if it has not so many."""
    lines = sorted(read_json_lines(path, TraceLine), key=lambda line: line.timestamp)
    if num_requests is not None and num_requests > len(lines):
        raise BenchError(f"{path} has {len(lines)} requests, not {num_requests}: lower --num-requests or leave it out")
    return lines[:num_requests]


def trace_offsets(lines: list[TraceLine], speedup: float) -> list[float]:
    """Seconds after the first request at which each is due, the recorded time passing `speedup` times as fast."""
    return [(line.timestamp - lines[0].timestamp) / MS_PER_S / speedup for line in lines]
