"""From token events to what callers see: cumulative `RequestOutput`s with text and finish reasons."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from chairlift.engine.detokenizer import Detokenizer, StopMatcher
from chairlift.engine.inputs import Generation
from chairlift.engine.tokenizer import Tokenizer
from chairlift.errors import QueueTimeout, RequestFailed
from chairlift.params import CompletionOutput, FinishReason, Logprob, RequestOutput, SamplingParams, TokenLogprobs
from chairlift.scheduler import TokenEvent

logger = logging.getLogger(__name__)


class _Choice:
    """One continuation while it grows."""

    def __init__(self, index: int, tokenizer: Tokenizer, generation: Generation) -> None:
        self._params: SamplingParams = generation.params
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, generation.prompt_token_ids)
        self._matcher = StopMatcher(generation.params.stop)
        self._num_decoded = 0  # characters, also those that are held back
        is_scored = generation.params.logprobs is not None
        self.output = CompletionOutput(
            index, logprobs=[] if is_scored else None, text_offsets=[] if is_scored else None
        )

    def take(self, event: TokenEvent) -> bool:
        """Adds the event's tokens. True if a stop string ended the text, of which the engine does not know yet."""
        num_shown = len(event.new_token_ids) - event.has_end_token
        for position, token in enumerate(event.new_token_ids):
            self.output.token_ids.append(token)
            if self.output.logprobs is not None and self.output.text_offsets is not None:
                self.output.logprobs.append(_named(event.logprobs[position], self._tokenizer))
                self.output.text_offsets.append(self._num_decoded)
            if position < num_shown and self._add(self._detokenizer.push(token)):
                return event.finish_reason is None
        if event.finish_reason is not None:
            self._finish(event)
        return False

    def _add(self, piece: str) -> bool:
        """Adds text that is not held back. True if it ran into a stop string."""
        if not piece:
            return False
        self._num_decoded += len(piece)
        if len(self.output.token_ids) <= self._params.min_tokens:
            self.output.text += piece  # stop strings count only after min_tokens
            return False
        match = self._matcher.push(piece)
        self.output.text += match.text
        if match.stop is None:
            return False
        self.output.finish_reason = FinishReason.STOP
        self.output.stop_reason = match.stop
        return True

    def _finish(self, event: TokenEvent) -> None:
        if self._add(self._detokenizer.finish()):
            return
        self.output.text += self._matcher.finish()
        self.output.finish_reason = event.finish_reason
        self.output.error = event.error
        self.output.stop_reason = event.stop_reason


def _copy(output: CompletionOutput) -> CompletionOutput:
    if output.logprobs is None or output.text_offsets is None:
        return replace(output, token_ids=list(output.token_ids))
    return replace(
        output,
        token_ids=list(output.token_ids),
        logprobs=list(output.logprobs),
        text_offsets=list(output.text_offsets),
    )


def _named(logprobs: TokenLogprobs, tokenizer: Tokenizer) -> TokenLogprobs:
    """With each token's text."""
    return {
        token: Logprob(each.logprob, each.rank, tokenizer.decode([token], skip_special_tokens=False))
        for token, each in logprobs.items()
    }


class GenerationState:
    """All continuations of one prompt while they grow."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        self.generation = generation
        self._tokenizer = tokenizer
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]  # of the first token there are none
        self._choices = [_Choice(index, tokenizer, generation) for index in range(generation.params.n)]

    @property
    def is_finished(self) -> bool:
        return all(choice.output.finish_reason is not None for choice in self._choices)

    @property
    def unfinished_ids(self) -> list[str]:
        """Ids of the sequences that the engine may still be working on."""
        return [
            request.request_id
            for request, choice in zip(self.generation.requests, self._choices, strict=True)
            if choice.output.finish_reason is None
        ]

    def take(self, index: int, event: TokenEvent) -> bool:
        """See `_Choice.take`. Events after the end of a choice are surplus and dropped."""
        self._prompt_logprobs += [_named(each, self._tokenizer) for each in event.prompt_logprobs]
        choice = self._choices[index]
        return choice.output.finish_reason is None and choice.take(event)

    def snapshot(self) -> RequestOutput:
        """The state now, safe to keep: later tokens do not change it."""
        outputs = [_copy(choice.output) for choice in self._choices]
        generation = self.generation
        has_scores = generation.params.prompt_logprobs is not None
        return RequestOutput(
            generation.request_id,
            generation.prompt,
            generation.prompt_token_ids,
            outputs,
            prompt_logprobs=list(self._prompt_logprobs) if has_scores else None,
            num_cached_tokens=generation.requests[0].num_cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class _Route:
    state: GenerationState
    index: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A generation that ends with an error of its own: its text could not be made, or it waited too long."""

    state: GenerationState
    error: RequestFailed | QueueTimeout


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a batch of events did: whose state changed, and which sequences the engine should stop computing."""

    changed: list[GenerationState]
    to_abort: list[str]
    failed: list[Failure] = field(default_factory=list)


class OutputProcessor:
    """Knows which sequence belongs to which generation, and routes events there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._routes: dict[str, _Route] = {}

    def open(self, generation: Generation) -> GenerationState:
        """Starts to follow a generation."""
        state = GenerationState(generation, self._tokenizer)
        for index, request in enumerate(generation.requests):
            self._routes[request.request_id] = _Route(state, index)
        return state

    def state_of(self, request_id: str) -> GenerationState | None:
        """The generation that a sequence belongs to; None if it is no longer followed."""
        route = self._routes.get(request_id)
        return None if route is None else route.state

    def close(self, state: GenerationState) -> None:
        """Stops following it; events that still come are dropped."""
        for request in state.generation.requests:
            self._routes.pop(request.request_id, None)

    def process(self, events: Iterable[TokenEvent]) -> Delivery:
        """Routes one step's events."""
        changed: dict[int, GenerationState] = {}
        to_abort: list[str] = []
        failed: list[Failure] = []
        for event in events:
            route = self._routes.get(event.request_id)
            if route is None:
                continue
            changed[id(route.state)] = route.state
            try:
                if route.state.take(route.index, event):
                    to_abort.append(event.request_id)
            except Exception as error:  # one text that cannot be made is no reason for the others to end
                logger.error("making text of %s failed", event.request_id, exc_info=error)
                failure = RequestFailed(f"its text could not be made: {type(error).__name__}: {error}")
                failed.append(Failure(route.state, failure))
                to_abort += route.state.unfinished_ids
            if event.rejection is not None:
                failed.append(Failure(route.state, event.rejection))
        return Delivery(list(changed.values()), to_abort, failed)
