"""The new part of a growing choice: its text as thoughts, content and calls, and its tokens with their scores."""

from abc import abstractmethod
from bisect import bisect_left
from dataclasses import dataclass
from uuid import uuid4

from chairlift.api.answers import AnswerReader, NewReader
from chairlift.api.answers.text import CallPiece, Piece
from chairlift.api.replies.reply import Reply
from chairlift.api.replies.scores import ScoredPosition, scored
from chairlift.api.wire.events import BLANK, NamedEvent, TextEvent
from chairlift.engine.text.vocabulary import Vocabulary
from chairlift.params import CompletionOutput, FinishReason, RequestOutput


@dataclass(slots=True)
class Part:
    """A part of an answer that is of one kind, as far as it was read; a call's text is its arguments or input."""

    kind: type[Piece]
    index: int  # among all parts
    name: str = ""  # of the function that is called
    call_id: str = ""
    text: str = ""

    @property
    def is_call(self) -> bool:
        """True for calls of functions and of custom tools."""
        return issubclass(self.kind, CallPiece)


class Answer:
    """Parses one choice's text, however it is split into pieces."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self.parts: list[Part] = []

    @property
    def calls(self) -> list[Part]:
        return [part for part in self.parts if part.is_call]

    def text_of(self, kind: type[Piece]) -> str:
        """All text of this kind."""
        return "".join(part.text for part in self.parts if part.kind is kind)

    def read(self, text: str, reason: FinishReason | None) -> list[tuple[Part, Piece]]:
        """The pieces in the new text, each with the part that it extends. `reason`: why no more text follows."""
        is_last, is_whole = reason is not None, reason is FinishReason.STOP
        pieces = [(self._part_of(piece), piece) for piece in self._reader.push(text, is_last, is_whole)]
        for part, piece in pieces:
            part.text += piece.text
        return pieces

    def begin(self, kind: type[Piece], name: str = "") -> Part:
        call_id = f"call_{uuid4().hex[:24]}" if issubclass(kind, CallPiece) else ""
        self.parts.append(Part(kind, len(self.parts), name, call_id))
        return self.parts[-1]

    def _part_of(self, piece: Piece) -> Part:
        """A call begins with its name, any other part where the kind of text changes."""
        if isinstance(piece, CallPiece) and piece.name is not None:
            return self.begin(type(piece), piece.name)
        is_more = self.parts and self.parts[-1].kind is type(piece)
        return self.parts[-1] if is_more else self.begin(type(piece))


class ConversationReply(Reply):
    """A reply to one conversation whose parts begin, grow and end one after the other, each with events of its own."""

    def __init__(self, vocabulary: Vocabulary, num_top: int, new_reader: NewReader) -> None:
        self._progress = ChoiceProgress(vocabulary, num_top)
        self._answer = Answer(new_reader())
        self._latest: RequestOutput | None = None
        self._open: Part | None = None
        self._telling: TextEvent | None = None  # with more text of the open part

    def _take(self, text: str, reason: FinishReason | None = None) -> list[str]:
        """Events for the new text of the answer; `reason`: why no more follows."""
        events: list[str] = []
        for part, piece in self._answer.read(text, reason):
            if part is not self._open:
                events += self._begin(part)
            events += self._grow(part, piece.text)
        return events

    def _begin(self, part: Part) -> list[str]:
        events = self._close()
        self._open, self._telling = part, None
        return events + self._opening_of(part)

    def _grow(self, part: Part, text: str) -> list[str]:
        if not text:
            return []
        if self._telling is None:
            self._telling = TextEvent(self._delta(part, BLANK))
        return [self._telling.of(text)]

    @abstractmethod
    def _opening_of(self, part: Part) -> list[str]:
        """Events that begin the part, without its text, even if some is known already."""

    @abstractmethod
    def _delta(self, part: Part, text: str) -> NamedEvent:
        """The event with more text of the part."""

    @abstractmethod
    def _close(self) -> list[str]:
        """Events that end the open part, if there is one."""


@dataclass(slots=True)
class News:
    """The news of a choice."""

    text: str
    token_ids: list[int]
    positions: list[ScoredPosition]
    finish_reason: FinishReason | None


class ChoiceProgress:
    """Knows how much of one choice has been sent.

    A scored token is sent with the first of its characters. One without any (the end token, what a stop string cut off)
    is sent at the end: evaluation harnesses rely on as many scores as `usage` counts tokens.
    """

    def __init__(self, vocabulary: Vocabulary, num_top: int) -> None:
        """`num_top`: how many likeliest tokens are shown at each position, if positions are scored at all."""
        self._vocabulary = vocabulary
        self._num_top = num_top
        self._num_characters = 0
        self._num_tokens = 0
        self._has_ended = False

    def advance(self, choice: CompletionOutput) -> News | None:
        """Returns what is new in it; None if nothing is."""
        finish_reason = choice.finish_reason
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
        """The number of tokens sent with the text so far."""
        if self._has_ended or choice.text_offsets is None:
            return len(choice.token_ids)
        return bisect_left(choice.text_offsets, self._num_characters)

    def _positions(self, choice: CompletionOutput, start: int, end: int) -> list[ScoredPosition]:
        """The scores of these tokens; offsets do not exceed the length of the text."""
        if choice.logprobs is None or choice.text_offsets is None:
            return []
        return [
            scored(choice.logprobs[i], self._num_top, min(choice.text_offsets[i], len(choice.text)), self._vocabulary)
            for i in range(start, end)
        ]
