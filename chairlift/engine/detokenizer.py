"""Tokens to text while they are generated: never half a character, never a stop string."""

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix

from chairlift.engine.tokenizer import Tokenizer

_CONTEXT_SIZES = (8, 64)
_MAX_CHARACTER_BYTES = 4  # of UTF-8, and so the most tokens that one character takes
_MAX_WINDOW = 32
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what decoders write for bytes that do not make a character (yet)


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
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        if not text.endswith(_INCOMPLETE):
            piece = self._unsent(text)
            if piece:
                self._slide(self._num_context)
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
        # Bytes that follow may turn what was sent before them into something else; letters must not get lost then.
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


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Text that may go out, and the stop string that was found right after it, if one was."""

    text: str
    stop: str | None


class StopMatcher:
    """Finds stop strings across the pieces of a text, and holds back what might turn into one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, piece: str) -> StopMatch:
        """The earliest stop string in the text so far ends it; otherwise all that cannot begin one goes out."""
        text = self._held + piece
        found = [(index, stop) for stop in self._stops if (index := text.find(stop)) >= 0]
        if found:
            index, stop = min(found, key=lambda match: match[0])
            self._held = ""
            return StopMatch(text[:index], stop)
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return StopMatch(text[: len(text) - num_held], None)

    def finish(self) -> str:
        """What was held back: it did not turn into a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
