"""What the parsers of all families share: the states of reading an answer, and one call's life within it.

A call that turns out not to be one becomes content, with what led to it, as long as none of it was passed on. After
that it stays a call: whatever is left of a broken one is passed on as its arguments.
"""

from abc import ABC, abstractmethod
from enum import Enum, auto
from typing import ClassVar

from chairlift.api.tools.call_reader import CallReader, ReaderState
from chairlift.api.tools.pieces import CallPiece, ContentPiece, Piece


class State(Enum):
    LEAD = auto()  # before a call, or what may become one
    CALL = auto()  # in a call's object
    TAIL = auto()  # after a call's object
    BROKEN = auto()  # in arguments that are not JSON any more
    PLAIN = auto()  # no call can come any more
    FULL = auto()  # as many calls as are wanted: the rest is swallowed


class AnswerParser(ABC):
    """A family says what leads to a call and what follows it."""

    must_have_arguments: ClassVar[bool]
    after_failure: ClassVar[State]

    def __init__(self, max_calls: int | None) -> None:
        self._state = State.LEAD
        self._max_calls = max_calls
        self._num_calls = 0
        self._held = ""  # read, and not known yet what it is
        self._has_text = False  # any content since the last call
        self._reader = CallReader(0, self.must_have_arguments)
        self._pieces: list[Piece] = []

    def push(self, text: str) -> list[Piece]:
        """See `ToolCallParser`."""
        self._pieces = []
        while text:
            text = self._step(text)
        return self._pieces

    def finish(self) -> list[Piece]:
        """See `ToolCallParser`."""
        self._pieces = []
        held, self._held = self._held, ""
        match self._state:
            case State.LEAD | State.TAIL if not self._is_droppable(held):
                self._add_content(held)
            case State.CALL if not self._reader.has_begun:
                self._add_content(held + self._reader.held)
            case State.CALL if self._reader.is_value_open:
                self._add_arguments(self._reader.held)
            case State.BROKEN:
                self._add_arguments(held)
            case _:
                pass
        return self._pieces

    def _step(self, text: str) -> str:
        """Reads some of the text, all held text first. Returns what is to be read in the state that follows."""
        match self._state:
            case State.LEAD:
                return self._read_lead(self._take_held() + text)
            case State.CALL:
                return self._read_call(text)
            case State.TAIL:
                return self._read_tail(self._take_held() + text)
            case State.BROKEN:
                return self._read_broken(self._take_held() + text)
            case State.PLAIN:
                self._add_content(text)
                return ""
            case State.FULL:
                return ""

    @abstractmethod
    def _read_lead(self, text: str) -> str:
        """Reads up to a call, which `_begin_call` begins, or holds what may become one."""

    @abstractmethod
    def _read_tail(self, text: str) -> str:
        """Reads what closes a call, or stands between it and the next."""

    @abstractmethod
    def _read_broken(self, text: str) -> str:
        """Reads the rest of arguments that are not JSON any more."""

    @abstractmethod
    def _is_droppable(self, text: str) -> bool:
        """Whether held text that ends the answer only closes or separates calls, and is not content."""

    def _begin_call(self, lead: str) -> None:
        """What leads to the call is content if that fails."""
        self._held = lead
        self._state = State.CALL
        self._reader = CallReader(self._num_calls, self.must_have_arguments)

    def _read_call(self, text: str) -> str:
        reader = self._reader
        self._pieces += reader.push(text)
        if reader.state is ReaderState.READING:
            return ""
        if reader.state is ReaderState.FAILED and not reader.has_begun:
            self._add_content(self._take_held() + reader.held)
            self._state = self.after_failure
            return reader.rest
        self._held = ""
        if reader.is_value_open:
            self._add_arguments(reader.held)
            self._state = State.BROKEN
            return reader.rest
        self._end_call(State.TAIL)
        # The arguments are complete. If the object is not, what it has after them does not belong to the call.
        return (reader.held if reader.state is ReaderState.FAILED else "") + reader.rest

    def _end_call(self, next_state: State) -> None:
        self._num_calls += 1
        self._has_text = False
        self._state = State.FULL if self._num_calls == self._max_calls else next_state

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return held

    def _add_content(self, text: str) -> None:
        if not text:
            return
        self._has_text = True
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, ContentPiece):
            self._pieces[-1] = ContentPiece(last.text + text)
        else:
            self._pieces.append(ContentPiece(text))

    def _add_arguments(self, text: str) -> None:
        if text:
            self._pieces.append(CallPiece(self._num_calls, None, text))
