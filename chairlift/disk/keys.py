"""Names saved prefixes by keyed hashes, so that a name tells nothing about the text.

    salt ── key 0 ──[ 64 tokens ]── key 1 ──[ 64 tokens ]── key 2 ──[ fewer ]── key of a state

A key stands for the salt and for all tokens before it, and follows from a secret of the directory. So two prompts have
a key in common only as far as they and their salts are equal, and who has another secret finds nothing.
"""

from dataclasses import dataclass
from hashlib import blake2b

from chairlift.cache.prefixes import count_tokens, cut_tokens

SEGMENT_TOKENS = 64
"""Tokens of a segment, the piece of a prefix that has a file of its own."""

KEY_BYTES = 16

_SALT, _SEGMENT, _STATE = b"salt", b"segment", b"state"  # kinds of keys, none of which equals one of another kind
_SEGMENT_BYTES = len(cut_tokens(bytes(8 * SEGMENT_TOKENS), SEGMENT_TOKENS))


@dataclass(frozen=True, slots=True)
class PrefixKeys:
    """The keys of a sequence of tokens: `ends[i]` is that of its first `i` segments."""

    tokens: bytes
    ends: tuple[bytes, ...]

    @property
    def num_segments(self) -> int:
        """Whole segments."""
        return len(self.ends) - 1


class KeyMaker:
    """Makes the keys of one cache."""

    def __init__(self, secret: bytes) -> None:
        """`secret`: of the directory and the cache in it, 32 bytes."""
        self._secret = secret

    def of_segments(self, tokens: bytes, salt: str) -> PrefixKeys:
        """Makes the keys of packed tokens, in about a microsecond for each segment."""
        ends = [self._hash(_SALT, salt.encode("utf-8", "surrogatepass"))]
        for begin in range(0, len(tokens) - _SEGMENT_BYTES + 1, _SEGMENT_BYTES):
            ends.append(self._hash(_SEGMENT, ends[-1] + tokens[begin : begin + _SEGMENT_BYTES]))
        return PrefixKeys(tokens, tuple(ends))

    def of_state(self, keys: PrefixKeys, num_tokens: int) -> bytes:
        """Makes the key of the recurrent state after the first `num_tokens` tokens, of which `keys` has all."""
        num_segments = num_tokens // SEGMENT_TOKENS
        assert num_tokens <= count_tokens(keys.tokens), "the tokens of a state are known"
        rest = cut_tokens(keys.tokens, num_tokens)[num_segments * _SEGMENT_BYTES :]
        return self._hash(_STATE, keys.ends[num_segments] + rest)

    def _hash(self, kind: bytes, content: bytes) -> bytes:
        return blake2b(content, key=self._secret, digest_size=KEY_BYTES, person=kind).digest()
