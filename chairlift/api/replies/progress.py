"""What of a growing choice has gone out, and its tokens' log-probabilities in a form that replies can dress."""

from dataclasses import dataclass
from typing import Any

from chairlift.engine.vocabulary import Vocabulary
from chairlift.params import CompletionOutput, FinishReason, RequestOutput, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token, or one that might have stood in its place."""

    spelling: bytes
    logprob: float | None  # None: of the first token of a prompt there is none

    @property
    def text(self) -> str:
        """With replacement characters where the bytes make no character by themselves."""
        return self.spelling.decode(errors="replace")

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


@dataclass(frozen=True, slots=True)
class News:
    """What a choice has more than before."""

    text: str
    positions: list[ScoredPosition]
    finish_reason: FinishReason | None


class ChoiceProgress:
    """How much of one choice has gone out. A token goes out with the first of its characters."""

    def __init__(self, vocabulary: Vocabulary, num_top: int) -> None:
        """`num_top`: how many likeliest tokens are shown at each position, if positions are scored at all."""
        self._vocabulary = vocabulary
        self._num_top = num_top
        self._num_characters = 0
        self._num_tokens = 0
        self._has_ended = False

    def advance(self, choice: CompletionOutput) -> News | None:
        """What is new in it; None if nothing is."""
        text = choice.text[self._num_characters :]
        ends_now = choice.finish_reason is not None and not self._has_ended
        if not text and not ends_now:
            return None
        self._num_characters += len(text)
        self._has_ended = self._has_ended or ends_now
        return News(text, self._new_positions(choice), choice.finish_reason)

    def _new_positions(self, choice: CompletionOutput) -> list[ScoredPosition]:
        """Without the end token and what a stop string cut off: their text would begin after the end."""
        if choice.logprobs is None or choice.text_offsets is None:
            return []
        start, offsets = self._num_tokens, choice.text_offsets
        while self._num_tokens < len(offsets) and offsets[self._num_tokens] < self._num_characters:
            self._num_tokens += 1
        return [
            _scored(choice.logprobs[i], self._num_top, offsets[i], self._vocabulary)
            for i in range(start, self._num_tokens)
        ]


def scored_prompt(output: RequestOutput, text: str, num_top: int, vocabulary: Vocabulary) -> list[ScoredPosition]:
    """A prompt's positions, if they were scored. Special tokens that its text does not show have no length in it."""
    positions: list[ScoredPosition] = []
    num_bytes, encoded = 0, text.encode()
    for token, logprobs in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=False):
        offset = len(encoded[:num_bytes].decode(errors="ignore"))
        if logprobs is None:
            positions.append(ScoredPosition(ScoredToken(vocabulary.token_bytes(token), None), [], offset))
        else:
            positions.append(_scored(logprobs, num_top, offset, vocabulary))
        spelling = positions[-1].token.spelling
        for shown in (spelling, spelling.lstrip(b" ")):  # some tokenizers put a space before the first word
            if encoded.startswith(shown, num_bytes):
                num_bytes += len(shown)
                break
    return positions


def _scored(logprobs: TokenLogprobs, num_top: int, offset: int, vocabulary: Vocabulary) -> ScoredPosition:
    """The token that stands there comes first in `logprobs`."""
    tokens = {token: ScoredToken(vocabulary.token_bytes(token), each.logprob) for token, each in logprobs.items()}
    ranked = sorted((each.rank, token) for token, each in logprobs.items() if each.rank <= num_top)
    return ScoredPosition(next(iter(tokens.values())), [tokens[token] for _, token in ranked], offset)
