"""What the token ids of a model stand for, byte by byte."""

import threading
from collections.abc import Collection

from llguidance import LLTokenizer

from chairlift.engine.tokenizer import Tokenizer


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
        self._loaded: LLTokenizer | None = None

    def load(self) -> LLTokenizer:
        """llguidance's view of the tokenizer. ValueError if it cannot read this kind."""
        with self._lock:
            if self._loaded is None:
                as_json = self._tokenizer.backend.to_str()
                self._loaded = LLTokenizer(as_json, n_vocab=self._size, eos_token=self._eos_token_ids or None)
            return self._loaded

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text; of a special token, its name."""
        return self.load().decode_bytes([token_id])
