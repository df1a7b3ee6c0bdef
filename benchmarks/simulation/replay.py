"""A workload from a file: the load test's traces, with what a scheduler can tell apart.

The fields are those of `chairlift.bench.trace`, one JSON object per line; these may be left out:
`tenant`, `priority` (lower is served first), `prefix_group` (lines with the same number begin alike) with
`prefix_length` (for how many tokens), and `timeout` (seconds). `hash_ids` stand for shared blocks, as in the load test.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from chairlift.bench.json_lines import read_json_lines
from chairlift.bench.trace import BLOCK_TOKENS, TraceLine, trace_offsets
from simulation.workload import Conversation, Prefix, Turn

_FIRST_BLOCK = 2**13  # families below are prefix groups, blocks come after them


class WorkloadLine(TraceLine):
    """One request of a workload file."""

    tenant: str = ""
    priority: Annotated[int, Field(strict=True)] = 0
    prefix_group: Annotated[int, Field(ge=0, lt=_FIRST_BLOCK, strict=True)] | None = None
    prefix_length: Annotated[int, Field(ge=0, strict=True)] = 0
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _check_prefix(self) -> Self:
        if self.prefix_length and self.prefix_group is None:
            raise ValueError("prefix_length needs a prefix_group")
        if self.prefix_length and self.hash_ids:
            raise ValueError("give hash_ids or a prefix_group, not both")
        if self.prefix_length > self.input_length:
            raise ValueError(f"prefix_length {self.prefix_length} is more than input_length {self.input_length}")
        return self


def read_workload(path: Path, slot_tokens: int, num_requests: int | None, speedup: float) -> list[Conversation]:
    """The first `num_requests` of the file, or all, in order of time, which passes `speedup` times as fast.

    `BenchError` tells a bad line's number and text; `ValueError` what does not fit into a slot.
    """
    lines = sorted(read_json_lines(path, WorkloadLine), key=lambda line: line.timestamp)[:num_requests]
    longest = max(line.input_length + line.output_length for line in lines)
    if longest > slot_tokens:
        raise ValueError(f"{path} has a request of {longest} tokens: raise --slot-tokens, which is {slot_tokens}")
    if not speedup > 0:
        raise ValueError(f"--speedup must be above 0, not {speedup:g}")
    offsets = trace_offsets(list(lines), speedup)
    return [_conversation(line, offset) for line, offset in zip(lines, offsets, strict=True)]


def _conversation(line: WorkloadLine, arrival: float) -> Conversation:
    prefixes = tuple(_prefixes(line))
    num_own = line.input_length - sum(prefix.num_tokens for prefix in prefixes)
    turn = Turn(num_own, line.output_length, line.output_length, timeout=line.timeout)
    return Conversation(arrival, (turn,), line.tenant, line.priority, prefixes)


def _prefixes(line: WorkloadLine) -> Iterator[Prefix]:
    if line.prefix_group is not None and line.prefix_length:
        yield Prefix(line.prefix_group, line.prefix_length)
    num_left = line.input_length
    for block in line.hash_ids:
        if num_left:
            yield Prefix(_FIRST_BLOCK + block, min(BLOCK_TOKENS, num_left))
            num_left -= min(BLOCK_TOKENS, num_left)
