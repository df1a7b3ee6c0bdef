"""What is new of a growing choice: its text as thoughts, content and calls, and its tokens with their scores."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from chairlift.api.tools import AnswerReader
from chairlift.api.tools.text import CallPiece, ContentPiece, Piece
from chairlift.api.wire.completions import PromptLogprob, PromptLogprobs, WireFinishReason
from chairlift.engine.text.tokenizer import Vocabulary
from chairlift.params import CompletionOutput, FinishReason, RequestOutput, TokenLogprobs

# --- pieces

NewReader = Callable[[], AnswerReader]
"""Makes a reader for each choice, which knows how calls and thoughts are written in it."""


class CallCounter:
    """A `TextWatcher` that ends an answer with the last call that counts."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader

    def push(self, text: str) -> bool:
        self._reader.push(text)
        return self._reader.is_full


@dataclass(slots=True)
class Call:
    """One call as far as it was read."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: f"call_{uuid4().hex[:24]}")


class Answer:
    """Reads one choice's text, in whatever pieces it comes."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self.content = ""
        self.reasoning = ""
        self.calls: list[Call] = []

    def read(self, text: str, is_last: bool) -> list[Piece]:
        """What the new text brings; it is added to `content`, `reasoning` and `calls` as well."""
        pieces = self._reader.push(text, is_last)
        for piece in pieces:
            if isinstance(piece, CallPiece):
                self._add_call(piece)
            elif isinstance(piece, ContentPiece):
                self.content += piece.text
            else:
                self.reasoning += piece.text
        return pieces

    def finish_reason(self, reason: FinishReason | None) -> WireFinishReason | None:
        """The reason, or "tool_calls" for an answer that called something and came to its end."""
        return "tool_calls" if reason is FinishReason.STOP and self.calls else reason

    def _add_call(self, piece: CallPiece) -> None:
        if piece.name is not None:
            self.calls.append(Call(piece.name))
        self.calls[piece.index].arguments += piece.arguments


# --- tokens


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token, or one that might have stood in its place."""

    spelling: bytes
    logprob: float | None  # None: of the first token of a prompt there is none

    @property
    def text(self) -> str:
        """With replacement characters where the bytes make no character by themselves."""
        return self.spelling.decode(errors="replace")

    def as_fields(self) -> dict[str, Any]:
        """As chat completions and responses write it."""
        return {"token": self.text, "logprob": self.logprob, "bytes": list(self.spelling)}


@dataclass(frozen=True, slots=True)
class ScoredPosition:
    """The token at one position and the likeliest ones there; `offset` is where its text begins, in characters."""

    token: ScoredToken
    top: list[ScoredToken]
    offset: int

    def as_fields(self) -> dict[str, Any]:
        """As chat completions and responses write it."""
        return {**self.token.as_fields(), "top_logprobs": [each.as_fields() for each in self.top]}


@dataclass(slots=True)
class News:
    """What a choice has more than before."""

    text: str
    token_ids: list[int]
    positions: list[ScoredPosition]
    finish_reason: FinishReason | None


class ChoiceProgress:
    """How much of one choice has gone out.

    A scored token goes out with the first of its characters. One without any (the end token, what a stop string cut
    off) goes out at the end: as many are told as usage counts, and harnesses rely on it.
    """

    def __init__(self, vocabulary: Vocabulary, num_top: int) -> None:
        """`num_top`: how many likeliest tokens are shown at each position, if positions are scored at all."""
        self._vocabulary = vocabulary
        self._num_top = num_top
        self._num_characters = 0
        self._num_tokens = 0
        self._has_ended = False

    def advance(self, choice: CompletionOutput) -> News | None:
        """What is new in it; None if nothing is. The choice may grow meanwhile, in another thread."""
        finish_reason = choice.finish_reason  # first: with the end, the text is whole
        text = choice.text[self._num_characters :]
        ends_now = finish_reason is not None and not self._has_ended
        if not text and not ends_now:
            return None
        self._num_characters += len(text)
        self._has_ended = self._has_ended or ends_now
        start, end = self._num_tokens, self._num_tokens_out(choice)
        self._num_tokens = end
        return News(text, choice.token_ids[start:end], self._positions(choice, start, end), finish_reason)

    def _num_tokens_out(self, choice: CompletionOutput) -> int:
        """How many tokens have gone out with the text so far."""
        if self._has_ended or choice.text_offsets is None:
            return len(choice.token_ids)
        return bisect_left(choice.text_offsets, self._num_characters)

    def _positions(self, choice: CompletionOutput, start: int, end: int) -> list[ScoredPosition]:
        """The scores of these tokens; those after the end of the text begin there."""
        if choice.logprobs is None or choice.text_offsets is None:
            return []
        return [
            _scored(choice.logprobs[i], self._num_top, min(choice.text_offsets[i], len(choice.text)), self._vocabulary)
            for i in range(start, end)
        ]


def prompt_logprobs(output: RequestOutput, num_top: int | None) -> PromptLogprobs | None:
    """A prompt's scores by token id, if that was asked for."""
    if num_top is None:
        return None
    return [None if position is None else _told(position, num_top) for position in output.prompt_logprobs or []]


def _told(position: TokenLogprobs, num_top: int) -> dict[int, PromptLogprob]:
    own = next(iter(position))
    return {
        token: PromptLogprob(logprob=each.logprob, rank=each.rank, decoded_token=each.decoded_token)
        for token, each in position.items()
        if token == own or each.rank <= num_top
    }


def scored_prompt(output: RequestOutput, text: str, num_top: int, vocabulary: Vocabulary) -> list[ScoredPosition]:
    """A prompt's positions, if they were scored. Special tokens that its text does not show have no length in it."""
    positions: list[ScoredPosition] = []
    num_bytes, encoded = 0, text.encode()
    for token, logprobs in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=False):
        offset = len(encoded[:num_bytes].decode(errors="ignore"))
        if logprobs is None:
            positions.append(ScoredPosition(ScoredToken(vocabulary.token_bytes(token), None), [], offset))
        else:
            positions.append(_scored(logprobs, num_top, offset, vocabulary))
        spelling = positions[-1].token.spelling
        for shown in (spelling, spelling.lstrip(b" ")):  # some tokenizers put a space before the first word
            if encoded.startswith(shown, num_bytes):
                num_bytes += len(shown)
                break
    return positions


def _scored(logprobs: TokenLogprobs, num_top: int, offset: int, vocabulary: Vocabulary) -> ScoredPosition:
    """The token that stands there comes first in `logprobs`."""
    tokens = {token: ScoredToken(vocabulary.token_bytes(token), each.logprob) for token, each in logprobs.items()}
    ranked = sorted((each.rank, token) for token, each in logprobs.items() if each.rank <= num_top)
    return ScoredPosition(next(iter(tokens.values())), [tokens[token] for _, token in ranked], offset)
