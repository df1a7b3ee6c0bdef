"""What one step is to do, and what came of it."""

from dataclasses import dataclass, field

from chairlift.params import FinishReason, TokenLogprobs
from chairlift.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One request's share of a step: its next `num_new_tokens` uncomputed tokens."""

    request: Request
    num_new_tokens: int
    is_sampled: bool  # True if the row catches up with all tokens that there are, so that a new one can be sampled


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One launch: decode rows first, then prefill rows; `num_steps > 1` only if every row decodes."""

    rows: tuple[RowPlan, ...]
    num_decode_rows: int
    num_steps: int

    @property
    def is_decode(self) -> bool:
        """Every row decodes."""
        return self.num_decode_rows == len(self.rows)

    def num_expected(self, row: RowPlan) -> int:
        """Tokens that one of the rows gets if it goes on: one a step, but with a grammar only the first."""
        if not row.is_sampled:
            return 0
        return self.num_steps if row.request.grammar is None else 1


@dataclass(frozen=True, slots=True)
class RowResult:
    """What the model made of one row."""

    token_ids: list[int] = field(default_factory=list)  # one per step of the launch, up to an error
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token, if asked for
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of prompt tokens after those computed
    error: str | None = None  # why no valid token follows those; the other rows are sound


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New tokens of one request, and its end if it ended."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | None = None
    error: str | None = None  # why it could not be computed; its finish reason is then ABORT
    has_end_token: bool = False  # the last of the new tokens ended the sequence and is no part of its text
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per new token, if asked for
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
