"""Tells the bytes of all tokens as llguidance reads them from a tokenizer.json, of which it makes a tokenizer anew.

That takes seconds for a large vocabulary. Where llguidance has a rule more than those here, nothing is told.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer

_MARK = b"\xff"  # begins the name of a special token
_CHANGED = {"Prepend", "Metaspace"}  # types that llguidance changes in its copy, so that no space precedes a text
_LEVEL, _FALLBACK = "ByteLevel", "ByteFallback"
_BYTE_NAME, _BYTE_NAME_LENGTH = "<0x", 6
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))  # bytes that are their own characters
_OTHERS = tuple(sorted({*range(256)}.difference(_PRINTABLE)))  # whose characters follow all bytes
_LEVEL_BYTES = dict.fromkeys(_OTHERS, 0xFFFF) | {256 + place: byte for place, byte in enumerate(_OTHERS)}


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The bytes of every token, by id, and which tokens are special: their bytes are their names."""

    tokens: list[bytes]
    special_ids: list[int]

    @classmethod
    def of(cls, backend: BackendTokenizer, size: int) -> "TokenBytes | None":
        """Spells the tokens of a tokenizer, and what more a model of that size has; None if its rules are others."""
        parts = [_types_in(_state_of(part)) for part in (backend.normalizer, backend.pre_tokenizer)]
        spell = _speller_of(_state_of(backend.decoder))
        vocab, added = backend.get_vocab(with_added_tokens=True), backend.get_added_tokens_decoder()
        num_tokens = backend.get_vocab_size(with_added_tokens=True)
        if spell is None or _CHANGED & {*parts[0], *parts[1]} or max(vocab.values(), default=0) >= num_tokens:
            return None
        tokens = [b""] * num_tokens
        for name, token_id in vocab.items():
            if (spelled := spell(name)) is None:
                return None
            tokens[token_id] = spelled
        special_ids = []
        for token_id, token in added.items():
            if token.special or (token.content.startswith("<") and token.content.endswith(">")):
                special_ids.append(token_id)
                tokens[token_id] = token.content.encode()
            else:
                tokens[token_id] = tokens[token_id] or token.content.encode()
        return cls([*tokens, *(b"%b<[%d]>" % (_MARK, token) for token in range(num_tokens, size))], special_ids)


_Spell = Callable[[str], bytes | None]
"""Gives the bytes of a token by its name: none for a name without, and None for one that cannot be read."""


def _speller_of(decoder: Any) -> _Spell | None:
    types = set(_types_in(decoder))
    if _FALLBACK in types:
        space = next(_spaces_in(decoder), " ")
        return lambda name: _spell_piece(name, space)
    return _spell_in_byte_alphabet if _LEVEL in types else None


def _spell_in_byte_alphabet(name: str) -> bytes:
    try:
        return name.translate(_LEVEL_BYTES).encode("latin-1")
    except UnicodeEncodeError:  # a character that is no byte's
        return b""


def _spell_piece(name: str, space: str) -> bytes | None:
    if not name.startswith(_BYTE_NAME):
        return name.replace(space, " ").encode()
    try:
        is_byte = len(name) == _BYTE_NAME_LENGTH and name.endswith(">")
        return bytes.fromhex(name[len(_BYTE_NAME) : -1]) if is_byte else None
    except ValueError:
        return None


def _state_of(part: Any) -> Any:
    """Returns the JSON of a part of a tokenizer, or None."""
    return None if part is None else json.loads(part.__getstate__())


def _dicts_in(state: Any) -> Iterator[dict[str, Any]]:
    if isinstance(state, dict):
        yield state
    for each in state.values() if isinstance(state, dict) else state if isinstance(state, list) else ():
        yield from _dicts_in(each)


def _types_in(state: Any) -> Iterator[str]:
    return (each["type"] for each in _dicts_in(state) if isinstance(each.get("type"), str))


def _spaces_in(decoder: Any) -> Iterator[str]:
    """Yields the characters that a decoder replaces by spaces, the last one first."""
    replacing = [each for each in _dicts_in(decoder) if each.get("type") == "Replace" and each["content"] == " "]
    patterns = [each["pattern"].get("String", "") for each in reversed(replacing)]
    return (pattern for pattern in patterns if len(pattern) == 1)
