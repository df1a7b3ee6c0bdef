"""The plan of one step, and its results.

Objects made by the hundred in every step are not frozen: a frozen one takes more than twice as long to make.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from chairlift.errors import QueueFull, QueueTimeout
from chairlift.params import FinishReason, RequestTimes, TokenLogprobs
from chairlift.scheduler.drafting import NO_GUESS, Guess
from chairlift.scheduler.placement import Placement
from chairlift.scheduler.request import RequestState


@dataclass(slots=True)
class RowPlan:
    """One request's share of a step: its next `num_new_tokens` uncomputed tokens."""

    request: RequestState
    num_new_tokens: int
    is_sampled: bool  # True if the row catches up with all its tokens, so that a new one can be sampled
    # Guessed tokens after its newest one: they are among the new tokens, and a token is sampled after each of them.
    guess: Guess = NO_GUESS

    def take(self, result: "RowResult", num_expected: int, placement: Placement) -> list[int]:
        """Records the row's tokens, and rewinds what was computed for a wrong guess. Returns the tokens that count."""
        if result.is_late:
            placement.step_back(self.request, num_expected)
            return []
        if self.guess.tokens:
            placement.step_back(self.request, num_expected - len(result.token_ids))
        return self.request.accept(result.token_ids, result.error, result.stop_reason)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One launch: decode rows, those with a guess, prefill rows; `num_steps > 1` only if all are decode rows."""

    rows: tuple[RowPlan, ...]
    num_decode_rows: int
    num_steps: int
    # By row: tokens that it gets if it does not end and its whole guess is right.
    num_expected: tuple[int, ...] = ()

    @property
    def is_decode(self) -> bool:
        """Whether every row decodes without a guess."""
        return self.num_decode_rows == len(self.rows)


def share_of(num_tokens: int) -> int:
    """The part of a step's tokens reserved for the prompt begun first, or for waiting ones, so that none starves."""
    return -(-num_tokens // 4)


class NextStep:
    """The step being planned, and the number of tokens it may still compute. Used by one call of `schedule`."""

    def __init__(self, num_tokens: int) -> None:
        self.num_left = num_tokens
        self.decode: list[RowPlan] = []
        self.guessing: list[RowPlan] = []
        self._chunks: dict[RequestState, int] = {}  # prompts' tokens in this step

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens that are planned."""
        return sum(self._chunks.values())

    def add_prompt(self, request: RequestState, num_kept: int = 0) -> None:
        """Plans more of the request's uncomputed tokens, as many as leave `num_kept` tokens of the budget."""
        num_planned = self._chunks.get(request, 0)
        num_new = min(request.num_uncomputed - num_planned, self.num_left - num_kept)
        if num_new > 0:
            self.num_left -= num_new
            self._chunks[request] = num_planned + num_new

    def go_on(self, begun: list[RequestState], placement: Placement, num_kept: int) -> None:
        """Adds chunks of prompts that have slots and wait for no leader; leaves `num_kept` tokens of the budget.

        The prompt begun first gets its share in any case. Then prompts come by priority, and within a priority by the
        fewest tokens to compute.
        """
        if not self.num_left:
            return
        for request in begun:
            if request.leader is not None:
                placement.follow(request)
        ready = [request for request in begun if request.leader is None]
        for request in ready[:1]:
            self.add_prompt(request, self.num_left - share_of(self.num_left))
        for request in sorted(ready, key=lambda each: (each.options.priority, each.num_uncomputed)):
            self.add_prompt(request, num_kept)

    def finish(self, max_steps: int, max_seq_len: int) -> StepPlan:
        """The plan: of at most `max_steps` steps, fewer if a slot lacks room for them or all rows end sooner."""
        num_steps = 1
        if max_steps > 1 and self.decode and not self.guessing:
            requests = [row.request for row in self.decode]
            room = max_seq_len - max(request.num_computed for request in requests)
            wanted = max(request.num_remaining for request in requests)
            num_steps = max(1, min(max_steps, room, wanted))  # none is wanted after a prompt that is only scored
        chunks = [RowPlan(each, num_new, num_new == each.num_uncomputed) for each, num_new in self._chunks.items()]
        rows = (*self.decode, *self.guessing, *chunks)
        expected = [num_steps if row.is_sampled else 0 for row in rows]
        for index, row in enumerate(self.guessing, len(self.decode)):
            expected[index] = row.num_new_tokens
        return StepPlan(rows, len(self.decode), num_steps, tuple(expected))


@dataclass(slots=True)
class RowResult:
    """The result of one row."""

    token_ids: list[int] = field(default_factory=list)  # one per step of the launch, up to an error
    logprobs: Sequence[TokenLogprobs] = ()  # one per token, if asked for
    prompt_logprobs: Sequence[TokenLogprobs] = ()  # of the prompt tokens that follow those computed
    error: str | None = None  # why no valid token follows these; the other rows are sound
    stop_reason: str | None = None  # of an error: GRAMMAR_LIMIT if the client can avoid it
    is_late: bool = False  # its mask was late: it has no token yet, and must be computed again
    has_bad_surplus: bool = False  # what was computed beyond these tokens may be NaN


@dataclass(slots=True)
class TokenEvent:
    """New tokens of one request, and its end if it ended."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    error: str | None = None  # why it failed; its finish reason is then ABORT
    has_end_token: bool = False  # the last of the new tokens ended the sequence and is no part of its text
    logprobs: Sequence[TokenLogprobs] = ()  # one per new token, if asked for
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    rejection: QueueTimeout | QueueFull | ValueError | None = None  # why it never gets a slot
    # of each token, since the one before it; tokens of a launch share its time. None: these are the first
    token_seconds: float | None = field(default=None, compare=False)
    # set with the first tokens, and with the end
    times: RequestTimes | None = field(default=None, compare=False)
    num_prompt_tokens: int = field(default=0, compare=False)
    num_cached_tokens: int = field(default=0, compare=False)  # prompt tokens reused when it got its first slot
    # so far: guessed tokens that were verified, and those of them that are in the answer
    num_drafted: int = field(default=0, compare=False)
    num_accepted: int = field(default=0, compare=False)

    @classmethod
    def of(cls, request: RequestState, kept: list[int], result: RowResult, now: float) -> Self:
        """Makes the event of a result: its `kept` tokens, whose time this records, and the end if there is one."""
        last, is_first, token_seconds = request.last_token_time, False, None
        if kept:
            request.last_token_time = now
            if last is None:
                is_first, request.first_token_time = True, now
            else:
                token_seconds = (now - last) / len(kept)
        event = cls(
            request.request_id,
            kept,
            request.finish_reason,
            request.stop_reason,
            request.error,
            request.has_end_token,
            result.logprobs and result.logprobs[: len(kept)],
            result.prompt_logprobs,
            None,
            token_seconds,
        )
        if is_first or request.finish_reason is not None:
            event.times, event.num_prompt_tokens = request.times, request.num_prompt_tokens
            event.num_cached_tokens = request.num_cached_tokens
        if request.drafter is not None:
            event.num_drafted, event.num_accepted = request.num_drafted, request.num_accepted
        return event
