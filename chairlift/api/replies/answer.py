"""Collects the news of a choice: its text as thoughts, content and calls, and its tokens with their scores."""

from abc import abstractmethod
from bisect import bisect_left
from dataclasses import dataclass, field
from uuid import uuid4

from chairlift.api.answers import AnswerReader, NewReader
from chairlift.api.answers.text import CallPiece, Piece
from chairlift.api.replies.reply import Reply
from chairlift.api.replies.scores import ScoredPosition, scored
from chairlift.api.wire.events import BLANK, NamedEvent, TextEvent
from chairlift.engine.text.deltas import CompletionDelta, RequestDelta
from chairlift.engine.text.vocabulary import Vocabulary
from chairlift.params import FinishReason


@dataclass(slots=True)
class Part:
    """A part of an answer that is of one kind, as far as it was read."""

    kind: type[Piece]
    index: int  # among all parts
    name: str = ""  # of the function that is called
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)  # those that were kept

    @property
    def text(self) -> str:
        """The text that was kept; a call's is its arguments or input."""
        return "".join(self.pieces)

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
        """Returns all text of this kind that was kept."""
        return "".join(part.text for part in self.parts if part.kind is kind)

    def read(self, text: str, reason: FinishReason | None) -> list[tuple[Part, Piece]]:
        """Finds the pieces in the new text, each with the part that it extends. `reason`: why no more text follows."""
        is_last, is_whole = reason is not None, reason is FinishReason.STOP
        return [(self._part_of(piece), piece) for piece in self._reader.push(text, is_last, is_whole)]

    def keep(self, text: str, reason: FinishReason | None) -> list[tuple[Part, Piece]]:
        """Reads the new text, and keeps what the parts say, for a reply that repeats it at the end."""
        pieces = self.read(text, reason)
        for part, piece in pieces:
            part.pieces.append(piece.text)
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
        self._latest: RequestDelta | None = None
        self._open: Part | None = None
        self._telling: TextEvent | None = None  # with more text of the open part

    def _push(self, text: str, reason: FinishReason | None = None) -> list[str]:
        """Returns the events for the new text of the answer. `reason`: why no more follows."""
        events: list[str] = []
        for part, piece in self._answer.keep(text, reason):
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


class ChoiceProgress:
    """Holds back the tokens of one choice until they are sent, with the text that they are part of.

    A scored token is sent with the first of its characters. One without any (the end token, what a stop string cut off)
    is sent at the end: evaluation harnesses rely on as many scores as `usage` counts tokens.
    """

    def __init__(self, vocabulary: Vocabulary, num_top: int) -> None:
        """`num_top`: how many likeliest tokens are shown at each position, if positions are scored at all."""
        self._vocabulary = vocabulary
        self._num_top = num_top
        self._num_characters = 0  # sent
        self._held: CompletionDelta | None = None
        self._has_ended = False

    def advance(self, delta: CompletionDelta, *, waits: bool = False) -> CompletionDelta | None:
        """Returns what is to be sent now; None if nothing is. `waits`: nothing is to be sent yet."""
        if self._held is not None:
            delta, self._held = self._held.followed_by(delta), None
        ends_now = delta.finish_reason is not None and not self._has_ended
        if waits or not (delta.text or ends_now):
            if delta.text or delta.token_ids:
                self._held = delta
            return None
        self._num_characters += len(delta.text)
        self._has_ended = self._has_ended or ends_now
        if delta.logprobs and not self._has_ended:
            num_sent = bisect_left(delta.text_offsets, self._num_characters)
            if num_sent < len(delta.token_ids):
                delta, self._held = delta.cut(num_sent)
        return delta

    def positions(self, sent: CompletionDelta) -> list[ScoredPosition]:
        """Returns the scores of what is sent now; offsets do not exceed the length of the text."""
        return [
            scored(logprobs, self._num_top, min(offset, self._num_characters), self._vocabulary)
            for logprobs, offset in zip(sent.logprobs, sent.text_offsets, strict=True)
        ]
