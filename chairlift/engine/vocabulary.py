"""What the token ids of a model stand for, byte by byte."""

import threading
from collections.abc import Collection

from llguidance import LLTokenizer

from chairlift.engine.tokenizer import Tokenizer

_BYTE_255 = ("ÿ", "<0xFF>")  # in the alphabets of byte-level and of byte-fallback tokenizers


class Vocabulary:
    """The bytes behind a model's tokens, as llguidance reads them from its tokenizer. Usable from any thread.

    Loaded when first needed, off the event loop please: a large vocabulary takes up to a second.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, eos_token_ids: Collection[int]) -> None:
        """`size`: of the model's vocabulary; the tokenizer may know more tokens or fewer."""
        self._tokenizer = tokenizer
        self._size = size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._loaded: LLTokenizer | ValueError | None = None

    def load(self) -> LLTokenizer:
        """llguidance's view of the tokenizer. ValueError if it cannot read this kind."""
        with self._lock:
            if self._loaded is None:
                self._loaded = self._read()
        if isinstance(self._loaded, ValueError):
            raise self._loaded
        return self._loaded

    def is_readable(self) -> bool:
        """Loads it, and says whether that worked."""
        try:
            self.load()
        except ValueError:
            return False
        return True

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text; of a special token, its name."""
        if not self.is_readable():
            return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        spelling: bytes = self.load().decode_bytes([token_id])
        # llguidance marks special tokens with a byte 255, and so loses the token that is this byte.
        if not spelling and self._tokenizer.backend.id_to_token(token_id) in _BYTE_255:
            return b"\xff"
        return spelling

    def _read(self) -> LLTokenizer | ValueError:
        backend = self._tokenizer.backend
        size = max(self._size, backend.get_vocab_size(with_added_tokens=True))
        try:
            return LLTokenizer(backend.to_str(), n_vocab=size, eos_token=self._eos_token_ids or None)
        except ValueError as error:
            return error
