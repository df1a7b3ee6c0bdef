"""From token events to what callers see: text without half characters or stop strings, in cumulative outputs.

TokenEvent -> OutputProcessor -> GenerationState -> _Choice: Detokenizer -> StopMatcher -> CompletionOutput
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix

from chairlift.engine.sampling.token_rules import START
from chairlift.engine.text.grammar import Thinking
from chairlift.engine.text.inputs import Generation, StopStrings
from chairlift.engine.text.tokenizer import Tokenizer
from chairlift.errors import RequestFailed
from chairlift.params import CompletionOutput, FinishReason, RequestOutput, TokenLogprobs
from chairlift.scheduler import TokenEvent

logger = logging.getLogger(__name__)

_CONTEXT_SIZES = (8, 64)
_MAX_CHARACTER_BYTES = 4  # of UTF-8, and so the most tokens that one character takes
_MAX_WINDOW = 32
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what decoders write for bytes that do not make a character (yet)


# --- tokens to text


class Detokenizer:
    """Decodes one continuation token by token. The pieces add up to the decoding of the whole.

    A short window of tokens is decoded anew for each: those whose text went out last, which tell how the next ones are
    spaced, and those whose text is still held back. (The library's own DecodeStream raises on bytes that make no
    character, which models do produce.)

        window  | context: text is out | held: text is not |
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = _context(tokenizer, prompt_token_ids)
        self._num_context = len(self._window)
        self._sent = tokenizer.decode(self._window)  # the part of the window's text that is out

    def push(self, token_id: int) -> str:
        """The text that this token completes: often its own, sometimes none yet."""
        if not self._tokenizer.is_written(token_id):  # else a run of them would make the window longer and longer
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        if not text.endswith(_INCOMPLETE):
            piece = self._unsent(text)
            if piece or len(self._window) > _MAX_WINDOW:
                self._slide(self._num_context if piece else len(self._window) - 2 * _MAX_CHARACTER_BYTES)
            return piece
        if len(self._window) - self._num_context <= _MAX_CHARACTER_BYTES:
            return ""
        # More tokens than a character has: only the last of these can still become one.
        piece = self._unsent(text[:-1])
        self._sent = text[:-1]
        if len(self._window) > _MAX_WINDOW:
            self._slide(len(self._window) - 2 * _MAX_CHARACTER_BYTES)
            self._num_context, self._sent = 0, self._sent[:-1]
        return piece

    def finish(self) -> str:
        """What is still held back when no more tokens will come, for instance an unfinished character."""
        text = self._tokenizer.decode(self._window)
        piece, self._sent = self._unsent(text), text
        return piece

    def _unsent(self, text: str) -> str:
        if text.startswith(self._sent):
            return text[len(self._sent) :]
        # Bytes that follow may change the text that was sent before them; no letter must get lost then.
        return text[len(commonprefix([text, self._sent])) :]  # noqa: RUF071 - by character is what is meant

    def _slide(self, num_dropped: int) -> None:
        """Forgets the oldest tokens. All that stay count as sent."""
        self._window = self._window[num_dropped:]
        self._num_context = len(self._window)
        self._sent = self._tokenizer.decode(self._window)


def _context(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> list[int]:
    """The end of the prompt, begun early enough that no character is cut in two if that can be helped."""
    tail: list[int] = []
    for size in _CONTEXT_SIZES:
        tail = list(prompt_token_ids[-size:])
        if not tokenizer.decode(tail).endswith(_INCOMPLETE):
            break
    return tail


# --- stop strings


class StopMatcher:
    """Finds stop strings across the pieces of a text, and holds back what might turn into one."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops.stops
        self._automaton = stops.automaton
        self._state = START
        self._held = ""  # what the state stands for

    def push(self, piece: str) -> tuple[str, str | None]:
        """Text that may go out, and the stop string that was found right after it, if one was.

        The earliest stop string in the text so far ends it; otherwise all that cannot begin one goes out. Where several
        begin at the same place and are complete, the one that was named first counts.
        """
        if not self._stops:
            return piece, None
        text = self._held + piece
        match = self._find(text)
        if match is not None:
            self._state, self._held = START, ""
            return match
        num_out = len(text) - self._automaton.depth(self._state)
        self._held = text[num_out:]
        return text[:num_out], None

    def finish(self) -> str:
        """What was held back: it did not turn into a stop string."""
        held, self._state, self._held = self._held, START, ""
        return held

    def _find(self, text: str) -> tuple[str, str] | None:
        """Takes the text behind what is held."""
        automaton, state = self._automaton, self._state
        best: tuple[int, int] | None = None  # where it begins, and its place in the list
        for end in range(len(self._held) + 1, len(text) + 1):
            state = automaton.advance(state, ord(text[end - 1]))
            match = automaton.longest_match(state)
            if match is not None:
                candidate = (end - len(self._stops[match]), match)
                best = candidate if best is None else min(best, candidate)
            if best is not None and end - automaton.depth(state) > best[0]:
                break  # what is still to come begins later
        self._state = state
        return None if best is None else (text[: best[0]], self._stops[best[1]])


# --- outputs


class _Choice:
    """One continuation while it grows."""

    def __init__(self, index: int, tokenizer: Tokenizer, generation: Generation) -> None:
        self._params = generation.params
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, generation.prompt_token_ids)
        self._matcher = StopMatcher(generation.stops)
        text_options = generation.text_options
        self._watcher = None if text_options.new_watcher is None else text_options.new_watcher()
        self._shown = {tokenizer.backend.token_to_id(name): name for name in text_options.shown_tokens}
        self._thinking = text_options.thinking  # None once the thoughts are over
        self._is_thinking = self._thinking is not None and self._thinking.has_begun
        self._num_decoded = 0  # characters, also those that are held back
        self._logprobs: list[TokenLogprobs] = []
        self._text_offsets: list[int] = []
        self.output = CompletionOutput(index)
        if generation.params.logprobs is not None:
            self.output.logprobs, self.output.text_offsets = self._logprobs, self._text_offsets

    def take(self, event: TokenEvent) -> bool:
        """Adds the event's tokens. True if the text ended by itself, which the engine does not know yet."""
        num_shown = len(event.new_token_ids) - event.has_end_token
        self.output.num_accepted_tokens = event.num_accepted
        self.output.num_rejected_tokens = event.num_drafted - event.num_accepted
        for position, token in enumerate(event.new_token_ids):
            self.output.token_ids.append(token)
            if self._thinking is not None:
                self._think(token, self._thinking)
            if self.output.logprobs is not None:
                self._logprobs.append(_name(event.logprobs[position], self._tokenizer))
                self._text_offsets.append(self._num_decoded)
            if position < num_shown and self._add(self._text_of(token)):
                return event.finish_reason is None
        if event.finish_reason is not None and not self._add(self._detokenizer.finish()):
            self.output.text += self._matcher.finish()
            self.output.stop_reason = event.stop_reason
            self.output.error = event.error
            self.output.finish_reason = event.finish_reason  # last, for readers in other threads
        return False

    def _think(self, token: int, thinking: Thinking) -> None:
        """Counts it if it is one of the thoughts, which begin in the prompt or with the first token."""
        if self._is_thinking and token != thinking.end_id:
            self.output.num_reasoning_tokens += 1
        else:
            self._is_thinking = not self._is_thinking and token == thinking.begin_id
            self._thinking = thinking if self._is_thinking else None

    def _text_of(self, token: int) -> str:
        """The text that this token completes."""
        name = self._shown.get(token)
        return self._detokenizer.push(token) if name is None else self._detokenizer.finish() + name

    def _add(self, piece: str) -> bool:
        """Adds text that is not held back. True if it ends here: at a stop string, or where the watcher says so."""
        if not piece:
            return False
        self._num_decoded += len(piece)
        may_end = len(self.output.token_ids) > self._params.min_tokens
        text, stop = self._matcher.push(piece) if may_end else (piece, None)
        self.output.text += text
        is_over = self._watcher is not None and self._watcher.push(text)
        if not may_end or (stop is None and not is_over):
            return False
        self.output.stop_reason = stop
        self.output.finish_reason = FinishReason.STOP
        return True


def _name(logprobs: TokenLogprobs, tokenizer: Tokenizer) -> TokenLogprobs:
    """Writes each token's text to it."""
    for token, each in logprobs.items():
        each.decoded_token = tokenizer.token_text(token)
    return logprobs


class GenerationState:
    """All continuations of one prompt while they grow."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        self.generation = generation
        self._tokenizer = tokenizer
        self._choices = [_Choice(index, tokenizer, generation) for index in range(generation.params.n)]
        self.output = RequestOutput(  # which grows; see `RequestOutput.copy`
            generation.request_id,
            generation.prompt,
            generation.prompt_token_ids,
            [choice.output for choice in self._choices],
            prompt_logprobs=None if generation.params.prompt_logprobs is None else [None],  # the first token has none
        )

    @property
    def is_finished(self) -> bool:
        return self.output.finished

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
        output = self.output
        if output.prompt_logprobs is not None:
            output.prompt_logprobs += [_name(each, self._tokenizer) for each in event.prompt_logprobs]
        if event.times is not None:
            output.times = event.times if output.times is None else output.times.first_of(event.times)
            if index == 0:
                output.num_cached_tokens = event.num_cached_tokens
        choice = self._choices[index]
        return choice.output.finish_reason is None and choice.take(event)


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a batch of events did."""

    changed: dict[GenerationState, None] = field(default_factory=dict)  # in order, each once
    to_abort: list[str] = field(default_factory=list)  # sequences that the engine should stop computing
    failed: dict[GenerationState, Exception] = field(default_factory=dict)  # how generations end


class OutputProcessor:
    """Knows which sequence belongs to which generation, and routes events there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._routes: dict[str, tuple[GenerationState, int]] = {}  # the choice's index

    def open(self, generation: Generation) -> GenerationState:
        """Starts to follow a generation."""
        state = GenerationState(generation, self._tokenizer)
        for index, request in enumerate(generation.requests):
            self._routes[request.request_id] = (state, index)
        return state

    def close(self, state: GenerationState) -> None:
        """Stops following it; events that still come are dropped."""
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
                if state.take(index, event):
                    delivery.to_abort.append(event.request_id)
            except Exception as error:  # one text that cannot be made is no reason for the others to end
                logger.error("making text of %s failed", event.request_id, exc_info=error)
                delivery.failed[state] = RequestFailed(f"its text could not be made: {type(error).__name__}: {error}")
                delivery.to_abort.extend(state.unfinished_ids)
            if event.rejection is not None:
                delivery.failed[state] = event.rejection
        return delivery
