"""Parses an answer, as it arrives, into thoughts, content and calls."""

from collections.abc import Callable, Collection

from chairlift.api.answers.custom import CustomInputs
from chairlift.api.answers.declared import Declared
from chairlift.api.answers.families import FORMATS, ToolFamily
from chairlift.api.answers.formats import Schemas
from chairlift.api.answers.harmony import Harmony
from chairlift.api.answers.text import CallPiece, Piece, PieceBuffer, Reading, Text
from chairlift.api.answers.thoughts import Thoughts

_NO_SCHEMAS: Schemas = {}


class AnswerReader:
    """Parses an answer. The joined pieces are the same however the text is split. Up to the last wanted call, nothing
    is lost but whitespace around thoughts and calls.
    """

    def __init__(
        self,
        family: ToolFamily | Declared | Harmony | None,
        max_calls: int | None = None,
        schemas: Schemas = _NO_SCHEMAS,
        thoughts: Thoughts | None = None,
        custom: Collection[str] = (),
    ) -> None:
        """`family`: of calls; None: there are none. All text after `max_calls` calls (None: no limit) is dropped.
        `custom`: names of custom tools.
        """
        self._inputs = CustomInputs(custom)
        self._family = family
        self._format = FORMATS[family] if isinstance(family, ToolFamily) else family
        self._schemas = schemas
        self._thoughts = thoughts
        self._text = Text()
        self._pieces = PieceBuffer(max_calls)
        self._reading = self._read()

    @property
    def is_full(self) -> bool:
        """True once all wanted calls were read."""
        return self._pieces.is_full

    def push(self, text: str, is_last: bool = False, is_whole: bool = False) -> list[Piece]:
        """The pieces known from the text so far and not yet returned. `is_last`: no more text follows; `is_whole`: not
        because of a limit, so that a call which is still open has ended.
        """
        self._text.feed(text, is_last, is_whole)
        next(self._reading, None)
        if self._text.tap is not None:
            self._text.tap(self._text.take())
        return self._inputs.read(self._pieces.empty(), is_last)

    def _read(self) -> Reading[None]:
        if self._thoughts is not None:
            marks = () if self._format is None else self._format.opening_marks
            held = yield from self._thoughts.read(self._text, self._pieces, marks)
            self._add_end_of_thoughts(held)
        if self._format is not None:
            yield from self._format.read(self._text, self._pieces, self._schemas)
        else:
            yield from self._text.pass_on_up_to((), self._pieces.content)

    def _add_end_of_thoughts(self, held: str) -> None:
        """Adds what thoughts that the model did not close have from a mark of calls on: calls, if it made some there.

        In an answer that was cut off it is all thoughts.
        """
        reader = AnswerReader(self._family, self._pieces.max_calls, self._schemas)
        pieces = reader.push(held, is_last=True, is_whole=True) if self._text.is_whole else []
        first = next((i for i, piece in enumerate(pieces) if isinstance(piece, CallPiece)), None)
        self._pieces.reasoning(held if first is None else "".join(piece.text for piece in pieces[:first]))
        self._pieces.add([] if first is None else pieces[first:])


NewReader = Callable[[], AnswerReader]
"""Makes the reader of a choice, which knows how calls and thoughts are written in it."""


class CallCounter:
    """A `TextWatcher` that ends an answer after the last wanted call."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader

    def push(self, text: str) -> bool:
        self._reader.push(text)
        return self._reader.is_full
