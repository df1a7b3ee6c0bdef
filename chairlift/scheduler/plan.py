"""What one step is to do, and what came of it."""

from dataclasses import dataclass

from chairlift.params import FinishReason
from chairlift.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One request's share of a step: its next `num_new_tokens` uncomputed tokens."""

    request: Request
    num_new_tokens: int
    is_sampled: bool  # True if the row catches up with all known tokens, so that a new one can be sampled


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One launch: decode rows first, then prefill rows; `num_steps > 1` only if every row decodes."""

    rows: tuple[RowPlan, ...]
    num_decode_rows: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New tokens of one request, and its end if it ended."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | None
