"""The log-probabilities of an answer's tokens, ready to be told."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from chairlift.engine.text.vocabulary import Vocabulary
from chairlift.params import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token, or an alternative to it."""

    token_id: int
    spelling: bytes
    logprob: float | None  # None: the first token of a prompt has none

    @property
    def text(self) -> str:
        """The text, with replacement characters where the bytes are not whole characters."""
        return self.spelling.decode(errors="replace")

    @property
    def name(self) -> str:
        """Returns the name of the token in completions: its text, or its bytes if they are not whole characters."""
        try:
            return self.spelling.decode()
        except UnicodeDecodeError:
            return self._spelled()

    def names(self) -> Iterator[str]:
        """Its name, and what to call it where other tokens are called so, best first; its id is its own."""
        yield self.name
        if self.spelling:
            yield self._spelled()
        yield f"token_id:{self.token_id}"

    def _spelled(self) -> str:
        """Its bytes, as OpenAI's API spells them."""
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.spelling)

    def as_fields(self) -> dict[str, Any]:
        """As chat completions and responses write it."""
        return {"token": self.text, "logprob": self.logprob, "bytes": list(self.spelling)}


@dataclass(frozen=True, slots=True)
class ScoredPosition:
    """The token at one position and the likeliest ones there; `offset` is where its text begins, in characters."""

    token: ScoredToken
    top: list[ScoredToken]
    offset: int

    def as_fields(self) -> dict[str, Any]:
        """As chat completions and responses write it."""
        return {**self.token.as_fields(), "top_logprobs": [each.as_fields() for each in self.top]}


def scored(logprobs: TokenLogprobs, num_top: int, offset: int, vocabulary: Vocabulary) -> ScoredPosition:
    """The token at the position comes first in `logprobs`."""
    tokens = {
        token: ScoredToken(token, vocabulary.token_bytes(token), each.logprob) for token, each in logprobs.items()
    }
    ranked = sorted((each.rank, token) for token, each in logprobs.items() if each.rank <= num_top)
    return ScoredPosition(next(iter(tokens.values())), [tokens[token] for _, token in ranked], offset)
