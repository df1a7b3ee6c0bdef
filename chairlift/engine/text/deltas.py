"""Carries what generations gain, as values: a delta is handed over to one reader, and nobody changes it then.

Text and tokens add up only where somebody needs them whole: in a `RequestOutput`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from chairlift.engine.text.inputs import Generation
from chairlift.errors import RequestFailed
from chairlift.params import CompletionOutput, FinishReason, RequestOutput, RequestTimes, TokenLogprobs
from chairlift.prompt_work import PromptResult, scores_in


@dataclass(slots=True)
class CompletionDelta:
    """One continuation: what is new of it since the last delta, and how far it has come.

    Not frozen: every step makes hundreds, and a frozen instance takes more than twice as long to make.
    """

    index: int
    # New since the last delta. The scores are empty unless the request asks for log-probabilities.
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    text_offsets: Sequence[int]  # where in the whole text each token's characters begin
    # As of now; see `CompletionOutput`.
    num_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_reasoning_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0

    def followed_by(self, later: Self) -> Self:
        """Returns one delta for this and a later one."""
        return replace(
            later,
            text=self.text + later.text,
            token_ids=[*self.token_ids, *later.token_ids],
            logprobs=[*self.logprobs, *later.logprobs],
            text_offsets=[*self.text_offsets, *later.text_offsets],
        )

    def cut(self, num_tokens: int) -> tuple[Self, Self]:
        """Returns the delta with its text and its first tokens only, and one with the other tokens and no text."""
        first, others = slice(num_tokens), slice(num_tokens, None)
        return self._part(self.text, first), self._part("", others)

    def _part(self, text: str, part: slice) -> Self:
        tokens, logprobs, offsets = self.token_ids[part], self.logprobs[part], self.text_offsets[part]
        return replace(self, text=text, token_ids=tokens, logprobs=logprobs, text_offsets=offsets)


@dataclass(slots=True)
class RequestDelta:
    """A request: all its continuations, changed or not. Its first delta and all later ones add up to the output."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    choices: list[CompletionDelta]
    prompt_result: PromptResult | None = None  # what is new of it since the last delta
    num_cached_tokens: int = 0
    times: RequestTimes | None = None

    @property
    def finished(self) -> bool:
        """True if all continuations have ended."""
        return all(choice.finish_reason is not None for choice in self.choices)

    def check_result(self) -> None:
        """Raises `RequestFailed` if it ended without what was wanted of its prompt alone."""
        (choice,) = self.choices
        if choice.error is not None or self.prompt_result is None:
            reason = choice.error or f"it was ended before it was computed: {choice.stop_reason or 'aborted'}"
            raise RequestFailed(reason)


class CumulativeOutput:
    """Adds up the deltas of a request."""

    def __init__(self, generation: Generation) -> None:
        params = generation.params
        self._choices = [_CumulativeChoice(index, params.logprobs is not None) for index in range(params.n)]
        self._output = RequestOutput(
            generation.request_id,
            generation.prompt,
            generation.prompt_token_ids,
            [choice.output for choice in self._choices],
            prompt_logprobs=None if params.prompt_logprobs is None else [],
        )

    def add(self, delta: RequestDelta) -> RequestOutput:
        """Adds a delta, and returns the output so far, which later deltas do not change."""
        for choice, news in zip(self._choices, delta.choices, strict=True):
            choice.add(news)
        if self._output.prompt_logprobs is not None:
            self._output.prompt_logprobs += scores_in(delta.prompt_result)
        self._output.num_cached_tokens, self._output.times = delta.num_cached_tokens, delta.times
        return self._output.copy()


class _CumulativeChoice:
    """Adds up the deltas of one continuation."""

    def __init__(self, index: int, is_scored: bool) -> None:
        self._logprobs: list[TokenLogprobs] = []
        self._text_offsets: list[int] = []
        self.output = CompletionOutput(index)  # it grows; see `RequestOutput.copy`
        if is_scored:
            self.output.logprobs, self.output.text_offsets = self._logprobs, self._text_offsets

    def add(self, delta: CompletionDelta) -> None:
        output = self.output
        if output.finish_reason is not None:  # another choice has changed
            return
        output.text += delta.text
        output.token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._text_offsets += delta.text_offsets
        output.finish_reason, output.stop_reason, output.error = delta.finish_reason, delta.stop_reason, delta.error
        output.num_reasoning_tokens = delta.num_reasoning_tokens
        output.num_accepted_tokens, output.num_rejected_tokens = delta.num_accepted_tokens, delta.num_rejected_tokens
