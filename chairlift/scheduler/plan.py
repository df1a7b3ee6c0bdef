"""What one step is to do, and what came of it.

What is made by the hundred in every step is not frozen: to freeze an object costs more than the rest of making it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from chairlift.errors import QueueTimeout
from chairlift.params import FinishReason, TokenLogprobs
from chairlift.scheduler.request import Request


@dataclass(slots=True)
class RowPlan:
    """One request's share of a step: its next `num_new_tokens` uncomputed tokens."""

    request: Request
    num_new_tokens: int
    is_sampled: bool  # True if the row catches up with all tokens that there are, so that a new one can be sampled


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """The first tokens of one slot also become those of another: keys and values of all layers."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One launch: decode rows first, then prefill rows; `num_steps > 1` only if every row decodes.

    `copies` are made before anything is computed, in their order; each target is the slot of one of the rows.
    """

    rows: tuple[RowPlan, ...]
    num_decode_rows: int
    num_steps: int
    copies: tuple[SlotCopy, ...] = ()

    @property
    def is_decode(self) -> bool:
        """Every row decodes."""
        return self.num_decode_rows == len(self.rows)

    def num_expected(self, row: RowPlan) -> int:
        """Tokens that one of the rows gets if it goes on: one a step, but with a grammar only the first."""
        if not row.is_sampled:
            return 0
        return self.num_steps if row.request.grammar is None else 1


@dataclass(slots=True)
class RowResult:
    """What the model made of one row."""

    token_ids: list[int] = field(default_factory=list)  # one per step of the launch, up to an error
    logprobs: Sequence[TokenLogprobs] = ()  # one per token, if asked for
    prompt_logprobs: Sequence[TokenLogprobs] = ()  # of prompt tokens after those computed
    error: str | None = None  # why no valid token follows those; the other rows are sound


@dataclass(slots=True)
class TokenEvent:
    """New tokens of one request, and its end if it ended."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    error: str | None = None  # why it could not be computed; its finish reason is then ABORT
    has_end_token: bool = False  # the last of the new tokens ended the sequence and is no part of its text
    logprobs: Sequence[TokenLogprobs] = ()  # one per new token, if asked for
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    rejection: QueueTimeout | None = None  # it waited longer than it may, and never got a slot

    @property
    def is_rejected(self) -> bool:
        return self.rejection is not None
