"""Turns token events into what callers see: deltas, whose text has no stop strings or half characters.

TokenEvent -> OutputProcessor -> GenerationState -> _Choice: Detokenizer -> StopMatcher -> CompletionDelta
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from chairlift.engine.text.deltas import CompletionDelta, RequestDelta
from chairlift.engine.text.detokenizer import Detokenizer, StopMatcher
from chairlift.engine.text.grammar import Thinking
from chairlift.engine.text.inputs import Generation
from chairlift.engine.text.tokenizer import Tokenizer
from chairlift.errors import RequestFailed
from chairlift.params import FinishReason, RequestTimes, TokenLogprobs
from chairlift.prompt_work import PromptResult
from chairlift.scheduler import TokenEvent

logger = logging.getLogger(__name__)


class _Choice:
    """One continuation while it is generated, and what is new of it."""

    def __init__(self, index: int, tokenizer: Tokenizer, generation: Generation) -> None:
        self._index = index
        self._params = generation.params
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, generation.prompt_token_ids)
        self._matcher = StopMatcher(generation.stops)
        self._marks = generation.stops.marks
        text_options = generation.text_options
        self._watcher = None if text_options.new_watcher is None else text_options.new_watcher()
        self._shown = {tokenizer.backend.token_to_id(name): name for name in text_options.shown_tokens}
        self._thinking = text_options.thinking  # None once the thoughts are over
        self._is_thinking = self._thinking is not None and self._thinking.has_begun
        self._num_begun = 0  # of the tokens that begin thoughts, those that came last
        self._is_scored = generation.params.logprobs is not None
        self._num_decoded = 0  # characters, including those that are held back
        self._num_tokens = self._num_reasoning = self._num_drafted = self._num_accepted = 0
        self.finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._error: str | None = None
        self._texts: list[str] = []  # this and the next: new
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._text_offsets: list[int] = []

    def progress(self) -> CompletionDelta:
        """Returns how far it has come, as a delta without news."""
        return CompletionDelta(
            self._index,
            "",
            (),
            (),
            (),
            self._num_tokens,
            self.finish_reason,
            self._stop_reason,
            self._error,
            self._num_reasoning,
            self._num_accepted,
            self._num_drafted - self._num_accepted,
        )

    def take(self) -> CompletionDelta:
        """Returns what is new, which belongs to the caller from now on."""
        delta = self.progress()
        if self._texts:
            delta.text, self._texts = "".join(self._texts), []
        if self._token_ids:
            delta.token_ids, self._token_ids = self._token_ids, []
        if self._logprobs:
            delta.logprobs, self._logprobs = self._logprobs, []
            delta.text_offsets, self._text_offsets = self._text_offsets, []
        return delta

    def add(self, event: TokenEvent) -> bool:
        """Adds the event's tokens. True if the text ended but the engine's sequence did not, and must be aborted."""
        num_shown = len(event.new_token_ids) - event.has_end_token
        self._num_drafted, self._num_accepted = event.num_drafted, event.num_accepted
        for position, token in enumerate(event.new_token_ids):
            self._token_ids.append(token)
            self._num_tokens += 1
            if self._thinking is not None:
                self._think(token, self._thinking)
            if self._is_scored:
                self._logprobs.append(_name(event.logprobs[position], self._tokenizer))
                self._text_offsets.append(self._num_decoded)
            if self._add_text_of(token, is_end=position >= num_shown):
                return event.finish_reason is None
        if event.finish_reason is not None and not self._add(self._detokenizer.finish()):
            self._texts.append(self._matcher.finish())
            self._stop_reason = event.stop_reason
            self._error = event.error
            self.finish_reason = event.finish_reason
        return False

    def _think(self, token: int, thinking: Thinking) -> None:
        """Counts the token if it belongs to the thoughts, which begin in the prompt or with the first tokens."""
        if self._is_thinking:
            self._is_thinking = token != thinking.end_id
            self._num_reasoning += self._is_thinking
            is_over = not self._is_thinking
        else:
            is_next = token == thinking.begin_ids[self._num_begun]
            self._num_begun = self._num_begun + 1 if is_next else int(token == thinking.begin_ids[0])
            self._is_thinking = self._num_begun == len(thinking.begin_ids)
            is_over = not is_next
        if self._is_thinking:
            self._num_begun = 0
        if is_over and not thinking.is_repeated:
            self._thinking = None

    def _add_text_of(self, token: int, is_end: bool) -> bool:
        """Adds the text that this token completes; an end token has none. True as for `_add`."""
        name, mark = None if is_end else self._shown.get(token), self._marks.get(token)
        if name is not None:
            return self._add(self._detokenizer.finish() + name)
        if mark is not None:
            return self._add(self._detokenizer.finish(), mark)
        return not is_end and self._add(self._detokenizer.push(token))

    def _add(self, piece: str, mark: str = "") -> bool:
        """Adds a piece, except for what is held back. True if the text ends here, by a stop string or the watcher.

        `mark`: stands after it for a special token that a stop string spells.
        """
        if not piece and not mark:
            return False
        self._num_decoded += len(piece)
        may_end = self._num_tokens > self._params.min_tokens
        text, stop = self._matcher.push(piece + mark) if may_end else (piece, None)
        if text:
            self._texts.append(text)
        is_over = self._watcher is not None and self._watcher.push(text)
        if not may_end or (stop is None and not is_over):
            return False
        self._stop_reason = stop
        self.finish_reason = FinishReason.STOP
        return True


def _name(logprobs: TokenLogprobs, tokenizer: Tokenizer) -> TokenLogprobs:
    """Sets each token's text."""
    for token, each in logprobs.items():
        each.decoded_token = tokenizer.token_text(token)
    return logprobs


class GenerationState:
    """All continuations of one prompt while they are generated, and what is new of them."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        self.generation = generation
        self._tokenizer = tokenizer
        self._choices = [_Choice(index, tokenizer, generation) for index in range(generation.params.n)]
        task = generation.requests[0].prompt_task
        self._prompt_result = None if task is None else task.beginning()  # new
        self._num_cached_tokens = 0
        self._times: RequestTimes | None = None

    @property
    def is_finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self._choices)

    @property
    def unfinished_ids(self) -> list[str]:
        """Ids of the sequences that the engine may still be working on."""
        return [
            request.request_id
            for request, choice in zip(self.generation.requests, self._choices, strict=True)
            if choice.finish_reason is None
        ]

    def progress(self) -> RequestDelta:
        """Returns how far all continuations have come, as a delta without news."""
        return self._delta([choice.progress() for choice in self._choices], None)

    def take(self) -> RequestDelta:
        """Returns what is new since the last call, which belongs to the caller from now on."""
        result, self._prompt_result = self._prompt_result, None
        return self._delta([choice.take() for choice in self._choices], result)

    def add(self, index: int, event: TokenEvent) -> bool:
        """Adds an event of a choice; see `_Choice.add`. Drops those after the choice's end, which are surplus."""
        if event.prompt_result is not None:
            self._add_result(event.prompt_result)
        if event.times is not None:
            self._times = event.times if self._times is None else self._times.first_of(event.times)
            if index == 0:
                self._num_cached_tokens = event.num_cached_tokens
        choice = self._choices[index]
        return choice.finish_reason is None and choice.add(event)

    def _add_result(self, result: PromptResult) -> None:
        result.name_tokens(self._tokenizer.token_text)
        before = self._prompt_result
        self._prompt_result = result if before is None else before.followed_by(result)

    def _delta(self, choices: list[CompletionDelta], result: PromptResult | None) -> RequestDelta:
        generation = self.generation
        return RequestDelta(
            generation.request_id,
            generation.prompt,
            generation.prompt_token_ids,
            choices,
            result,
            self._num_cached_tokens,
            self._times,
        )


@dataclass(frozen=True, slots=True)
class Delivery:
    """The effects of a batch of events."""

    changed: dict[GenerationState, None] = field(default_factory=dict)  # in order, each once
    to_abort: list[str] = field(default_factory=list)  # sequences that the engine should stop computing
    failed: dict[GenerationState, Exception] = field(default_factory=dict)  # generations that end with an error


class OutputProcessor:
    """Routes events to the generations of their sequences."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._routes: dict[str, tuple[GenerationState, int]] = {}  # the choice's index

    def open(self, generation: Generation) -> GenerationState:
        """Starts routing events to a generation."""
        state = GenerationState(generation, self._tokenizer)
        for index, request in enumerate(generation.requests):
            self._routes[request.request_id] = (state, index)
        return state

    def close(self, state: GenerationState) -> None:
        """Stops routing events to a generation; later ones are dropped."""
        for request in state.generation.requests:
            self._routes.pop(request.request_id, None)

    def process(self, events: Iterable[TokenEvent]) -> Delivery:
        """Routes one step's events."""
        delivery = Delivery()
        for event in events:
            if event.request_id not in self._routes:
                continue
            state, index = self._routes[event.request_id]
            delivery.changed[state] = None
            try:
                if state.add(index, event):
                    delivery.to_abort.append(event.request_id)
            except Exception as error:  # if one text cannot be decoded, the others must continue
                logger.error("detokenizing %s failed", event.request_id, exc_info=error)
                delivery.failed[state] = RequestFailed(f"decoding its text failed: {type(error).__name__}: {error}")
                delivery.to_abort.extend(state.unfinished_ids)
            if event.rejection is not None:
                delivery.failed[state] = event.rejection
        return delivery
