"""The bytes of a model's tokens."""

import json
import threading
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

from llguidance import LLTokenizer
from tokenizers import Tokenizer as BackendTokenizer

from chairlift.engine.text.token_bytes import TokenBytes
from chairlift.engine.text.tokenizer import Tokenizer
from chairlift.engine.text.trial_process import open_tokenizer

_BYTE_255 = ("ÿ", "<0xFF>")  # in the alphabets of byte-level and of byte-fallback tokenizers


class Vocabulary:
    """The bytes of a model's tokens, as llguidance reads them from its tokenizer. Usable from any thread.

    It is loaded when first needed, or before the server starts: a large vocabulary takes up to a second, during which
    no other thread of the process runs.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, eos_token_ids: Collection[int]) -> None:
        """`size`: the number of tokens that the model has; the tokenizer may have more or fewer."""
        self._tokenizer = tokenizer
        self._size = size
        self.eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._loaded: LLTokenizer | None = None
        self.description = b""  # once loaded: the arguments of `open_tokenizer`, as JSON
        self.problem: ValueError | None = None  # why llguidance cannot read this kind of tokenizer

    def load(self) -> LLTokenizer | None:
        """llguidance's version of the tokenizer; None if there is a `problem`."""
        with self._lock:
            if not self.description:
                arguments = self._describe()
                self.description = json.dumps(arguments).encode()  # now, rather than between requests
                try:
                    self._loaded = open_tokenizer(arguments, partial(_encode, self._tokenizer.backend))
                except ValueError as error:
                    self.problem = error
            return self._loaded

    def _describe(self) -> dict[str, Any]:
        """Tells the bytes of all tokens, or else the whole tokenizer."""
        backend, size = self._tokenizer.backend, self._size
        told = TokenBytes.of(backend, size) if self.eos_token_ids else None
        if told is not None:
            tokens = [each.decode("latin-1") for each in told.tokens]
            return {"tokens": tokens, "special_ids": told.special_ids, "eos_token": self.eos_token_ids}
        n_vocab = max(size, backend.get_vocab_size(with_added_tokens=True))
        return {"tokenizer": backend.to_str(), "n_vocab": n_vocab, "eos_token": self.eos_token_ids or None}

    def special_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """Ids of those texts that are special tokens: a grammar must refer to these by id."""
        loaded = self.load()
        ids = {text: token for text in texts if (token := self._tokenizer.backend.token_to_id(text)) is not None}
        return {} if loaded is None else {text: token for text, token in ids.items() if loaded.is_special_token(token)}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text; for a special token, its name."""
        loaded = self.load()
        if loaded is None:
            return self._tokenizer.token_text(token_id).encode()
        spelling: bytes = loaded.decode_bytes([token_id])
        # llguidance marks special tokens with the byte 255, so it loses the token that is this byte.
        if not spelling and self._tokenizer.backend.id_to_token(token_id) in _BYTE_255:
            return b"\xff"
        return spelling


def _encode(backend: BackendTokenizer, text: str) -> list[int]:
    """Tokenizes a text. No method of `Vocabulary`: llguidance would keep that, in a cycle that is never collected."""
    ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    return ids
