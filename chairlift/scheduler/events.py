"""The news of a request for its reader."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from chairlift.errors import QueueFull, QueueTimeout
from chairlift.params import FinishReason, RequestTimes, TokenLogprobs
from chairlift.plan import RowResult
from chairlift.prompt_work import PromptResult
from chairlift.scheduler.request import RequestState


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
    prompt_result: PromptResult | None = None  # of a part of what the request wants of its prompt
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
            result.prompt_result,
            None,
            token_seconds,
        )
        if is_first or request.finish_reason is not None:
            event.times, event.num_prompt_tokens = request.times, request.num_prompt_tokens
            event.num_cached_tokens = request.num_cached_tokens
        if request.drafter is not None:
            event.num_drafted, event.num_accepted = request.num_drafted, request.num_accepted
        return event
