"""Tokens to text while they are generated: never half a character, never a stop string."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers.decoders import DecodeStream

from chairlift.engine.tokenizer import Tokenizer

_NUM_CONTEXT_TOKENS = 8
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what decoders write for bytes that do not make a character (yet)


class Detokenizer:
    """Decodes one continuation token by token. The pieces add up to the decoding of the whole."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # The end of the prompt tells, for some tokenizers, whether the first piece begins with a space.
        context = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
        if tokenizer.decode(context).endswith(_INCOMPLETE):
            context = []
        self._stream = DecodeStream(context, skip_special_tokens=True)
        self._context = context  # tokens whose text is out, the latest few
        self._pending: list[int] = []  # tokens whose text is not

    def push(self, token_id: int) -> str:
        """The text that this token completes: often its own, sometimes none yet."""
        self._pending.append(token_id)
        text = self._stream.step(self._tokenizer.backend, token_id)
        if not text:
            return ""
        self._context, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        """What is still held back when no more tokens will come, for instance an unfinished character."""
        if not self._pending:
            return ""
        before = self._tokenizer.decode(self._context)
        text = self._tokenizer.decode(self._context + self._pending)[len(before) :]
        self._pending = []
        return text


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
