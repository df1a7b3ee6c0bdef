"""From token events to what callers see: cumulative `RequestOutput`s with text and finish reasons."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from chairlift.engine.detokenizer import Detokenizer, StopMatcher
from chairlift.engine.inputs import Generation
from chairlift.engine.tokenizer import Tokenizer
from chairlift.params import CompletionOutput, FinishReason, RequestOutput, SamplingParams
from chairlift.scheduler import TokenEvent

logger = logging.getLogger(__name__)


class _Choice:
    """One continuation while it grows."""

    def __init__(self, index: int, tokenizer: Tokenizer, generation: Generation) -> None:
        self._params: SamplingParams = generation.params
        self._detokenizer = Detokenizer(tokenizer, generation.prompt_token_ids)
        self._matcher = StopMatcher(generation.params.stop)
        self.output = CompletionOutput(index)

    def take(self, event: TokenEvent) -> bool:
        """Adds the event's tokens. True if a stop string ended the text, of which the engine does not know yet."""
        is_stopped = event.finish_reason is FinishReason.STOP  # by its last token, which is no part of the text
        shown = event.new_token_ids[:-1] if is_stopped else event.new_token_ids
        for token in shown:
            self.output.token_ids.append(token)
            if self._add(self._detokenizer.push(token)):
                return event.finish_reason is None
        self.output.token_ids += event.new_token_ids[len(shown) :]
        if event.finish_reason is not None:
            self._finish(event)
        return False

    def _add(self, piece: str) -> bool:
        """Adds text that is not held back. True if it ran into a stop string."""
        if not piece:
            return False
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
        self.output.stop_reason = event.stop_reason


class GenerationState:
    """All continuations of one prompt while they grow."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        self.generation = generation
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
        choice = self._choices[index]
        return choice.output.finish_reason is None and choice.take(event)

    def snapshot(self) -> RequestOutput:
        """The state now, safe to keep: later tokens do not change it."""
        outputs = [replace(choice.output, token_ids=list(choice.output.token_ids)) for choice in self._choices]
        generation = self.generation
        return RequestOutput(generation.request_id, generation.prompt, generation.prompt_token_ids, outputs)


@dataclass(frozen=True, slots=True)
class _Route:
    state: GenerationState
    index: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A generation whose text could not be made, and why."""

    state: GenerationState
    error: Exception


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
                failed.append(Failure(route.state, error))
                to_abort += route.state.unfinished_ids
        return Delivery(list(changed.values()), to_abort, failed)
