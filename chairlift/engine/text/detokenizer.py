"""Decodes tokens to text piece by piece, without incomplete characters or the beginnings of stop strings."""

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from itertools import islice
from os.path import commonprefix

from chairlift.engine.sampling.token_rules import START, Automaton
from chairlift.engine.text.tokenizer import Tokenizer
from chairlift.errors import InvalidRequest

_CONTEXT_SIZES = (8, 64)
_MAX_CHARACTER_BYTES = 4  # of UTF-8, and so the most tokens that one character takes
_MAX_WINDOW = 32
_SPACE = ord(" ")
_SURROGATES = range(0xD800, 0xE000)  # halves of pairs: no text that was decoded from UTF-8 has one
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what decoders write for bytes that are not a complete character (yet)


class Detokenizer:
    """Decodes one continuation token by token. The pieces add up to the decoding of the whole.

    For each token, a short window is decoded again: tokens whose text was returned last, which determine the spacing of
    the next ones, and tokens whose text is still held back. (The library's own DecodeStream raises on bytes that are no
    character, which models do produce.)

        window  | context: text returned | held back |

    Tokens that stand for single bytes are held back in `_bytes` instead. The library decodes a run of them as a whole,
    and all of it is lost if the run begins or ends within a character, or holds one wrong byte.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = _context(tokenizer, prompt_token_ids)
        self._num_context = len(self._window)
        self._sent = tokenizer.decode(self._window)  # the part of the window's text that was returned
        self._bytes = _ByteRun(tokenizer, self._window)

    def push(self, token_id: int) -> str:
        """The text that this token completes: often its own, sometimes none yet."""
        if not self._tokenizer.is_written(token_id):  # a run of these would make the window ever longer
            return ""
        byte = self._tokenizer.byte_of(token_id)
        if byte is None:
            return self._end_bytes() + self._push_piece(token_id)
        if byte == _SPACE and not self._sent and not self._bytes.tokens:  # decoders may drop a text's first space
            return self._push_piece(token_id)
        return self._flush() + self._emit(self._bytes.push(token_id, byte))

    def finish(self) -> str:
        """Returns what is still held back after the last token, for instance an incomplete character."""
        return self._flush() + self._end_bytes()

    def _push_piece(self, token_id: int) -> str:
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

    def _flush(self) -> str:
        """Returns what is held back in the window."""
        if len(self._window) == self._num_context:
            return ""
        text = self._tokenizer.decode(self._window)
        piece, self._sent = self._unsent(text), text
        return piece

    def _end_bytes(self) -> str:
        """Returns what is held back in the bytes."""
        return self._emit(self._bytes.end()) if self._bytes.tokens else ""

    def _emit(self, decoded: tuple[list[int], str]) -> str:
        """Returns the text of bytes. Their tokens become the context of the next ones."""
        tokens, text = decoded
        if tokens:
            self._window = tokens
            self._slide(0)
        return text

    def _unsent(self, text: str) -> str:
        if text.startswith(self._sent):
            return text[len(self._sent) :]
        # Later bytes may change text that was sent before them; even then, no character must be lost.
        return text[len(commonprefix([text, self._sent])) :]  # noqa: RUF071 - by character is what is meant

    def _slide(self, num_dropped: int) -> None:
        """Drops the oldest tokens. All others count as sent."""
        self._window = self._window[num_dropped:]
        self._num_context = len(self._window)
        self._sent = self._tokenizer.decode(self._window)


class _ByteRun:
    """Single bytes in a row, decoded character by character. `tokens`: those of the character that is incomplete."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        """`before`: tokens of the prompt. The answer may complete its last character."""
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self.tokens: list[int] = []
        self._is_prompts = False
        for token_id in before[1 - _MAX_CHARACTER_BYTES :]:
            byte = tokenizer.byte_of(token_id)
            _ = self.end() if byte is None else self.push(token_id, byte)
        self._is_prompts = bool(self.tokens)  # an incomplete character that the prompt's text shows already

    def push(self, token_id: int, byte: int) -> tuple[list[int], str]:
        """The tokens that are no longer held back, if any, and their text."""
        self.tokens.append(token_id)
        return self._decode(bytes([byte]))

    def end(self) -> tuple[list[int], str]:
        """The same where no byte follows."""
        return self._decode(b"", is_last=True)

    def _decode(self, more: bytes, is_last: bool = False) -> tuple[list[int], str]:
        text = self._decoder.decode(more, is_last)
        num_decoded = len(self.tokens) - len(self._decoder.getstate()[0])
        decoded, self.tokens = self.tokens[:num_decoded], self.tokens[num_decoded:]
        if decoded and self._is_prompts:
            text, self._is_prompts = text.removeprefix(_INCOMPLETE), False
        return decoded, text


def _context(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> list[int]:
    """The end of the prompt, as far as it is written, long enough not to begin within a character, if possible."""
    tail: list[int] = []
    for size in _CONTEXT_SIZES:
        tail = [*islice(filter(tokenizer.is_written, reversed(prompt_token_ids)), size)][::-1]
        if not tokenizer.decode(tail).endswith(_INCOMPLETE):
            break
    return tail


class StopStrings:
    """The stop strings of a request: prepared once, off the event loop, for all of its choices.

    A text has no special tokens, but stop strings may spell some. So each special token that they spell has a mark, a
    character that occurs in no text. `_Choice` adds it to what it searches where the token came, and such a stop string
    is looked for twice: as it is spelled, and with marks.
    """

    def __init__(self, stops: Sequence[str], split: Callable[[str], list[str | int]] = lambda stop: [stop]) -> None:
        """`split`: see `Tokenizer.split`. InvalidRequest if the stop strings spell too many special tokens."""
        self.marks: dict[int, str] = {}  # by token id
        self.token_ids: list[int] = []  # of stop strings that are a special token and nothing else
        found = []
        for stop in stops:
            parts = split(stop)
            found.append((stop, stop))
            if any(isinstance(part, int) for part in parts):
                found.append((stop, "".join(part if isinstance(part, str) else self._mark(part) for part in parts)))
            if len(parts) == 1 and isinstance(parts[0], int):
                self.token_ids.append(parts[0])
        self.are_found_in_text = len(self.token_ids) < len(stops)  # the engine itself ends an answer at a token
        self.stops = tuple(stop for stop, _ in found)
        self.patterns = tuple(pattern for _, pattern in found)
        self.automaton = Automaton([list(map(ord, pattern)) for pattern in self.patterns])
        self._unmarked = dict.fromkeys(map(ord, self.marks.values()))

    def without_marks(self, text: str) -> str:
        return text.translate(self._unmarked) if self.marks else text

    def _mark(self, token_id: int) -> str:
        if token_id not in self.marks:
            if len(self.marks) == len(_SURROGATES):
                raise InvalidRequest(f"stop: name at most {len(_SURROGATES)} different special tokens", "stop")
            self.marks[token_id] = chr(_SURROGATES[len(self.marks)])
        return self.marks[token_id]


class StopMatcher:
    """Finds stop strings across the pieces of a text, and holds back what may be the beginning of one."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._patterns = stops.patterns
        self._automaton = stops.automaton
        self._state = START
        self._held = ""  # the text of the state

    def push(self, piece: str) -> tuple[str, str | None]:
        """Returns text that is final, without marks, and the stop string that was found right after it, if any.

        The earliest stop string ends the text; without one, all text that cannot begin a stop string is returned. If
        several are complete and begin at the same place, the one that was named first counts.
        """
        if not self._patterns:
            return piece, None
        text = self._held + piece
        match = self._find(text)
        if match is not None:
            self._state, self._held = START, ""
            return match
        num_out = len(text) - self._automaton.depth(self._state)
        self._held = text[num_out:]
        return self._stops.without_marks(text[:num_out]), None

    def finish(self) -> str:
        """Returns what was held back, since it did not become a stop string."""
        held, self._state, self._held = self._held, START, ""
        return self._stops.without_marks(held)

    def _find(self, text: str) -> tuple[str, str] | None:
        """Advances over the text after what is held back; finds the stop string that ends it."""
        automaton, state = self._automaton, self._state
        best: tuple[int, int] | None = None  # where it begins, and its place in the list
        for end in range(len(self._held) + 1, len(text) + 1):
            state = automaton.advance(state, ord(text[end - 1]))
            match = automaton.longest_match(state)
            if match is not None:
                candidate = (end - len(self._patterns[match]), match)
                best = candidate if best is None else min(best, candidate)
            if best is not None and end - automaton.depth(state) > best[0]:
                break  # any later match would begin later
        self._state = state
        if best is None:
            return None
        return self._stops.without_marks(text[: best[0]]), self._stops.stops[best[1]]
